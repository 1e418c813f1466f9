"""Items and content parts of unknown types: refuse those of other APIs, and warn about the rest.

A backend that forwards items sends unknown ones unchanged. All other backends send them to the model as JSON.
"""

from collections.abc import Iterator, Sequence

from antiphon.errors import InvalidRequest
from antiphon.protocol.content import PARTS
from antiphon.protocol.items import ITEMS, Item
from antiphon.protocol.unions import Unknown
from antiphon.upstream.media_urls import PART_FIELDS

# Parts of Chat Completions, of the Messages API and of MCP, each with its equivalent.
_FOREIGN_PARTS = {
    "image_url": "a part of type 'input_image'",
    "image": "a part of type 'input_image'",
    "image_file": "a part of type 'input_image'",
    "file": "a part of type 'input_file'",
    "document": "a part of type 'input_file'",
    "audio": "a part of type 'input_audio'",
    "audio_url": "a part of type 'input_audio'",
    "video_url": "a part of type 'input_video'",
    "tool_use": "an item of type 'function_call'",
    "tool_call": "an item of type 'function_call'",
    "tool_result": "an item of type 'function_call_output'",
    "thinking": "an item of type 'reasoning'",
    "redacted_thinking": "an item of type 'reasoning'",
}


def check_unknown_types(items: Sequence[Item | Unknown], *, param: str = "input", is_forwarded: bool) -> list[str]:
    """Raise InvalidRequest for an item or part of another API. Return a warning if the model gets others as JSON."""
    others: list[str] = []
    for index, item in enumerate(items):
        if type(item) is Unknown:
            _check_item(item, f"{param}[{index}]")
            others.append(f"{param}[{index}]")
            continue
        for path, part in _list_unknown_parts(item, f"{param}[{index}]"):
            _check_part(part, path)
            others.append(path)
    if not others or is_forwarded:
        return []
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return [f"{others[0]}{more}: the type is unknown, so the model gets the JSON as text"]


def _list_unknown_parts(item: Item | Unknown, path: str) -> Iterator[tuple[str, Unknown]]:
    field = PART_FIELDS.get(type(item), "")
    parts = getattr(item, field, None)
    if isinstance(parts, list):
        for index, part in enumerate(parts):
            if type(part) is Unknown:
                yield f"{path}.{field}[{index}]", part


def _check_item(item: Unknown, path: str) -> None:
    if item.type in PARTS.members:
        raise _make_error(item.type, path, "it belongs into the 'content' of a message")
    if item.type in _FOREIGN_PARTS:
        raise _make_error(item.type, path, f"use {_FOREIGN_PARTS[item.type]}")


def _check_part(part: Unknown, path: str) -> None:
    if part.type in _FOREIGN_PARTS:
        raise _make_error(part.type, path, f"use {_FOREIGN_PARTS[part.type]}")
    if part.type in ITEMS.members:
        raise _make_error(part.type, path, "it is an item of its own, not a content part")


def _make_error(sent: str, path: str, advice: str) -> InvalidRequest:
    where = f"{path}.type"
    return InvalidRequest(
        f"Invalid value for '{where}': '{sent}' is not allowed here: {advice}.",
        param=where,
        code="invalid_value",
    )
