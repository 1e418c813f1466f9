"""Mending a history that comes from elsewhere: servers refuse one with a call that has no output, for ever."""

from collections.abc import Sequence

import msgspec

from antiphon.agent.entries import JsonObject
from antiphon.protocol.items import LOST_OUTPUT

STRAY = "The result of a call that is not in this conversation:"

OUTPUTS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
"""What a call is called, and what its output is. Both have a name and a call id."""

_ANSWERS = frozenset(OUTPUTS.values())
# Nothing refers to the ids of these, and a server that did not store them would look them up in vain.
_OWN_IDS = frozenset({"message", "reasoning", *OUTPUTS, *_ANSWERS})


def mend(items: Sequence[JsonObject]) -> list[JsonObject]:
    """The history as a server takes it, with nothing of it lost.

    A call without an output gets one that says so, and an output without its call becomes a message. Only reasoning
    that led to nothing is left out: it has no meaning without what followed.
    """
    paired = _pair(items)
    mended: list[JsonObject] = []
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind in _ANSWERS and index not in paired:
            mended.append({"role": "user", "content": f"{STRAY} {_as_text(item.get('output'))}"})
            continue
        mended.append(replayable(item) if kind in _OWN_IDS else item)
        if kind in OUTPUTS and index not in paired:
            mended.append({"type": OUTPUTS[kind], "call_id": item.get("call_id"), "output": LOST_OUTPUT})
    return drop_lone_reasoning(mended)


def _pair(items: Sequence[JsonObject]) -> set[int]:
    """Where there are calls and outputs that belong together."""
    paired: set[int] = set()
    open_calls: dict[object, int] = {}
    for index, item in enumerate(items):
        kind, call_id = item.get("type", "message"), item.get("call_id")
        if kind in OUTPUTS:
            open_calls[call_id] = index
        elif kind in _ANSWERS and call_id in open_calls:
            paired |= {index, open_calls.pop(call_id)}
    return paired


def replayable(item: JsonObject) -> JsonObject:
    """An output item as input: without its id, and without what is null."""
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


def _as_text(output: object) -> str:
    return output if isinstance(output, str) else msgspec.json.encode(output).decode()
