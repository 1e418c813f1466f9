"""From deltas to events: the machine that gives a model's words their ids, indexes, numbers and order.

It has no clock, no randomness and no IO: `new_id` and `now` are handed in. `start` tells that the response exists,
`compose` turns each batch of deltas into events, and `Finish` or `Failure` ends it with exactly one terminal event.

What is open follows one rule: at most one item *speaks* (a message or reasoning), and any number of calls and carried
items are under way, because backends interleave them, and only some say when one is whole: else it is at the end.
Whatever starts closes the item that spoke.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from antiphon.protocol import events
from antiphon.protocol.events import Event, OutputItemDone
from antiphon.protocol.hosted import ShellCall
from antiphon.protocol.items import Item, OutputItem
from antiphon.protocol.response import IncompleteDetails, Response, ResponseError, Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.drafts import (
    CallDraft,
    CustomCallDraft,
    Ending,
    MessageDraft,
    ReasoningDraft,
    compose_command_events,
)
from antiphon.stream.passthrough import (
    PassthroughDraft,
    amend,
    get_call_id,
    get_sequence_number,
    replace_ids,
    rewrite_event,
)

OpenDraft: TypeAlias = MessageDraft | ReasoningDraft | CallDraft | PassthroughDraft


class Closed(NamedTuple):
    """An item that is whole, and the events that say so, from the first that came of its end to its last of all."""

    item: Item | Unknown
    ending: tuple[Event, ...]


def close(draft: OpenDraft, ending: Ending) -> Closed:
    told, item = draft.close(ending)
    if draft.amendments:
        item = amend(item, draft.amendments)
        cast(OutputItemDone, told[-1]).item = item
    return Closed(item, tuple(told))


def salvage(output: Sequence[OpenDraft | Closed], number: int) -> tuple[list[Event], list[Closed]]:
    """What is still to be told so that these items are done, and those that then are. It does not raise.

    `number` is that of the first event that nobody was told: an end that has it or a later one is told again, and an
    item that was to be announced by then never was.
    """
    told: list[Event] = []
    done: list[Closed] = []
    for entry in output:
        if isinstance(entry, Closed):
            closed = entry
        elif entry.announced is None or entry.announced.sequence_number >= number:
            continue
        else:
            closed = _close_somehow(entry)
        done.append(closed)
        if closed is not entry or closed.ending[-1].sequence_number >= number:
            told += closed.ending
    for place, event in enumerate(told):
        event.sequence_number = number + place
    return told, done


def _close_somehow(draft: OpenDraft) -> Closed:
    try:
        return close(draft, "incomplete")
    except Exception:  # what was said of it makes no whole: it ends as it was announced
        assert draft.announced is not None
        item = draft.announced.item
        if not isinstance(item, Unknown) and hasattr(item, "status"):
            item = msgspec.structs.replace(item, status="incomplete")
        return Closed(item, (OutputItemDone(0, draft.output_index, item),))


S = TypeVar("S", MessageDraft, ReasoningDraft)
Key = int | str | None

INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter", "steered": "steered"}
# How ids of items begin that come whole, and without one.
_PREFIXES = {
    "message": MessageDraft.prefix,
    "reasoning": ReasoningDraft.prefix,
    "shell_call": "sh",
    "local_shell_call": "lsh",
    "apply_patch_call": "apc",
    "computer_call": "cu",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}


class IllegalDelta(Exception):
    """A delta that is invalid in the current state. `events` are the events of the deltas before it in the batch.

    `Composer.fail` ends the response after this error.
    """

    def __init__(self, message: str, composed: list[Event | Unknown]) -> None:
        super().__init__(message)
        self.events = composed


class Composer:
    """Composes one response. `response` is what it is now; after the end, what it came to."""

    def __init__(self, response: Response, *, new_id: Callable[[str], str], now: Callable[[], int]) -> None:
        self.response = response
        self.finished = False
        self._new_id = new_id
        self._now = now
        self._numbers = itertools.count()
        self._told: Sequence[Event | Unknown] = ()  # the last that was, for the number it got to
        self._taken = -1
        self._output: list[OpenDraft | Closed] = []
        self._speaking: MessageDraft | ReasoningDraft | None = None
        self._phase: deltas.Phase | None = None
        self._calls: dict[int | str, CallDraft] = {}
        self._call_ids: dict[str, str] = {}
        self._carried: dict[int | str, PassthroughDraft] = {}
        self._unnamed: dict[int | str, list[deltas.ToolCall | deltas.CustomToolCall]] = {}
        self._usage: Usage | None = None

    @property
    def has_calls(self) -> bool:
        """Whether calls have been begun: until the end, any of them may go on."""
        return bool(self._calls or self._unnamed)

    @property
    def output(self) -> list[Item | Unknown]:
        """The items that are whole by now."""
        return [entry.item for entry in self._output if isinstance(entry, Closed)]

    def take_sequence_number(self) -> int:
        """The next number, for an event that is told among this response's own."""
        self._taken = next(self._numbers)
        return self._taken

    def start(self) -> list[Event]:
        """Tell that the response exists. One that has waited in a queue says so, and begins now."""
        told: list[Event] = [events.Created(next(self._numbers), self.response)]
        if self.response.status == "queued":
            told.append(events.Queued(next(self._numbers), self.response))
            self.response = msgspec.structs.replace(self.response, status="in_progress")
        told.append(events.InProgress(next(self._numbers), self.response))
        self._told = told
        return told

    def compose(self, batch: Iterable[Delta]) -> list[Event | Unknown]:
        """The events that tell these deltas, in order."""
        told: list[Event | Unknown] = []
        for delta in batch:
            if self.finished:
                raise IllegalDelta(f"{type(delta).__name__} after the end of the turn", told)
            try:
                told += self._HANDLERS[type(delta)](self, delta)
            except Exception as error:
                raise IllegalDelta(f"{type(delta).__name__}: {error}", told) from error
        if told:
            self._told = told
        return told

    def fail(self, told: Sequence[Event | Unknown], failure: deltas.Failure) -> list[Event | Unknown]:
        """End as failed after an illegal delta, whatever it has left behind. `told` are the events before it.

        What it had begun to tell is lost, so the numbers of that are given again.
        """
        last = (told or self._told)[-1:]
        number = max(self._taken, *(get_sequence_number(event) for event in last), -1) + 1
        closing, done = salvage(self._output, number)
        self._numbers = itertools.count(number + len(closing))
        self._output = [*done]
        return [*told, *closing, *self._failure(failure)]

    def replace_terminal(self, told: Sequence[Event | Unknown], failure: deltas.Failure) -> list[Event | Unknown]:
        """These events end with a terminal one that was not sent and does not hold: tell the failure in its place."""
        *kept, terminal = told
        assert isinstance(terminal, events.Lifecycle)
        self._numbers = itertools.count(terminal.sequence_number)
        return [*kept, *self._failure(failure)]

    # What speaks

    def _speak(self, draft_type: type[S]) -> tuple[S, list[Event]]:
        if isinstance(self._speaking, draft_type):
            return self._speaking, []
        told = self._fall_silent()
        draft = draft_type(self._new_id(draft_type.prefix), len(self._output), self._numbers)
        self._output.append(draft)
        self._speaking = draft
        if self._phase is not None:
            self._set_phase(draft, self._phase)
        return draft, told + draft.announce()

    def _fall_silent(self, ending: Ending = "completed") -> list[Event]:
        draft, self._speaking = self._speaking, None
        return [] if draft is None else self._close(draft, ending)

    def _text(self, delta: deltas.Text) -> list[Event]:
        if not delta.text and not delta.logprobs:  # chat models open with an empty piece of text
            return []
        if isinstance(self._speaking, MessageDraft):  # nearly always: the short way for most of all deltas
            return self._speaking.write_text(delta)
        draft, told = self._speak(MessageDraft)
        return told + draft.write_text(delta)

    def _refusal(self, delta: deltas.Refusal) -> list[Event]:
        if not delta.text:
            return []
        draft, told = self._speak(MessageDraft)
        return told + draft.write_refusal(delta)

    def _annotate(self, delta: deltas.Annotate) -> list[Event]:
        draft, told = self._speak(MessageDraft)
        return told + draft.annotate(delta)

    def _reasoning(self, delta: deltas.Reasoning) -> list[Event]:
        if not delta.text:
            return []
        draft, told = self._speak(ReasoningDraft)
        return told + draft.write_text(delta)

    def _reasoning_summary(self, delta: deltas.ReasoningSummary) -> list[Event]:
        draft, told = self._speak(ReasoningDraft)
        return told + draft.write_summary(delta)

    def _reasoning_seal(self, delta: deltas.ReasoningSeal) -> list[Event]:
        draft, told = self._speak(ReasoningDraft)
        told += draft.seal(delta)
        return told + self._fall_silent() if delta.encrypted_content else told

    def _take_phase(self, delta: deltas.Phase) -> list[Event]:
        self._phase = delta
        return []

    def _set_phase(self, draft: MessageDraft | ReasoningDraft, delta: deltas.Phase) -> None:
        if isinstance(draft, MessageDraft):
            draft.phase, self._phase = delta.phase, None

    def _new_part(self, _: deltas.NewPart) -> list[Event]:
        return [] if self._speaking is None else self._speaking.end_part()

    # Calls and whole items

    def _tool_call(self, delta: deltas.ToolCall) -> list[Event]:
        return self._call(delta, delta.arguments, CallDraft)

    def _custom_tool_call(self, delta: deltas.CustomToolCall) -> list[Event]:
        return self._call(delta, delta.input, CustomCallDraft)

    def _call(
        self, delta: deltas.ToolCall | deltas.CustomToolCall, fragment: str, draft_type: type[CallDraft]
    ) -> list[Event]:
        draft = self._calls.get(delta.key)
        if draft is not None:
            return draft.write(fragment)
        held = self._unnamed.setdefault(delta.key, [])
        held.append(delta)
        if not delta.name:  # an item is announced with its name; until that is known, its fragments wait
            return []
        del self._unnamed[delta.key]
        told = self._fall_silent()
        item_id = self._new_id(draft_type.prefix)
        draft = self._calls[delta.key] = draft_type(
            item_id,
            len(self._output),
            self._numbers,
            call_id=self._name_call(next((each.call_id for each in held if each.call_id), None) or _call_id(item_id)),
            name=delta.name,
            namespace=delta.namespace,
        )
        self._output.append(draft)
        told += draft.announce()
        for each in held:
            told += draft.write(each.arguments if isinstance(each, deltas.ToolCall) else each.input)
        return told

    def _whole_item(self, delta: deltas.WholeItem) -> list[Event]:
        item = self._identify(delta.item)
        silence = self._fall_silent()
        index = len(self._output)
        told: list[Event] = [events.OutputItemAdded(next(self._numbers), index, item)]
        if isinstance(item, ShellCall):
            told += compose_command_events(item, index, self._numbers)
        told.append(events.OutputItemDone(next(self._numbers), index, item))
        self._output.append(Closed(item, tuple(told)))
        return silence + told

    def _identify(self, item: OutputItem | Unknown) -> OutputItem | Unknown:
        """The item with the ids that its maker left out, and with a call id that is not another call's."""
        item_id = item.id
        if not item_id and not isinstance(item, Unknown):
            item_id = self._new_id(_PREFIXES.get(item.type, "item"))
        given = get_call_id(item)
        call_id = self._find_call(item, given, item_id)
        return item if (item_id, call_id) == (item.id, given) else replace_ids(item, item_id, call_id)

    def _find_call(self, item: OutputItem | Unknown, given: str | None, item_id: str | None) -> str | None:
        """The id of the call that this item is, or answers."""
        if given is None:
            return None
        if item.type.endswith("_output"):
            return self._call_ids.get(given, given)
        return self._name_call(given or _call_id(item_id or ""))

    def _name_call(self, given: str) -> str:
        """The id of another call: outputs name their call by it, so no two calls of a response can have the same."""
        call_id, number = given, len(self._call_ids)
        while call_id in self._call_ids:
            number += 1
            call_id = f"{given}_{number}"
        self._call_ids[given] = self._call_ids[call_id] = call_id
        return call_id

    def _passthrough(self, delta: deltas.Passthrough) -> list[Unknown]:
        return [rewrite_event(delta.event, self._numbers, None)]

    # Items that another server tells of

    def _open_item(self, delta: deltas.OpenItem) -> list[Event]:
        if delta.key in self._carried:
            raise ValueError(f"the key {delta.key!r} is taken")
        item_id = self._new_id(delta.prefix)
        call_id = self._find_call(delta.item, get_call_id(delta.item), item_id)
        draft = PassthroughDraft(item_id, len(self._output), self._numbers, delta.item, call_id)
        told = self._fall_silent()
        self._output.append(draft)
        self._carried[delta.key] = draft
        return told + draft.announce()

    def _item_event(self, delta: deltas.ItemEvent) -> list[Unknown]:
        draft = self._find(delta.key) or self._carried.get(delta.key or "")
        return [rewrite_event(delta.event, self._numbers, draft)]

    def _amend(self, delta: deltas.Amend) -> list[Event]:
        draft = self._find(delta.key)
        if draft is not None:
            draft.amendments |= delta.fields
        return []

    def _close_item(self, delta: deltas.CloseItem) -> list[Event]:
        draft = self._find(delta.key)
        if draft is None:
            return []
        if isinstance(draft, PassthroughDraft) and delta.item is not None:
            given = get_call_id(delta.item)
            known = draft.call_id if given is not None else None
            draft.finish(delta.item, known or self._find_call(delta.item, given, draft.id))
        if draft is self._speaking:
            self._speaking = None
        elif delta.key in self._calls:
            del self._calls[delta.key]
        return self._close(draft, delta.ending)

    def _find(self, key: Key) -> OpenDraft | None:
        """What is open under this key, or what speaks if there is none."""
        if key is None:
            return self._speaking
        carried = self._carried.get(key)
        return carried if carried is not None and not carried.closed else self._calls.get(key)

    # The end

    def _served(self, delta: deltas.Served) -> list[Event]:
        self.response = copy(self.response)
        self.response.model, self.response.served_by = delta.model, f"{delta.backend}/{delta.named or delta.model}"
        return []

    def _tokens(self, delta: deltas.TokenUsage) -> list[Event]:
        self._usage = delta.usage
        return []

    def _finish(self, delta: deltas.Finish) -> list[Event]:
        if self._unnamed and delta.reason == "stop":
            return self._failure(deltas.Failure("The model called a tool without naming it.", "model_error"))
        if delta.reason == "stop":
            told = self._close_all("completed")
            return [*told, self._end(events.Completed, status="completed", completed_at=self._now())]
        told = self._close_all("incomplete")
        if delta.reason == "cancelled":  # no event is called so: it is an incomplete one with that status
            return [*told, self._end(events.Incomplete, status="cancelled")]
        details = IncompleteDetails(delta.detail or INCOMPLETE_REASONS[delta.reason])
        return [*told, self._end(events.Incomplete, status="incomplete", incomplete_details=details)]

    def _failure(self, delta: deltas.Failure) -> list[Event]:
        told = self._close_all("incomplete")
        self._unnamed = {}
        payload = events.ErrorPayload(delta.type, delta.code, delta.message, delta.param)
        told.append(events.Error(next(self._numbers), payload))
        error = ResponseError(delta.code, delta.message, delta.param, delta.type)
        return [*told, self._end(events.Failed, status="failed", completed_at=None, error=error)]

    def _end(self, event_type: type[events.Lifecycle], **outcome: Any) -> Event:
        self.finished = True
        response = self.response = copy(self.response)
        response.output, response.usage = self.output, self._usage
        for name, value in outcome.items():
            setattr(response, name, value)
        return event_type(next(self._numbers), self.response)

    def _close_all(self, ending: Ending) -> list[Event]:
        """Close what is open. Only the last item can have been cut off, and calls that were being written beside it."""
        drafts = [entry for entry in self._output if not isinstance(entry, Closed)]
        told: list[Event] = []
        for draft in drafts:
            last = draft.output_index == len(self._output) - 1
            cut = last or isinstance(draft, PassthroughDraft) or (isinstance(draft, CallDraft) and not draft.is_whole())
            told += self._close(draft, ending if cut else "completed")
        self._speaking, self._calls = None, {}
        return told

    def _close(self, draft: OpenDraft, ending: Ending) -> list[Event]:
        closed = self._output[draft.output_index] = close(draft, ending)
        return list(closed.ending)

    _HANDLERS: ClassVar[dict[type, Callable[..., Sequence[Event | Unknown]]]] = {
        deltas.Text: _text,
        deltas.Refusal: _refusal,
        deltas.Annotate: _annotate,
        deltas.Reasoning: _reasoning,
        deltas.ReasoningSummary: _reasoning_summary,
        deltas.ReasoningSeal: _reasoning_seal,
        deltas.ToolCall: _tool_call,
        deltas.CustomToolCall: _custom_tool_call,
        deltas.WholeItem: _whole_item,
        deltas.Passthrough: _passthrough,
        deltas.Phase: _take_phase,
        deltas.NewPart: _new_part,
        deltas.Amend: _amend,
        deltas.OpenItem: _open_item,
        deltas.ItemEvent: _item_event,
        deltas.CloseItem: _close_item,
        deltas.Served: _served,
        deltas.TokenUsage: _tokens,
        deltas.Finish: _finish,
        deltas.Failure: _failure,
    }


def _call_id(item_id: str) -> str:
    """The id of a call whose backend gave it none."""
    return f"call_{item_id.partition('_')[2]}"
