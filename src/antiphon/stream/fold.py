"""From events back to a response: what a client of the stream ends up with. Raises on any illegal order.

The counterpart of the composer, and its judge: for every stream the composer writes, `fold` gives the response that its
terminal event carries. It trusts nothing but the items' own events, so it also mends a server that sends a terminal
event with an empty `output`.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from antiphon.protocol import content, events
from antiphon.protocol.events import Event
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown


class IllegalEvent(Exception):
    """An event that may not come here."""


class _OpenItem:
    """An item that was added and is not done: its open parts, each with what was written so far."""

    def __init__(self, item_id: str | None) -> None:
        self.id = item_id
        self.parts: dict[tuple[str, int], list[str]] = {}
        self.closed_parts: set[tuple[str, int]] = set()
        self.written: list[str] = []


class Fold:
    """Feed it a stream's events; `response` is the final response once the terminal event came."""

    def __init__(self) -> None:
        self.response: Response | None = None
        self.finished = False
        self._number = -1
        self._errored = False
        self._open: dict[int, _OpenItem] = {}
        self._done: dict[int, Item | Unknown] = {}

    def feed(self, event: Event | Unknown) -> None:
        """Take in one event. An illegal one raises, and leaves everything as it was."""
        if self.finished:
            raise IllegalEvent(f"{event.type} after the terminal event")
        if isinstance(event, Unknown):
            return
        if event.sequence_number <= self._number:
            raise IllegalEvent(f"{event.type}: sequence_number {event.sequence_number} after {self._number}")
        if self.response is None and not isinstance(event, events.Created | events.Error):
            raise IllegalEvent(f"{event.type} before response.created")
        if self._errored and not isinstance(event, events.Failed):
            raise IllegalEvent(f"{event.type} after an error")
        for kind, handle in _HANDLERS:
            if isinstance(event, kind):
                handle(self, event)
                break
        self._number = event.sequence_number

    # The response

    def _lifecycle(self, event: events.Lifecycle) -> None:
        if isinstance(event, events.Created) != (self.response is None):
            raise IllegalEvent(f"{event.type} twice")
        if self.response is not None and event.response.id != self.response.id:
            raise IllegalEvent(f"{event.type} changes the id {self.response.id} to {event.response.id}")
        if isinstance(event, events.TERMINAL):
            return self._end(event)
        if self._open or self._done:
            raise IllegalEvent(f"{event.type} after the first item")
        self.response = event.response
        return None

    def _end(self, event: events.Lifecycle) -> None:
        if self._open:
            raise IllegalEvent(f"{event.type} while item {next(iter(self._open))} is not done")
        output = [self._done[index] for index in sorted(self._done)]
        self.response = msgspec.structs.replace(event.response, output=output)
        self.finished = True

    def _error(self, _: events.Error) -> None:
        self._errored = True

    # Items

    def _item_added(self, event: events.OutputItemAdded) -> None:
        if event.output_index in self._open or event.output_index in self._done:
            raise IllegalEvent(f"output_index {event.output_index} is taken")
        self._open[event.output_index] = _OpenItem(event.item.id)

    def _item_done(self, event: events.OutputItemDone) -> None:
        item = self._find(event.output_index, event.item.id, event.type)
        if item.parts:
            raise IllegalEvent(f"item {event.output_index} is done while a part of it is open")
        del self._open[event.output_index]
        self._done[event.output_index] = event.item

    def _find(self, output_index: int, item_id: str | None, event_type: str) -> _OpenItem:
        item = self._open.get(output_index)
        if item is None:
            raise IllegalEvent(f"{event_type}: no item is open at output_index {output_index}")
        if item.id != item_id:
            raise IllegalEvent(f"{event_type}: item {output_index} is {item.id}, not {item_id}")
        return item

    # Parts

    def _part_added(self, event: events.ContentPartAdded) -> None:
        self._open_part(event, ("content", event.content_index))

    def _summary_added(self, event: events.ReasoningSummaryPartAdded) -> None:
        self._open_part(event, ("summary", event.summary_index))

    def _open_part(self, event: events.ItemEvent, key: tuple[str, int]) -> None:
        item = self._find(event.output_index, event.item_id, event.type)
        if key in item.parts or key in item.closed_parts:
            raise IllegalEvent(f"{key[0]} part {key[1]} of item {event.output_index} was added before")
        item.parts[key] = []

    def _part_done(self, event: events.ContentPartDone) -> None:
        self._close_part(event, ("content", event.content_index), event.part)

    def _summary_done(self, event: events.ReasoningSummaryPartDone) -> None:
        self._close_part(event, ("summary", event.summary_index), event.part)

    def _close_part(self, event: events.ItemEvent, key: tuple[str, int], part: Any) -> None:
        written = self._part(event, key)
        _compare(event, written, part.refusal if isinstance(part, content.Refusal) else getattr(part, "text", ""))
        item = self._open[event.output_index]
        del item.parts[key]
        item.closed_parts.add(key)

    def _part(self, event: events.ItemEvent, key: tuple[str, int]) -> list[str]:
        item = self._find(event.output_index, event.item_id, event.type)
        written = item.parts.get(key)
        if written is None:
            raise IllegalEvent(f"{event.type}: {key[0]} part {key[1]} of item {event.output_index} is not open")
        return written

    def _content_event(self, event: events.ContentEvent) -> None:
        _write(event, self._part(event, ("content", event.content_index)))

    def _summary_event(self, event: events.SummaryEvent) -> None:
        _write(event, self._part(event, ("summary", event.summary_index)))

    def _item_event(self, event: events.ItemEvent) -> None:
        _write(event, self._find(event.output_index, event.item_id, event.type).written)


def _write(event: events.ItemEvent, written: list[str]) -> None:
    """A delta adds to what was written; a done repeats it whole."""
    delta = getattr(event, "delta", None)
    if isinstance(delta, str):
        written.append(delta)
        return
    for field in ("text", "refusal", "arguments", "input", "code"):
        whole = getattr(event, field, None)
        if isinstance(whole, str):
            _compare(event, written, whole)


def _compare(event: Event, written: list[str], whole: str) -> None:
    # Some servers send no deltas at all: then the done event is all there is.
    if written and "".join(written) != whole:
        raise IllegalEvent(f"{event.type} does not repeat what its deltas said")


# The first kind that fits handles the event, so the special ones come before their families.
_HANDLERS: tuple[tuple[type[Event], Any], ...] = (
    (events.OutputTextDelta, Fold._content_event),
    (events.Lifecycle, Fold._lifecycle),
    (events.Error, Fold._error),
    (events.OutputItemAdded, Fold._item_added),
    (events.OutputItemDone, Fold._item_done),
    (events.ContentPartAdded, Fold._part_added),
    (events.ContentPartDone, Fold._part_done),
    (events.ReasoningSummaryPartAdded, Fold._summary_added),
    (events.ReasoningSummaryPartDone, Fold._summary_done),
    (events.ContentEvent, Fold._content_event),
    (events.SummaryEvent, Fold._summary_event),
    (events.ItemEvent, Fold._item_event),
)


def fold(stream: Iterable[Event | Unknown]) -> Response:
    """The response a whole stream tells. Raises when it breaks a rule or ends too early."""
    folding = Fold()
    for event in stream:
        folding.feed(event)
    if folding.response is None or not folding.finished:
        raise IllegalEvent("the stream ended without a terminal event")
    return folding.response
