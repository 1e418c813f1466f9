"""What a model says in a turn, and the answer that it comes to, whatever its server makes of the form."""

from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from antiphon.agent.entries import JsonObject
from antiphon.agent.history import OUTPUTS, drop_lone_reasoning, has_lone_call, is_call, replayable
from antiphon.protocol.events import (
    Event,
    OutputTextDelta,
    ReasoningSummaryTextDelta,
    ReasoningTextDelta,
)
from antiphon.protocol.json_text import read_json
from antiphon.protocol.open import Unknown
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage


class Spoken(Struct, frozen=True):
    """A piece of what the model says while it says it."""

    kind: Literal["text", "reasoning"]
    text: str


class Remark(Struct, frozen=True):
    """Something about the turn that a person should know."""

    text: str


class Waste(Struct, frozen=True):
    """What an attempt took that came to nothing."""

    usage: Usage


class Answer(Struct, frozen=True):
    """A whole turn: its output as items that can be sent back. `cut` is why it was cut off, if it was.

    `continues` says whether the server that gave it can go on from it: not if its output had to be put in order.
    `unsealed` says that the sealed reasoning before it could not be read, and was left out.
    """

    response_id: str
    output: list[JsonObject]
    usage: Usage
    cut: str = ""
    continues: bool = True
    unsealed: bool = False


Turn = AsyncGenerator["Spoken | Remark | Waste | Answer", None]


def hear(event: Event | Unknown) -> Spoken | None:
    """What the model says with this event, if it says something."""
    if isinstance(event, OutputTextDelta):
        return Spoken("text", event.delta)
    if isinstance(event, ReasoningTextDelta | ReasoningSummaryTextDelta):
        return Spoken("reasoning", event.delta)
    if isinstance(event, Unknown) and event.type in _SPOKEN:
        # One that we know, though not in this form: a server may leave out what we do not need.
        return Spoken(_SPOKEN[event.type], str(read_json(event.raw).get("delta") or ""))
    return None


_SPOKEN: dict[str, Literal["text", "reasoning"]] = {
    "response.output_text.delta": "text",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
}


def make_answer(response: JsonObject) -> Answer:
    """The answer in a response. What the model did not get to the end of cannot be done, nor be shown to it again."""
    cut = _find_cut(response)
    given = [item for item in response["output"] if isinstance(item, dict)]
    output = [replayable(item) for item in given if not (cut and _is_torn(item))]
    named_apart = _name_apart(output)
    kept = drop_lone_reasoning(output)
    return Answer(
        str(response.get("id") or ""),
        kept,
        read_usage(response.get("usage")),
        cut,
        len(kept) == len(given) and not named_apart and not has_lone_call(kept),
    )


def _find_cut(response: JsonObject) -> str:
    if response.get("status") != "incomplete":
        return ""
    details = response.get("incomplete_details")
    return str((details.get("reason") if isinstance(details, dict) else None) or "incomplete")


def _is_torn(item: JsonObject) -> bool:
    """Whether it is a call that was cut off."""
    if item.get("type") != "function_call":
        return is_call(item) and item.get("status") in ("incomplete", "in_progress")
    try:
        read_json(item.get("arguments") or "{}")
    except (msgspec.DecodeError, TypeError):
        return True
    return item.get("status") == "incomplete"


def _name_apart(output: list[JsonObject]) -> bool:
    """Give every call an id of its own. Returns whether one had to be changed."""
    taken: set[str] = set()
    changed = False
    for item in output:
        if item.get("type") not in OUTPUTS:
            continue
        call_id = str(item.get("call_id") or "")
        if not call_id or call_id in taken:
            call_id = f"{call_id or 'call'}_{len(taken) + 1}"
            changed = True
        taken.add(call_id)
        item["call_id"] = call_id
        item.setdefault("name", "")
    return changed


def read_usage(usage: Any) -> Usage:
    """Leniently: a run that may use up only so many tokens has to know them, whatever else is missing."""
    if not isinstance(usage, dict):
        return Usage(0, 0, 0)
    read = _count(usage, "input_tokens", "prompt_tokens")
    said = _count(usage, "output_tokens", "completion_tokens")
    cached = _count(usage.get("input_tokens_details"), "cached_tokens")
    thought = _count(usage.get("output_tokens_details"), "reasoning_tokens")
    total = _count(usage, "total_tokens") or read + said
    details = InputTokensDetails(cached), OutputTokensDetails(thought)
    return Usage(read, said, total, *details, estimated=usage.get("estimated") is True)


def _count(usage: Any, *names: str) -> int:
    found = [usage.get(name) for name in names] if isinstance(usage, dict) else []
    return next((count for count in found if isinstance(count, int)), 0)
