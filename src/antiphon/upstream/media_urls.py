"""The URLs of images, files and videos in a turn. An upstream fetches them, so they must be public."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from antiphon.protocol.content import ComputerScreenshot, InputFile, InputImage, InputVideo
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.upstream.addresses import OutboundRules

# The fields of a part with a URL, and the error codes for them.
_CODES = {"image_url": "invalid_image_url", "file_url": "invalid_value", "video_url": "invalid_value"}
_FIELDS: dict[type, tuple[str, ...]] = {
    InputImage: ("image_url",),
    ComputerScreenshot: ("image_url",),
    InputFile: ("file_url", "file_data"),
    InputVideo: ("video_url",),
}
_PART_TYPES = frozenset({*_FIELDS, Unknown})


def check_media_urls(items: Iterable[Item | Unknown], rules: OutboundRules) -> None:
    """Raise InvalidRequest for the first URL in these items that may not be fetched."""
    for index, item in enumerate(items):
        if type(item) is Unknown:
            _check_unknown(item, rules, f"input[{index}]")
            continue
        kind: Any = type(item)
        for field in _list_fields(kind):
            parts = getattr(item, field)
            if type(parts) is list:
                if not _PART_TYPES.isdisjoint(map(type, parts)):
                    for number, part in enumerate(parts):
                        _check_part(part, rules, f"input[{index}].{field}[{number}]")
            elif parts is not None and type(parts) is not str:
                _check_part(parts, rules, f"input[{index}].{field}")


@functools.cache
def _list_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the fields of an item type that may have parts."""
    return tuple(name for name in ("content", "output") if name in kind.__struct_fields__)


def _check_part(part: Any, rules: OutboundRules, path: str) -> None:
    if type(part) is Unknown:
        _check_unknown(part, rules, path)
        return
    for name in _FIELDS.get(type(part), ()):
        value = getattr(part, name)
        # `file_data` is base64, but some servers accept a URL there.
        if isinstance(value, str) and (name != "file_data" or "://" in value[:16]):
            rules.check(value, f"{path}.{name}", code=_CODES.get(name, "invalid_value"))


def _check_unknown(value: Unknown, rules: OutboundRules, path: str) -> None:
    if b"_url" in value.raw:
        for name, url, where in _find_urls(msgspec.json.decode(value.raw), path):
            rules.check(url, where, code=_CODES[name])


def _find_urls(value: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, value and path of each field with a URL, in JSON of any form."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _find_urls(inner, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, inner in value.items():
            where = f"{path}.{name}"
            if name in _CODES:
                url = inner.get("url") if isinstance(inner, dict) else inner  # Chat Completions nests it
                if isinstance(url, str):
                    yield name, url, where
            else:
                yield from _find_urls(inner, where)
