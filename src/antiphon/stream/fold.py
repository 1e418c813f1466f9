"""Fold the events of a stream into the response a client ends up with. Events in an illegal order raise an error.

This is the inverse of the composer: for each stream of a composer, `fold` returns the response of the terminal event.
The output is built from the item events only, so a server may send a terminal event with an empty `output`.
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
    """An event that is not allowed at this point of the stream."""


class Fold:
    """An incremental fold. `response` is the final response once `finished` is true."""

    def __init__(self) -> None:
        self.response: Response | None = None
        self.finished = False
        self._number = -1
        self._errored = False
        self._open: dict[int, _OpenItem] = {}
        self._done: dict[int, Item | Unknown] = {}

    def feed(self, event: Event | Unknown) -> None:
        """Add one event. Raise IllegalEvent, with the state unchanged, if it is not allowed here."""
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
        for event_type, handle in _HANDLERS:
            if isinstance(event, event_type):
                handle(self, event)
                break
        self._number = event.sequence_number

    # The response

    def _change_status(self, event: events.Lifecycle) -> None:
        if isinstance(event, events.Created) != (self.response is None):
            raise IllegalEvent(f"{event.type} twice")
        if self.response is not None and event.response.id != self.response.id:
            raise IllegalEvent(f"{event.type} changes the id {self.response.id} to {event.response.id}")
        if isinstance(event, events.TERMINAL):
            return self._finish(event)
        if self._open or self._done:
            raise IllegalEvent(f"{event.type} after the first item")
        self.response = event.response
        return None

    def _finish(self, event: events.Lifecycle) -> None:
        if self._open:
            raise IllegalEvent(f"{event.type} while item {next(iter(self._open))} is not done")
        output = [self._done[index] for index in sorted(self._done)]
        self.response = msgspec.structs.replace(event.response, output=output)
        self.finished = True

    def _record_error(self, _: events.Error) -> None:
        self._errored = True

    # Items

    def _open_item(self, event: events.OutputItemAdded) -> None:
        if event.output_index in self._open or event.output_index in self._done:
            raise IllegalEvent(f"output_index {event.output_index} is already in use")
        self._open[event.output_index] = _OpenItem(event.item.id)

    def _close_item(self, event: events.OutputItemDone) -> None:
        item = self._find_item(event.output_index, event.item.id, event.type)
        if item.parts:
            raise IllegalEvent(f"item {event.output_index} is done while a part of it is open")
        del self._open[event.output_index]
        self._done[event.output_index] = event.item

    def _find_item(self, output_index: int, item_id: str | None, event_type: str) -> "_OpenItem":
        item = self._open.get(output_index)
        if item is None:
            raise IllegalEvent(f"{event_type}: no item is open at output_index {output_index}")
        if item.id != item_id:
            raise IllegalEvent(f"{event_type}: item {output_index} is {item.id}, not {item_id}")
        return item

    # Parts

    def _open_content_part(self, event: events.ContentPartAdded) -> None:
        self._open_part(event, ("content", event.content_index))

    def _open_summary_part(self, event: events.ReasoningSummaryPartAdded) -> None:
        self._open_part(event, ("summary", event.summary_index))

    def _open_part(self, event: events.ItemEvent, key: tuple[str, int]) -> None:
        item = self._find_item(event.output_index, event.item_id, event.type)
        if key in item.parts or key in item.closed_parts:
            raise IllegalEvent(f"{key[0]} part {key[1]} of item {event.output_index} was already added")
        item.parts[key] = []

    def _close_content_part(self, event: events.ContentPartDone) -> None:
        self._close_part(event, ("content", event.content_index), event.part)

    def _close_summary_part(self, event: events.ReasoningSummaryPartDone) -> None:
        self._close_part(event, ("summary", event.summary_index), event.part)

    def _close_part(self, event: events.ItemEvent, key: tuple[str, int], part: Any) -> None:
        written = self._find_part(event, key)
        _compare(event, written, part.refusal if isinstance(part, content.Refusal) else getattr(part, "text", ""))
        item = self._open[event.output_index]
        del item.parts[key]
        item.closed_parts.add(key)

    def _find_part(self, event: events.ItemEvent, key: tuple[str, int]) -> list[str]:
        item = self._find_item(event.output_index, event.item_id, event.type)
        written = item.parts.get(key)
        if written is None:
            raise IllegalEvent(f"{event.type}: {key[0]} part {key[1]} of item {event.output_index} is not open")
        return written

    def _write_content(self, event: events.ContentEvent) -> None:
        _write(event, self._find_part(event, ("content", event.content_index)))

    def _write_summary(self, event: events.SummaryEvent) -> None:
        _write(event, self._find_part(event, ("summary", event.summary_index)))

    def _write_item(self, event: events.ItemEvent) -> None:
        _write(event, self._find_item(event.output_index, event.item_id, event.type).text)


def fold(stream: Iterable[Event | Unknown]) -> Response:
    """Return the response of a whole stream. Raise IllegalEvent if the stream is illegal or incomplete."""
    state = Fold()
    for event in stream:
        state.feed(event)
    if state.response is None or not state.finished:
        raise IllegalEvent("the stream ended without a terminal event")
    return state.response


class _OpenItem:
    """An item that was added and is not done, with the text of its open parts."""

    def __init__(self, item_id: str | None) -> None:
        self.id = item_id
        self.parts: dict[tuple[str, int], list[str]] = {}
        self.closed_parts: set[tuple[str, int]] = set()
        self.text: list[str] = []


def _write(event: events.ItemEvent, written: list[str]) -> None:
    """Append a delta, or compare the full text of a done event with its deltas."""
    delta = getattr(event, "delta", None)
    if isinstance(delta, str):
        written.append(delta)
        return
    for field in ("text", "refusal", "arguments", "input", "code"):
        whole = getattr(event, field, None)
        if isinstance(whole, str):
            _compare(event, written, whole)


def _compare(event: Event, written: list[str], whole: str) -> None:
    # Some servers send no deltas, only the done event.
    if written and "".join(written) != whole:
        raise IllegalEvent(f"{event.type} does not match its deltas")


# The first matching type handles the event, so subclasses come before their base classes.
_HANDLERS: tuple[tuple[type[Event], Any], ...] = (
    (events.OutputTextDelta, Fold._write_content),
    (events.Lifecycle, Fold._change_status),
    (events.Error, Fold._record_error),
    (events.OutputItemAdded, Fold._open_item),
    (events.OutputItemDone, Fold._close_item),
    (events.ContentPartAdded, Fold._open_content_part),
    (events.ContentPartDone, Fold._close_content_part),
    (events.ReasoningSummaryPartAdded, Fold._open_summary_part),
    (events.ReasoningSummaryPartDone, Fold._close_summary_part),
    (events.ContentEvent, Fold._write_content),
    (events.SummaryEvent, Fold._write_summary),
    (events.ItemEvent, Fold._write_item),
)
