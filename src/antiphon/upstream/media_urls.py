"""The URLs of images, files and videos in a turn. An upstream fetches them, so they must be public."""

from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec

from antiphon.protocol.content import ComputerScreenshot, InputAudio, InputFile, InputImage, InputVideo
from antiphon.protocol.items import Item, Message
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
# Types of parts that may have a URL. The content of an unknown part is not known.
_PART_TYPES = frozenset({*_FIELDS, Unknown})
_MEDIA_TYPES = _PART_TYPES | {InputAudio}
# The field of an item with parts, or with a single part.
PART_FIELDS: dict[type, str] = {
    kind: field for kind in get_args(Item) for field in ("content", "output") if field in kind.__struct_fields__
}
_NO_PARTS = frozenset({str, type(None)})


def has_media(items: Iterable[Item | Unknown]) -> bool:
    """Return True if an item may have an image, a file, audio or video. This check is much faster than the others."""
    for item in items:
        if type(item) is Message:
            if type(item.content) is list:
                for part in item.content:
                    if type(part) in _MEDIA_TYPES:
                        return True
        elif type(item) in PART_FIELDS:
            if type(getattr(item, PART_FIELDS[type(item)])) not in _NO_PARTS:
                return True
        elif type(item) is Unknown:
            return True
    return False


def check_media_urls(items: Iterable[Item | Unknown], rules: OutboundRules) -> None:
    """Raise InvalidRequest for the first URL in these items that may not be fetched."""
    for index, item in enumerate(items):
        if type(item) is Unknown:
            _check_unknown(item, rules, f"input[{index}]")
            continue
        field = PART_FIELDS.get(type(item), "")
        parts = getattr(item, field, None)
        if type(parts) is list:
            if not _PART_TYPES.isdisjoint(map(type, parts)):
                for number, part in enumerate(parts):
                    _check_part(part, rules, f"input[{index}].{field}[{number}]")
        elif type(parts) in _PART_TYPES:
            _check_part(parts, rules, f"input[{index}].{field}")


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
