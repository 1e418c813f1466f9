"""Mending a history that comes from elsewhere: servers refuse one with a call that has no output, for ever."""

from collections.abc import Hashable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from antiphon.errors import AntiphonError, InvalidRequest
from antiphon.protocol.items import LOST_OUTPUT
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.base import ToolInvocation

STRAY = "The result of a call that is not in this conversation:"
UNANSWERED = "The model has made this call:"

OUTPUTS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
"""What a call is called that a run makes itself, and what its output is. Both have a name and a call id."""

_PAIRS = {
    **OUTPUTS,
    "computer_call": "computer_call_output",
    "shell_call": "shell_call_output",
    "local_shell_call": "local_shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
    "tool_search_call": "tool_search_output",
}
"""All calls that have their output from a client, if it is not the server's to make them."""

_ANSWERS = frozenset(_PAIRS.values())
# Nothing refers to the ids of these, and a server that did not store them would look them up in vain.
_OWN_IDS = frozenset({"message", "reasoning", *OUTPUTS, *OUTPUTS.values()})


def mend(items: Sequence[JsonObject]) -> list[JsonObject]:
    """The history as a server takes it, with nothing of it lost.

    A call without an output gets one that says so, or becomes a message if there is no honest one: nobody has seen
    the screen. An output without its call becomes a message, too. Only reasoning that led to nothing is left out: it
    has no meaning without what followed.
    """
    paired = _pair(items)
    mended: list[JsonObject] = []
    for index, item in enumerate(items):
        if index in paired or _find_key(item) is None:
            mended.append(replayable(item))
        elif item["type"] in OUTPUTS:
            lost = {"type": OUTPUTS[item["type"]], "call_id": item.get("call_id"), "output": LOST_OUTPUT}
            mended += [replayable(item), lost]
        else:
            mended.append({"role": "user", "content": _tell(item)})
    return drop_lone_reasoning(mended)


def is_call(item: JsonObject) -> bool:
    return item.get("type") in _PAIRS


def has_lone_call(items: Sequence[JsonObject]) -> bool:
    """Whether there is a call that neither the server nor a run of ours makes."""
    paired = _pair(items)
    lone = (item for index, item in enumerate(items) if index not in paired and _find_key(item) is not None)
    return any(item["type"] not in OUTPUTS for item in lone)


def _pair(items: Sequence[JsonObject]) -> set[int]:
    """Where there are calls and outputs that belong together."""
    paired: set[int] = set()
    open_calls: dict[Hashable, int] = {}
    for index, item in enumerate(items):
        key = _find_key(item)
        if key is None:
            continue
        if item["type"] in _PAIRS:
            open_calls[key] = index
        elif key in open_calls:
            paired |= {index, open_calls.pop(key)}
    return paired


def _find_key(item: JsonObject) -> Hashable | None:
    """What a call and its output have in common; None for what is neither, or has nothing to be paired with."""
    kind = item.get("type")
    answer = _PAIRS.get(kind, kind if kind in _ANSWERS else None) if isinstance(kind, str) else None
    if answer is None:
        return None
    call_id = item.get("call_id")
    if kind == "local_shell_call_output":  # as the API has it, its own id is that of the call
        call_id = call_id or item.get("id")
    # A search for tools that the server has made names no call.
    return None if call_id is None and answer == "tool_search_output" else (answer, str(call_id))


def replayable(item: JsonObject) -> JsonObject:
    """An output item as input: without its id, and without what is null, where servers can do without that."""
    if item.get("type") not in _OWN_IDS and "role" not in item:
        return item
    return {name: value for name, value in item.items() if name not in ("id", "status") and value is not None}


def is_hollow(item: JsonObject) -> bool:
    """Reasoning of which only a server that has stored it knows what it was."""
    return item.get("type") == "reasoning" and not item.get("encrypted_content") and not item.get("content")


