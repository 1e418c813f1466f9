"""The answer of a model in one turn: its deltas, from the events of the server, and the whole, from the response."""

from collections.abc import AsyncGenerator, Collection, Sequence
from itertools import count
from typing import Literal

import msgspec
from msgspec import Struct

from antiphon.agent.history import (
    OUTPUT_TYPES,
    drop_lone_reasoning,
    find_native_calls,
    has_unsupported_call,
    is_call,
    to_input_item,
)
from antiphon.protocol.events import (
    CustomToolCallInputDelta,
    Event,
    FunctionCallArgumentsDelta,
    OutputItemAdded,
    OutputTextDelta,
    ReasoningSummaryTextDelta,
    ReasoningTextDelta,
)
from antiphon.protocol.items import CustomToolCall, FunctionCall
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.protocol.response import Usage
from antiphon.protocol.unions import Unknown
from antiphon.upstream.usage import parse_usage

DeltaKind = Literal["text", "reasoning"]

_DELTA_KINDS: dict[type[Event], DeltaKind] = {
    OutputTextDelta: "text",
    ReasoningTextDelta: "reasoning",
    ReasoningSummaryTextDelta: "reasoning",
}
_DELTA_KINDS_BY_NAME = {str(event.__struct_config__.tag): kind for event, kind in _DELTA_KINDS.items()}
_CALL_EVENTS = {
    str(event.__struct_config__.tag): event
    for event in (OutputItemAdded, FunctionCallArgumentsDelta, CustomToolCallInputDelta)
}


class ModelDelta(Struct, frozen=True, gc=False):
    """A piece of text or reasoning."""

    kind: DeltaKind
    text: str


class CallDelta(Struct, frozen=True, gc=False):
    """A piece of the arguments of a tool call."""

    call_id: str
    name: str
    text: str


class RawModelEvent(Struct, frozen=True):
    """An event of the server, unchanged."""

    event: Event | Unknown


class ModelNotice(Struct, frozen=True):
    """A message about the turn, for people."""

    text: str


class FailedAttempt(Struct, frozen=True):
    """The usage of an attempt that failed."""

    usage: Usage


class ModelAnswer(Struct, frozen=True):
    """The result of a turn. `output` are items that can be sent back.

    `incomplete_reason` is set if the answer was cut off. `can_continue` is False if the server cannot continue the
    response by its id, because the output was changed here. `drops_encrypted` is True if the server could not decrypt
    earlier reasoning. `native_calls` are the ids of calls, other than those of functions, that the agent runs.
    """

    response_id: str
    output: list[JsonObject]
    usage: Usage
    incomplete_reason: str = ""
    can_continue: bool = True
    drops_encrypted: bool = False
    native_calls: Sequence[str] = ()


AnyDelta = ModelDelta | CallDelta | RawModelEvent
TurnPart = Sequence[AnyDelta] | ModelNotice | FailedAttempt | ModelAnswer
"""The deltas that were received together are one element."""

TurnStream = AsyncGenerator[TurnPart, None]


def read_delta(event: Event | Unknown) -> ModelDelta | None:
    """Return the text or reasoning in an event, if it has any."""
    if not isinstance(event, Unknown):
        kind = _DELTA_KINDS.get(type(event))
        return None if kind is None else ModelDelta(kind, event.delta)  # type: ignore[attr-defined]
    kind = _DELTA_KINDS_BY_NAME.get(event.type)
    # A known event that lacks fields of the API which are not needed here.
    return None if kind is None else ModelDelta(kind, str(read_json(event.raw).get("delta") or ""))


class ArgumentsReader:
    """Reads the arguments of tool calls while the model writes them. A call is identified by its output index."""

    def __init__(self) -> None:
        self._calls: dict[object, tuple[str, str]] = {}

    def read(self, event: Event | Unknown) -> CallDelta | None:
        """Return the part of the arguments in an event, if it has one."""
        if isinstance(event, Unknown):
            # A known event that lacks fields of the API which are not needed here.
            return self._read_payload(read_json(event.raw)) if event.type in _CALL_EVENTS else None
        if isinstance(event, OutputItemAdded):
            item = event.item
            if isinstance(item, FunctionCall | CustomToolCall):
                self._calls[event.output_index] = item.call_id, item.name
            elif isinstance(item, Unknown):
                self._read_payload({"output_index": event.output_index, "item": read_json(item.raw)})
        elif isinstance(event, FunctionCallArgumentsDelta | CustomToolCallInputDelta):
            return CallDelta(*self._calls.get(event.output_index, ("", "")), event.delta)
        return None

    def _read_payload(self, payload: JsonObject) -> CallDelta | None:
        index, item = payload.get("output_index"), payload.get("item")
        if isinstance(item, dict):
            self._calls[index] = str(item.get("call_id") or ""), str(item.get("name") or "")
            return None
        return CallDelta(*self._calls.get(index, ("", "")), str(payload.get("delta") or ""))


def make_answer(response: JsonObject, native_types: Collection[str] = ()) -> ModelAnswer:
    """Return the answer in a response. Calls that were cut off are dropped: they can neither run nor be sent back.

    `native_types` are the types of calls, other than those of functions, that the agent runs.
    """
    incomplete_reason = _find_incomplete_reason(response)
    items = [item for item in response["output"] if isinstance(item, dict)]
    output = [to_input_item(item) for item in items if not (incomplete_reason and _is_cut_off(item))]
    has_new_ids = _make_call_ids_unique(output, native_types)
    sendable = drop_lone_reasoning(output)
    native_calls = find_native_calls(sendable, native_types) if native_types else ()
    return ModelAnswer(
        str(response.get("id") or ""),
        sendable,
        parse_usage(response.get("usage")) or Usage(0, 0, 0),
        incomplete_reason,
        len(sendable) == len(items) and not has_new_ids and not has_unsupported_call(sendable, native_calls),
        native_calls=native_calls,
    )


def _find_incomplete_reason(response: JsonObject) -> str:
    if response.get("status") != "incomplete":
        return ""
    details = response.get("incomplete_details")
    return str((details.get("reason") if isinstance(details, dict) else None) or "incomplete")


def _is_cut_off(item: JsonObject) -> bool:
    """Return True for a call that was cut off."""
    if item.get("type") != "function_call":
        return is_call(item) and item.get("status") in ("incomplete", "in_progress")
    try:
        read_json(item.get("arguments") or "{}")
    except (msgspec.DecodeError, TypeError):
        return True
    return item.get("status") == "incomplete"


def _make_call_ids_unique(output: list[JsonObject], native_types: Collection[str]) -> bool:
    """Give every call an id of its own, without "/". Return True if an id was changed."""
    taken: set[str] = set()
    changed = False
    for item in output:
        if item.get("type") not in OUTPUT_TYPES and item.get("type") not in native_types:
            continue
        call_id = str(item.get("call_id") or "")
        # The ids of a subagent's calls are joined with "/": see `subagents.py`.
        if not call_id or call_id in taken or "/" in call_id:
            call_id = _make_new_id(call_id.replace("/", "_") or "call", taken)
            changed = True
        taken.add(call_id)
        item["call_id"] = call_id
        if item["type"] in OUTPUT_TYPES:
            item.setdefault("name", "")
    return changed


def _make_new_id(call_id: str, taken: set[str]) -> str:
    numbered = (f"{call_id}_{number}" for number in count(len(taken) + 1))
    return next(each for each in numbered if each not in taken)
