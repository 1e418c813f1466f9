"""Clipping of items: cut the middle of long texts, with a note of the number of characters cut."""

from typing import Any, TypeVar

import msgspec

from antiphon.protocol import codec
from antiphon.protocol.content import (
    ComputerScreenshot,
    InputAudio,
    InputFile,
    InputImage,
    InputText,
    InputVideo,
    OutputText,
    extract_text,
)
from antiphon.protocol.hosted import (
    ApplyPatchCallOutput,
    ImageGenerationCall,
    LocalShellCallOutput,
    McpCall,
    ProgramOutput,
    ShellCallOutput,
)
from antiphon.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
)
from antiphon.protocol.unions import Unknown

T = TypeVar("T", bound=msgspec.Struct)

_MEDIA = (InputImage, InputFile, InputAudio, InputVideo, ComputerScreenshot)
# Characters that an image or file counts as: a model's cost for it does not depend on the length of its data.
_MEDIA_SIZE = 4000
# Characters that an item counts besides its content.
_ITEM_OVERHEAD = 100


def clip_text(text: str, size: int) -> str:
    """Return the beginning and the end of a text, together at most `size` characters."""
    if len(text) <= size:
        return text
    # The longest note possible: the number cut has at most as many digits as the length.
    reserve = len(_make_note(len(text)))
    left = size - reserve
    if left < reserve:
        return text[: max(size, 0)]
    head = left * 2 // 3
    return text[:head] + _make_note(len(text) - left) + text[len(text) - (left - head) :]


def _make_note(cut: int) -> str:
    return f"\n[... {cut} characters were cut here ...]\n"


def measure_item(item: Item | Unknown) -> int:
    """Estimate the number of characters that a model reads for an item."""
    if isinstance(item, Unknown):
        return len(item.raw)
    return _ITEM_OVERHEAD + sum(_measure_value(getattr(item, name)) for name in item.__struct_fields__)


def _measure_value(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, str):
        return len(value)
    if isinstance(value, _MEDIA):
        return _MEDIA_SIZE
    if isinstance(value, list):
        return sum(map(_measure_value, value))
    text = getattr(value, "text", None)
    return len(text) if isinstance(text, str) else len(codec.encode(value))


def measure_smallest(item: Item | Unknown) -> int:
    """Estimate the number of characters of an item that is clipped as far as possible."""
    smallest = _clip_fields(item, 0)
    return measure_item(item) if smallest is None else min(measure_item(item), measure_item(smallest))


def clip_item(item: Item | Unknown, size: int) -> Item | Unknown | None:
    """Return the item clipped to about `size` characters, or None if it cannot be clipped so far."""
    if measure_item(item) <= size:
        return item
    smallest = _clip_fields(item, 0)
    if smallest is None:
        return None
    clipped = _clip_fields(item, max(size - measure_item(smallest), 0))
    # In JSON a text may be longer than its limit.
    return next(
        (each for each in (clipped, smallest) if each and measure_item(each) <= size + 2 * _ITEM_OVERHEAD), None
    )


def _clip_fields(item: Item | Unknown, size: int) -> Item | None:
    match item:
        case Message():
            kind = OutputText if item.role == "assistant" else InputText
            return _replace(item, content=[kind(_clip_content(item.content, size))])
        case FunctionCallOutput() | CustomToolCallOutput():
            return _replace(item, output=_clip_content(item.output, size))
        case FunctionCall():
            return _replace(item, arguments=_clip_arguments(item.arguments, size))
        case CustomToolCall():
            return _replace(item, input=clip_text(item.input, size))
        case ShellCallOutput():
            return _clip_shell(item, size)
        case LocalShellCallOutput() | ApplyPatchCallOutput():
            return _replace(item, output=clip_text(item.output or "", size))
        case ProgramOutput():
            return _replace(item, result=clip_text(item.result, size))
        case McpCall():
            halves = {"arguments": _clip_arguments(item.arguments, size // 2)}
            return _replace(item, output=clip_text(item.output or "", size // 2), **halves)
        case ImageGenerationCall():
            return _replace(item, result=None)
    return None


def _replace(item: T, **changes: Any) -> T:
    return msgspec.structs.replace(item, **changes)


def _clip_content(content: Any, size: int) -> str:
    """Return the clipped text of the content, with notes on the media that are dropped."""
    media = [part.type for part in content if isinstance(part, _MEDIA)] if isinstance(content, list) else []
    notes = "".join(f"\n[an {kind} was left out]" for kind in media[:4])
    return clip_text(extract_text(content), max(size - len(notes), 0)) + notes


def _clip_arguments(arguments: str, size: int) -> str:
    """Return clipped arguments that are still a JSON object, as models and upstream APIs require."""
    if len(arguments) <= size:
        return arguments
    # Quotes and line ends take two characters in JSON.
    return msgspec.json.encode({"clipped": clip_text(arguments, size // 2)}).decode()


def _clip_shell(item: ShellCallOutput, size: int) -> Item:
    each = size // max(1, 2 * len(item.output))
    output = [
        _replace(part, stdout=clip_text(part.stdout, each), stderr=clip_text(part.stderr, each)) for part in item.output
    ]
    return msgspec.structs.replace(item, output=output)
