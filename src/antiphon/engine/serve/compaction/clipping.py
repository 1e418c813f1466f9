"""Making items smaller without making them something else: the middle of a long text goes, with a note of how much."""

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
# What a model reads for an image does not depend on how long its data is.
_MEDIUM_SIZE = 4000
_FRAME_SIZE = 100


def clip_text(text: str, size: int) -> str:
    """At most so many characters of a text: its beginning and its end."""
    if len(text) <= size:
        return text
    # The number of what is gone has at most as many digits as that of what there was.
    reserve = len(_note(len(text)))
    room = size - reserve
    if room < reserve:
        return text[: max(size, 0)]
    head = room * 2 // 3
    return text[:head] + _note(len(text) - room) + text[len(text) - (room - head) :]


def _note(cut: int) -> str:
    return f"\n[... {cut} characters were cut here ...]\n"


def measure_item(item: Item | Unknown) -> int:
    """About how many characters a model reads for an item."""
    if isinstance(item, Unknown):
        return len(item.raw)
    return _FRAME_SIZE + sum(_measure(getattr(item, name)) for name in item.__struct_fields__)


def _measure(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, str):
        return len(value)
    if isinstance(value, _MEDIA):
        return _MEDIUM_SIZE
    if isinstance(value, list):
        return sum(map(_measure, value))
    text = getattr(value, "text", None)
    return len(text) if isinstance(text, str) else len(codec.encode(value))


def measure_smallest(item: Item | Unknown) -> int:
    """About how many characters are left of an item that is made as small as it can be."""
    smallest = _clip(item, 0)
    return measure_item(item) if smallest is None else min(measure_item(item), measure_item(smallest))


def clip_item(item: Item | Unknown, size: int) -> Item | Unknown | None:
    """The item with about so many characters at most, or None if it cannot be made so small and stay what it is."""
    if measure_item(item) <= size:
        return item
    smallest = _clip(item, 0)
    if smallest is None:
        return None
    clipped = _clip(item, max(size - measure_item(smallest), 0))
    # Text may take more in JSON than it was given.
    return next((each for each in (clipped, smallest) if each and measure_item(each) <= size + 2 * _FRAME_SIZE), None)


def _clip(item: Item | Unknown, size: int) -> Item | None:
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
    """The text alone, clipped. What is no text is too large as well, or the whole would have fitted."""
    media = [part.type for part in content if isinstance(part, _MEDIA)] if isinstance(content, list) else []
    notes = "".join(f"\n[an {kind} was left out]" for kind in media[:4])
    return clip_text(extract_text(content), max(size - len(notes), 0)) + notes


def _clip_arguments(arguments: str, size: int) -> str:
    """Arguments stay a JSON object: models and upstream APIs refuse anything else."""
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
