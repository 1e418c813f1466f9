"""Rules for the items of a conversation: calls and their outputs belong together, parts say what they hold."""

from collections.abc import Sequence

from antiphon.backends.base import Capabilities
from antiphon.errors import InvalidRequest, UnsupportedParameter
from antiphon.protocol.content import InputAudio, InputFile, InputImage, InputVideo, text_of
from antiphon.protocol.hosted import (
    ApplyPatchCall,
    ApplyPatchCallOutput,
    ComputerCall,
    ComputerCallOutput,
    LocalShellCall,
    LocalShellCallOutput,
    ShellCall,
    ShellCallOutput,
    ToolSearchCall,
    ToolSearchOutput,
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

# Tuples: asking isinstance about a union takes several times as long, and every item is asked.
# A search for tools that the server carried out has no call id: there is nothing to pair.
CALLS = (FunctionCall, CustomToolCall, ComputerCall, ShellCall, LocalShellCall, ApplyPatchCall, ToolSearchCall)
OUTPUTS = (
    FunctionCallOutput,
    CustomToolCallOutput,
    ComputerCallOutput,
    ShellCallOutput,
    LocalShellCallOutput,
    ApplyPatchCallOutput,
    ToolSearchOutput,
)
# Most items are neither, and a set is the quickest to say so.
_PAIRED = frozenset((*CALLS, *OUTPUTS))


def check_pairs(items: Sequence[Item | Unknown]) -> None:
    """Raise unless every output follows its call and every call has its output. One that was cut off need not."""
    owed: dict[str, str] = {}
    cut: set[str] = set()
    answered: set[str] = set()
    for item in (item for item in items if type(item) in _PAIRED):
        if isinstance(item, CALLS):
            if item.call_id is not None:
                if item.call_id in owed:
                    raise InvalidRequest(f"More than one {_noun(item)} with call_id {item.call_id}.", param="input")
                if item.status == "incomplete":
                    cut.add(item.call_id)
                else:
                    owed[item.call_id] = _noun(item)
        elif isinstance(item, OUTPUTS) and item.call_id is not None:
            if owed.pop(item.call_id, None) is None and item.call_id not in cut:
                found = "More than one output" if item.call_id in answered else "No tool call"
                raise InvalidRequest(f"{found} found for {_noun(item)} with call_id {item.call_id}.", param="input")
            cut.discard(item.call_id)
            answered.add(item.call_id)
    for call_id, noun in owed.items():
        raise InvalidRequest(f"No tool output found for {noun} {call_id}.", param="input")


def find_answered(items: Sequence[Item | Unknown]) -> set[str]:
    """The calls before these items that are answered among them: an output answers the latest call with its id."""
    asked: set[str] = set()
    answered: set[str] = set()
    for item in (item for item in items if type(item) in _PAIRED):
        if isinstance(item, CALLS):
            if item.call_id is not None:
                asked.add(item.call_id)
        elif isinstance(item, OUTPUTS) and item.call_id is not None and item.call_id not in asked:
            answered.add(item.call_id)
    return answered


def read_words(item: Item | Unknown) -> tuple[str, ...]:
    """What an item says, as far as it is words."""
    if isinstance(item, Message):
        return item.role, text_of(item.content)
    if isinstance(item, (FunctionCallOutput, CustomToolCallOutput, LocalShellCallOutput)):
        return (text_of(item.output),)
    return (item.call_id,) if isinstance(item, CALLS) and item.call_id is not None else ()


def _noun(item: Item) -> str:
    return item.type.replace("_", " ")


def check_input(items: Sequence[Item | Unknown], capabilities: Capabilities, model: str) -> None:
    """Raise on new items that this model cannot take, naming the place."""
    for index, item in enumerate(items):
        field = _HOLDING_PARTS.get(type(item))
        parts = "" if field is None else getattr(item, field)
        if not isinstance(parts, str) and not _MEDIA.keys().isdisjoint(map(type, parts)):
            _check_media(parts, capabilities, model, f"input[{index}].{field}")


def _check_media(parts: Sequence[object], capabilities: Capabilities, model: str, path: str) -> None:
    for index, part in enumerate(parts):
        medium = _MEDIA.get(type(part))
        if medium is None:
            continue
        where = f"{path}[{index}]"
        if isinstance(part, InputImage):
            _require_one(part, ("image_url", "file_id"), where)
        elif isinstance(part, InputFile):
            _require_one(part, ("file_data", "file_url", "file_id"), where)
        if not getattr(capabilities, medium):
            raise UnsupportedParameter(f"The model '{model}' cannot read {medium}.", param=where)


# What may hold parts, and in which field.
_HOLDING_PARTS: dict[type, str] = {Message: "content", FunctionCallOutput: "output", CustomToolCallOutput: "output"}
# What parts hold: the word for it is also the name of the capability.
_MEDIA: dict[type, str] = {InputImage: "images", InputFile: "files", InputAudio: "audio", InputVideo: "video"}


def _require_one(part: InputImage | InputFile, names: tuple[str, ...], path: str) -> None:
    given = [name for name in names if getattr(part, name) is not None]
    if len(given) != 1:
        choices = " or ".join(f"'{name}'" for name in names)
        found = "none" if not given else " and ".join(f"'{name}'" for name in given)
        raise InvalidRequest(f"Exactly one of {choices} is required, not {found}.", param=path, code="invalid_value")
