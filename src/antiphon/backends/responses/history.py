"""The items of a turn as another server takes them."""

import functools
from collections.abc import Iterable, Sequence

import msgspec

from antiphon.backends.upstream.arguments import write_arguments
from antiphon.protocol.content import InputText, OutputText, Part, ReasoningText, Text, text_of
from antiphon.protocol.hosted import LocalShellCallOutput
from antiphon.protocol.items import CustomToolCallOutput, FunctionCall, FunctionCallOutput, Item, Message, Reasoning
from antiphon.protocol.open import Unknown

# What is ours alone: the ids under which we know items, what became of them, and who made them.
_OURS = ("id", "status", "created_by")
_TEXTS = (InputText, OutputText, Text)


def write_items(items: Iterable[Item | Unknown], *, ids: bool, reasoning_text: bool) -> list[Item | Unknown]:
    """The items without what is ours alone; `ids` says whether theirs are sent nevertheless."""
    written = (_write(item, ids=ids, reasoning_text=reasoning_text) for item in items)
    return [item for item in written if item is not None]


def _write(item: Item | Unknown, *, ids: bool, reasoning_text: bool) -> Item | Unknown | None:
    match item:
        case Unknown():
            return item
        case Message() if not isinstance(item.content, str):
            item = msgspec.structs.replace(item, content=[_write_part(part, item.role) for part in item.content])
        case FunctionCall():
            item = msgspec.structs.replace(item, arguments=write_arguments(item.arguments))
        case FunctionCallOutput() | CustomToolCallOutput() if not isinstance(item.output, str):
            item = _write_output(item)
        case LocalShellCallOutput():  # the API knows it by the id of its call
            item = msgspec.structs.replace(item, id=item.call_id, named_call=None)
        case Reasoning():
            kept = _write_reasoning(item, reasoning_text=reasoning_text)
            if kept is None:
                return None
            item = kept
        case _:
            pass
    left_out = dict.fromkeys(_find_ours(type(item), ids=ids))
    return msgspec.structs.replace(item, **left_out) if left_out else item


@functools.cache
def _find_ours(kind: type[msgspec.Struct], *, ids: bool) -> Sequence[str]:
    """The fields to leave out. What the API asks for, stays: there, any id will do."""
    optional = {field.name for field in msgspec.structs.fields(kind) if field.default is None}
    return [name for name in _OURS if name in optional and not (ids and name == "id")]


def _write_part(part: Part | Unknown, role: str) -> Part | Unknown:
    if not isinstance(part, Text):
        return part
    return OutputText(part.text) if role == "assistant" else InputText(part.text)


def _write_output(item: FunctionCallOutput | CustomToolCallOutput) -> FunctionCallOutput | CustomToolCallOutput:
    """Text alone goes as a string, which every server takes; pictures and files need their parts."""
    parts = item.output
    assert not isinstance(parts, str)
    if all(isinstance(part, _TEXTS) for part in parts):
        return msgspec.structs.replace(item, output=text_of(parts))
    return msgspec.structs.replace(item, output=[_write_part(part, "user") for part in parts])


def _write_reasoning(item: Reasoning, *, reasoning_text: bool) -> Reasoning | None:
    """Reasoning that would say nothing is left out."""
    content = item.content
    if not reasoning_text and any(isinstance(part, ReasoningText) for part in content or ()):
        content = None
    if not (content or item.summary or item.encrypted_content):
        return None
    return msgspec.structs.replace(item, content=content)