def drop_lone_reasoning(items: Sequence[JsonObject]) -> list[JsonObject]:
    """Without the reasoning after which the model said and did nothing."""
    kept: list[JsonObject] = []
    led_to_something = False
    for item in reversed(items):
        kind = item.get("type", "message")
        if kind != "reasoning":
            told = kind in _ANSWERS or (kind == "message" and item.get("role", "assistant") != "assistant")
            led_to_something = not told
        elif not led_to_something:
            continue
        kept.append(item)
    return kept[::-1]


def since_compaction(items: Sequence[JsonObject]) -> Sequence[JsonObject]:
    """What a server that has compacted the history still needs of it: the rules, and what comes from there on."""
    last = max((index for index, item in enumerate(items) if item.get("type") == "compaction"), default=None)
    if last is None:
        return items
    rules = [item for item in items[:last] if item.get("role") in ("system", "developer")]
    return [*rules, *items[last:]]


def _tell(item: JsonObject) -> str | list[JsonObject]:
    """A call or an output that has lost the other, in words. Pictures stay pictures."""
    if item["type"] in _PAIRS:
        told = {name: value for name, value in item.items() if name not in ("id", "status", "call_id")}
        return f"{UNANSWERED} {_as_text(told)}\n{LOST_OUTPUT}"
    output = item.get("output", item.get("tools"))
    parts = _find_parts(output)
    if parts:
        return [{"type": "input_text", "text": STRAY}, *parts]
    return f"{STRAY} {_as_text(item.get('status') if output is None else output)}"


def _find_parts(output: Any) -> list[JsonObject]:
    """The output as content of a message of the user, if it is of that kind."""
    if isinstance(output, dict) and output.get("type") == "computer_screenshot":
        given = {name: output[name] for name in ("image_url", "file_id", "detail") if output.get(name)}
        return [{"type": "input_image", **given}]
    parts = output if isinstance(output, list) else []
    fits = all(isinstance(part, dict) and str(part.get("type")).startswith("input_") for part in parts)
    return parts if fits else []


def _as_text(output: object) -> str:
    return output if isinstance(output, str) else msgspec.json.encode(output).decode()


def list_calls(output: Sequence[JsonObject]) -> list[JsonObject]:
    """The calls among these items that can be answered: one that was cut off cannot."""
    return [item for item in output if item.get("type") in OUTPUTS and item.get("status") != "incomplete"]


def as_call(item: JsonObject) -> ToolInvocation:
    arguments = item.get("arguments", item.get("input", ""))
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolInvocation(str(item.get("call_id", "")), str(item.get("name", "")), text)


def make_output(call: JsonObject, output: str | list[JsonObject]) -> JsonObject:
    """The item that answers a call."""
    return {"type": OUTPUTS[call["type"]], "call_id": call["call_id"], "output": output}


SEALED = "reasoning.encrypted_content"
"""What a request includes so that the reasoning can be sent back."""

LOST = "The server cannot read the reasoning of earlier turns any more. The conversation goes on without it."

_UNREADABLE = "invalid_encrypted_content"
_UNSUPPORTED = "encrypted content is not supported"


class Sealing(Struct):
    """Whether a model has refused to seal its reasoning. It is not asked to again."""

    refused: bool = False


def refuses_to_seal(error: AntiphonError) -> bool:
    """Whether the model would answer, if only it were not asked to seal its reasoning."""
    if error.type != InvalidRequest.type:
        return False
    # Servers in between may lose which parameter it was about.
    about = (error.param or "").startswith("include") or SEALED in error.message
    return about or _UNSUPPORTED in error.message.lower()


def cannot_open(error: AntiphonError) -> bool:
    """Whether the server cannot read what was sealed: with a key that it has no more, or for somebody else."""
    return error.code == _UNREADABLE


def is_sealed(item: JsonObject) -> bool:
    return item.get("type") == "reasoning" and bool(item.get("encrypted_content"))


def unseal(items: Sequence[JsonObject]) -> list[JsonObject]:
    """Without what was sealed: of that reasoning stays what anybody can read."""
    kept: list[JsonObject] = []
    for item in items:
        if is_sealed(item):
            open_part = {name: value for name, value in item.items() if name != "encrypted_content"}
            kept += [] if is_hollow(open_part) else [open_part]
        else:
            kept.append(item)
    return kept
