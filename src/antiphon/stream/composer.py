"""Turn a backend's deltas into the events of a response.

The composer assigns ids, indexes, sequence numbers and order. It has no clock, no randomness and no I/O: `new_id` and
`now` are passed in. `start` returns the first lifecycle events, `compose` turns each batch of deltas into events, and
`Finish` or `Failure` ends the response with exactly one terminal event.

At most one *text item* (a message or reasoning) is open at a time, and any new item closes it. Any number of tool calls
and passthrough items can be open besides, because backends interleave them. They are closed by `CloseItem`, or else at
the end of the turn. A new call closes the only open one if that has complete arguments and no `CloseItem` of its own.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from antiphon.protocol import events
from antiphon.protocol.events import Event
from antiphon.protocol.hosted import ShellCall
from antiphon.protocol.items import Item, OutputItem
from antiphon.protocol.response import IncompleteDetails, Response, ResponseError, Usage
from antiphon.protocol.unions import Unknown, copy_struct
from antiphon.stream import deltas
from antiphon.stream.closed_items import ClosedItem, OpenDraft, choose_ending, close_draft, make_call_id, salvage_items
from antiphon.stream.deltas import Delta
from antiphon.stream.drafts import (
    CallDraft,
    CustomCallDraft,
    Ending,
    MessageDraft,
    ReasoningDraft,
    compose_command_events,
)
from antiphon.stream.limits import MEASURED, AnswerLimits, measure_delta
from antiphon.stream.passthrough import (
    ID_PREFIXES,
    PassthroughDraft,
    get_call_id,
    get_sequence_number,
    replace_ids,
    rewrite_event,
)
from antiphon.stream.plain_answers import EVENT_COUNT, find_plain_answer
from antiphon.stream.tool_usage import add_tool_usage

S = TypeVar("S", MessageDraft, ReasoningDraft)
Key = int | str | None

INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter", "steered": "steered"}
_DEFAULT_LIMITS = AnswerLimits()


class IllegalDelta(Exception):
    """A delta that is invalid in the current state. `events` are the events of the deltas before it in the batch.

    `Composer.fail` ends the response after this error.
    """

    def __init__(self, message: str, composed: list[Event | Unknown]) -> None:
        super().__init__(message)
        self.events = composed


class Composer:
    """The composer of one response.

    `response` is the response in progress and, once `finished` is true, the final response. `is_cut_off` is true if the
    answer exceeded one of `limits`: the response has failed, and later deltas do not belong to it. `usage` is the usage
    of the model calls so far. `open_from` is the output index at which a call begins that is not part of it, or None.
    """

    def __init__(
        self,
        response: Response,
        *,
        new_id: Callable[[str], str],
        now: Callable[[], int],
        limits: AnswerLimits = _DEFAULT_LIMITS,
    ) -> None:
        self.response = response
        self.finished = False
        self.is_cut_off = False
        self._size = self._text_size = self._event_count = 0
        self._limits, self._next_check = limits, limits.first_check
        self._new_id, self._now = new_id, now
        self._numbers = itertools.count()
        self._last_batch: Sequence[Event | Unknown] = ()  # the last nonempty batch: `fail` continues its numbers
        self._last_taken = -1
        self._output: list[OpenDraft | ClosedItem] = []
        self._text_item: MessageDraft | ReasoningDraft | None = None
        self._phase: deltas.Phase | None = None
        self._omits_status = False  # of the next reasoning item
        self._calls: dict[int | str, CallDraft] = {}
        self._closed_calls: dict[int | str, bool] = {}  # True if by `CloseItem`: its key may be used again
        self._call_ids: dict[str, str] = {}
        self._passthrough_items: dict[int | str, PassthroughDraft] = {}
        self._unnamed_calls: dict[int | str, list[deltas.ToolCall | deltas.CustomToolCall]] = {}
        self.usage: Usage | None = None
        self.open_from: int | None = 0

    @property
    def has_calls(self) -> bool:
        """True if any tool call is open. Backends may add to an open call until the turn ends."""
        return bool(self._calls or self._unnamed_calls)

    @property
    def content_size(self) -> int:
        """The size of the finished output items: characters of text, and bytes of other content."""
        return self._size + self._text_size

    @property
    def output(self) -> list[Item | Unknown]:
        """The output items that are done."""
        return [entry.item for entry in self._output if isinstance(entry, ClosedItem)]

    def take_sequence_number(self) -> int:
        """Take the next sequence number, for an event that is sent between the composer's own."""
        self._last_taken = next(self._numbers)
        return self._last_taken

    def start(self) -> list[Event]:
        """Return the first lifecycle events. A queued response emits `response.queued` and becomes `in_progress`."""
        composed: list[Event] = [events.Created(next(self._numbers), self.response)]
        if self.response.status == "queued":
            composed.append(events.Queued(next(self._numbers), self.response))
            self.response = msgspec.structs.replace(self.response, status="in_progress")
        composed.append(events.InProgress(next(self._numbers), self.response))
        self._last_batch = composed
        return composed

    def compose(self, batch: Sequence[Delta]) -> list[Event | Unknown]:
        """Return the events of these deltas, in order. Raise IllegalDelta at the first invalid delta."""
        composed: list[Event | Unknown] = []
        index = 0
        while index < len(batch):
            draft = self._text_item
            text_events = draft.continue_text(batch, index) if isinstance(draft, MessageDraft) else []
            if text_events:
                composed += text_events
                index += len(text_events)
                continue
            delta = batch[index]
            if self.finished:
                raise IllegalDelta(f"{type(delta).__name__} after the end of the turn", composed)
            try:
                composed += self._HANDLERS[type(delta)](self, delta)
            except Exception as error:
                raise IllegalDelta(f"{type(delta).__name__}: {error}", composed) from error
            index += 1
            if type(delta) in MEASURED:
                self._size += measure_delta(delta)
            limits = self._limits
            if (
                self._size > limits.max_answer_bytes
                or self._text_size > limits.max_answer_text_bytes
                # Calls without a name are not in the output yet.
                or len(self._output) + len(self._unnamed_calls) > limits.max_answer_items
            ):
                self._next_check = 0
                break
        if composed:
            self._last_batch = composed
            self._event_count += len(composed)
        if self._event_count >= self._next_check and not self.finished:
            composed += self._check_limits()
        return composed

    def compose_silently(self, batch: Sequence[Delta]) -> list[Event | Unknown]:
        """Compose deltas whose events are not emitted. Of a plain answer, only the terminal event is made."""
        plain = find_plain_answer(batch)
        has_begun = self._event_count or self.finished or self._unnamed_calls or self._phase
        if plain is None or has_begun or not self._limits.max_answer_items:
            return self.compose(batch)
        if plain.served is not None:
            self._set_served_by(plain.served)
        item = plain.make_message(self._new_id(MessageDraft.prefix))
        self._output, self.usage, self.open_from = [ClosedItem(item, ())], plain.usage, None
        self._numbers = itertools.count(next(self._numbers) + EVENT_COUNT)
        self._event_count = EVENT_COUNT + 1
        self.finished = True
        response = self.response = copy_struct(self.response)
        response.output, response.usage = [item], plain.usage
        response.status, response.completed_at = "completed", self._now()
        return [events.Completed(next(self._numbers), response)]

    def _check_limits(self) -> list[Event]:
        """Fail an answer that exceeds a limit. The text is counted here, because counting each delta costs more."""
        for draft in (self._text_item, *self._calls.values()):
            self._text_size += draft.take_size() if draft is not None else 0
        item_count = len(self._output) + len(self._unnamed_calls)
        error, self._next_check = self._limits.check(self._size, self._text_size, item_count, self._event_count)
        if error is None:
            return []
        self.is_cut_off = True
        return self._finish_failed(deltas.Failure(error.message, error.code or "", error.type))

    def fail(self, composed: Sequence[Event | Unknown], failure: deltas.Failure) -> list[Event | Unknown]:
        """End the response as failed after an IllegalDelta. `composed` are the events of that error.

        Events of the illegal delta itself are lost, so their sequence numbers are used again.
        """
        last = (composed or self._last_batch)[-1:]
        number = max(self._last_taken, *(get_sequence_number(event) for event in last), -1) + 1
        closing, done = salvage_items(self._output, number)
        self._numbers = itertools.count(number + len(closing))
        self._output = [*done]
        return [*composed, *closing, *self._finish_failed(failure)]

    def replace_terminal(self, composed: Sequence[Event | Unknown], failure: deltas.Failure) -> list[Event | Unknown]:
        """Replace the terminal event at the end of `composed`, which was not sent yet, with a failure."""
        *earlier, terminal = composed
        assert isinstance(terminal, events.Lifecycle)
        self._numbers = itertools.count(terminal.sequence_number)
        return [*earlier, *self._finish_failed(failure)]

    # Text items: messages and reasoning

    def _open_text_item(self, draft_type: type[S]) -> tuple[S, list[Event]]:
        if isinstance(self._text_item, draft_type):
            return self._text_item, []
        composed = self._close_text_item()
        draft = draft_type(self._new_id(draft_type.prefix), len(self._output), self._numbers)
        self._output.append(draft)
        self._text_item = draft
        if self._phase is not None and isinstance(draft, MessageDraft):
            draft.phase, self._phase = self._phase.phase, None
        if self._omits_status and isinstance(draft, ReasoningDraft):
            draft.has_status = self._omits_status = False
        return draft, composed + draft.announce()

    def _close_text_item(self, ending: Ending = "completed") -> list[Event]:
        draft, self._text_item = self._text_item, None
        return [] if draft is None else self._close(draft, ending)

    def _add_text(self, delta: deltas.Text) -> list[Event]:
        if not delta.text and not delta.logprobs:  # chat models start with an empty delta
            return []
        draft, composed = self._open_text_item(MessageDraft)
        return composed + draft.write_text(delta)

    def _add_refusal(self, delta: deltas.Refusal) -> list[Event]:
        if not delta.text:
            return []
        draft, composed = self._open_text_item(MessageDraft)
        return composed + draft.write_refusal(delta)

    def _annotate(self, delta: deltas.Annotate) -> list[Event]:
        draft, composed = self._open_text_item(MessageDraft)
        return composed + draft.annotate(delta)

    def _add_reasoning(self, delta: deltas.Reasoning) -> list[Event]:
        if not delta.text:
            return []
        draft, composed = self._open_text_item(ReasoningDraft)
        return composed + draft.write_text(delta)

    def _add_reasoning_summary(self, delta: deltas.ReasoningSummary) -> list[Event]:
        draft, composed = self._open_text_item(ReasoningDraft)
        return composed + draft.write_summary(delta)

    def _seal_reasoning(self, delta: deltas.ReasoningSeal) -> list[Event]:
        draft, composed = self._open_text_item(ReasoningDraft)
        composed += draft.seal(delta)
        return composed + self._close_text_item() if delta.encrypted_content else composed

    def _set_next_phase(self, delta: deltas.Phase) -> list[Event]:
        self._phase = delta
        return []

    def _omit_next_status(self, _: deltas.NoStatus) -> list[Event]:
        self._omits_status = True
        return []

    def _end_part(self, _: deltas.NewPart) -> list[Event]:
        return [] if self._text_item is None else self._text_item.end_part()

    # Tool calls and whole items

    def _add_tool_call(self, delta: deltas.ToolCall) -> list[Event]:
        return self._write_call(delta, delta.arguments, CallDraft)

    def _add_custom_tool_call(self, delta: deltas.CustomToolCall) -> list[Event]:
        return self._write_call(delta, delta.input, CustomCallDraft)

    def _write_call(
        self, delta: deltas.ToolCall | deltas.CustomToolCall, fragment: str, draft_type: type[CallDraft]
    ) -> list[Event]:
        draft = self._calls.get(delta.key)
        if draft is not None:
            return draft.write(fragment)
        is_late = delta.key in self._closed_calls and not (delta.name and self._closed_calls[delta.key])
        if is_late and not fragment.strip():
            return []  # servers send empty fragments after the end of a call
        held = self._unnamed_calls.setdefault(delta.key, [])
        held.append(delta)
        if is_late or not delta.name:  # `output_item.added` contains the name, so fragments wait for it
            self._text_size += len(fragment)
            return []
        del self._unnamed_calls[delta.key]
        composed = [*self._close_text_item(), *self._close_whole_call()]
        item_id = self._new_id(draft_type.prefix)
        given = next((each.call_id for each in held if each.call_id), None)
        draft = self._calls[delta.key] = draft_type(
            item_id,
            len(self._output),
            self._numbers,
            call_id=self._reserve_call_id(given or make_call_id(item_id)),
            name=delta.name,
            namespace=delta.namespace,
            caller=delta.caller,
        )
        draft.has_end = isinstance(delta, deltas.ToolCall) and delta.has_end
        self._output.append(draft)
        composed += draft.announce()
        for each in held:
            composed += draft.write(each.arguments if isinstance(each, deltas.ToolCall) else each.input)
        return composed

    def _close_whole_call(self) -> list[Event]:
        """Close the only open call if no argument can follow. Some clients read only one call at a time."""
        if len(self._calls) != 1 or any(draft.has_end or not draft.is_object() for draft in self._calls.values()):
            return []
        key, draft = self._calls.popitem()
        self._closed_calls[key] = False
        return self._close(draft, "completed")

    def _add_whole_item(self, delta: deltas.WholeItem) -> list[Event]:
        item = self._assign_ids(delta.item)
        closing = self._close_text_item()
        index = len(self._output)
        composed: list[Event] = [events.OutputItemAdded(next(self._numbers), index, item)]
        if isinstance(item, ShellCall):
            composed += compose_command_events(item, index, self._numbers)
        composed.append(events.OutputItemDone(next(self._numbers), index, item))
        self._output.append(ClosedItem(item, tuple(composed)))
        return closing + composed

    def _assign_ids(self, item: OutputItem | Unknown) -> OutputItem | Unknown:
        """Add missing ids, and replace a call id that another call of this response already has."""
        item_id = item.id
        if not item_id and not isinstance(item, Unknown):
            item_id = self._new_id(ID_PREFIXES.get(item.type, PassthroughDraft.prefix))
        given = get_call_id(item)
        call_id = self._resolve_call_id(item, given, item_id)
        return item if (item_id, call_id) == (item.id, given) else replace_ids(item, item_id, call_id)

    def _resolve_call_id(self, item: OutputItem | Unknown, given: str | None, item_id: str | None) -> str | None:
        """Return the call id for this item: the id of an earlier call for an output, else a new one."""
        if given is None:
            return None
        if item.type.endswith("_output"):
            return self._call_ids.get(given, given)
        return self._reserve_call_id(given or make_call_id(item_id or ""))

    def _reserve_call_id(self, given: str) -> str:
        """Reserve a call id that is unique in this response, so that each output refers to one call."""
        call_id, number = given, len(self._call_ids)
        while call_id in self._call_ids:
            number += 1
            call_id = f"{given}_{number}"
        self._call_ids[given] = self._call_ids[call_id] = call_id
        return call_id

    def _forward_event(self, delta: deltas.Passthrough) -> list[Unknown]:
        return [rewrite_event(delta.event, self._numbers, None)]

    # Passthrough items: an upstream's own items and events

    def _open_item(self, delta: deltas.OpenItem) -> list[Event]:
        if delta.key in self._passthrough_items:
            raise ValueError(f"the key {delta.key!r} is already in use")
        item_id = self._new_id(delta.prefix)
        call_id = self._resolve_call_id(delta.item, get_call_id(delta.item), item_id)
        draft = PassthroughDraft(item_id, len(self._output), self._numbers, delta.item, call_id)
        composed = self._close_text_item()
        self._output.append(draft)
        self._passthrough_items[delta.key] = draft
        return composed + draft.announce()

    def _forward_item_event(self, delta: deltas.ItemPassthrough) -> list[Unknown]:
        draft = self._find_open(delta.key) or self._passthrough_items.get(delta.key or "")
        if isinstance(draft, PassthroughDraft):
            draft.read_event(delta.event)
        return [rewrite_event(delta.event, self._numbers, draft)]

    def _amend(self, delta: deltas.Amend) -> list[Event]:
        if (draft := self._find_open(delta.key)) is not None:
            draft.amendments |= delta.fields
        return []

    def _close_item(self, delta: deltas.CloseItem) -> list[Event]:
        draft = self._find_open(delta.key)
        if draft is None:
            return []
        if isinstance(draft, PassthroughDraft) and delta.item is not None:
            given = get_call_id(delta.item)
            known = draft.call_id if given is not None else None
            draft.finish(delta.item, known or self._resolve_call_id(delta.item, given, draft.id))
        if draft is self._text_item:
            self._text_item = None
        elif delta.key in self._calls:
            del self._calls[delta.key]
            self._closed_calls[delta.key] = True
        return self._close(draft, delta.ending)

    def _find_open(self, key: Key) -> OpenDraft | None:
        """Return the open item with this key, or the open text item if the key is None."""
        if key is None:
            return self._text_item
        draft = self._passthrough_items.get(key)
        return draft if draft is not None and not draft.closed else self._calls.get(key)

    # The end

    def _set_served_by(self, delta: deltas.Served) -> list[Event]:
        self.response = copy_struct(self.response)
        self.response.model, self.response.served_by = delta.model, f"{delta.backend}/{delta.named or delta.model}"
        return []

    def _set_usage(self, delta: deltas.TokenUsage) -> list[Event]:
        self.usage = delta.usage
        index = len(self._output) if self._text_item is None else self._text_item.output_index
        self.open_from = index if delta.is_open else None
        return []

    def _add_tool_usage(self, delta: deltas.ToolUsage) -> list[Event]:
        self.response = copy_struct(self.response)
        self.response.tool_usage = add_tool_usage(self.response.tool_usage, delta)
        return []

    def _finish(self, delta: deltas.Finish) -> list[Event]:
        is_continued = delta.reason != "cancelled" and not self._closed_calls.keys().isdisjoint(self._unnamed_calls)
        if is_continued or (self._unnamed_calls and delta.reason == "stop"):
            message = f"The model {'continued a closed call' if is_continued else 'called a tool without a name'}."
            return self._finish_failed(deltas.Failure(message, "model_error", "model_error"))
        if delta.reason == "stop":
            composed = self._close_all("completed")
            return [*composed, self._end_response(events.Completed, status="completed", completed_at=self._now())]
        composed = self._close_all("incomplete")
        if delta.reason == "cancelled":  # the API has no `response.cancelled` event
            return [*composed, self._end_response(events.Incomplete, status="cancelled")]
        details = IncompleteDetails(delta.detail or INCOMPLETE_REASONS[delta.reason])
        return [*composed, self._end_response(events.Incomplete, status="incomplete", incomplete_details=details)]

    def _finish_failed(self, delta: deltas.Failure) -> list[Event]:
        composed = self._close_all("incomplete")
        self._unnamed_calls = {}
        payload = events.ErrorPayload(delta.type, delta.code, delta.message, delta.param)
        composed.append(events.Error(next(self._numbers), payload))
        error = ResponseError(delta.code, delta.message, delta.param, delta.type)
        return [*composed, self._end_response(events.Failed, status="failed", completed_at=None, error=error)]

    def _end_response(self, event_type: type[events.Lifecycle], **outcome: Any) -> Event:
        self.finished = True
        response = self.response = copy_struct(self.response)
        response.output, response.usage = self.output, self.usage
        for name, value in outcome.items():
            setattr(response, name, value)
        return event_type(next(self._numbers), self.response)

    def _close_all(self, ending: Ending) -> list[Event]:
        """Close all open items, each with the ending that `choose_ending` returns."""
        drafts = [entry for entry in self._output if not isinstance(entry, ClosedItem)]
        composed: list[Event] = []
        for draft in drafts:
            is_last = draft.output_index == len(self._output) - 1
            composed += self._close(draft, choose_ending(draft, ending, is_last=is_last))
        self._text_item, self._calls = None, {}
        return composed

    def _close(self, draft: OpenDraft, ending: Ending) -> list[Event]:
        closed = self._output[draft.output_index] = close_draft(draft, ending)
        self._text_size += draft.take_size()  # after the end, so that its text is joined only once
        return list(closed.ending)

    _HANDLERS: ClassVar[dict[type, Callable[..., Sequence[Event | Unknown]]]] = {
        deltas.Text: _add_text,
        deltas.Refusal: _add_refusal,
        deltas.Annotate: _annotate,
        deltas.Reasoning: _add_reasoning,
        deltas.ReasoningSummary: _add_reasoning_summary,
        deltas.ReasoningSeal: _seal_reasoning,
        deltas.ToolCall: _add_tool_call,
        deltas.CustomToolCall: _add_custom_tool_call,
        deltas.WholeItem: _add_whole_item,
        deltas.Passthrough: _forward_event,
        deltas.Phase: _set_next_phase,
        deltas.NoStatus: _omit_next_status,
        deltas.NewPart: _end_part,
        deltas.Amend: _amend,
        deltas.OpenItem: _open_item,
        deltas.ItemPassthrough: _forward_item_event,
        deltas.CloseItem: _close_item,
        deltas.Served: _set_served_by,
        deltas.TokenUsage: _set_usage,
        deltas.ToolUsage: _add_tool_usage,
        deltas.Finish: _finish,
        deltas.Failure: _finish_failed,
    }
