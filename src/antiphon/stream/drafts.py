"""Output items while they are being written. A draft announces its item, tells what is added, and closes it.

Drafts are the composer's: they turn one item's deltas into that item's events, and know nothing of the other items.
Announced and finished items are separate objects, because an event may be encoded after the draft has moved on.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from antiphon.protocol import content, events, items
from antiphon.protocol.content import Annotation, LogProb
from antiphon.protocol.events import Event
from antiphon.protocol.hosted import ShellCall
from antiphon.protocol.hosted_events import ShellCommandAdded, ShellCommandDelta, ShellCommandDone
from antiphon.protocol.json_text import read_json
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas


def compose_command_events(call: ShellCall, output_index: int, numbers: Iterator[int]) -> Iterator[Event]:
    for index, command in enumerate(call.action.commands):
        yield ShellCommandAdded(next(numbers), output_index, index, "")
        yield ShellCommandDelta(next(numbers), output_index, index, command)
        yield ShellCommandDone(next(numbers), output_index, index, command)


Ending = Literal["completed", "incomplete"]


class Draft:
    """One output item under way."""

    prefix: str

    def __init__(self, item_id: str, output_index: int, numbers: Iterator[int]) -> None:
        self.id = item_id
        self.output_index = output_index
        self.amendments: dict[str, msgspec.Raw] = {}
        self.announced: events.OutputItemAdded | None = None
        self._numbers = numbers

    def _added(self, item: items.OutputItem | Unknown) -> Event:
        self.announced = events.OutputItemAdded(next(self._numbers), self.output_index, item)
        return self.announced

    def _done(self, item: items.OutputItem | Unknown) -> Event:
        return events.OutputItemDone(next(self._numbers), self.output_index, item)


class MessageDraft(Draft):
    """A message: text parts and refusal parts, one after the other."""

    prefix = "msg"

    def __init__(self, item_id: str, output_index: int, numbers: Iterator[int]) -> None:
        super().__init__(item_id, output_index, numbers)
        self.phase: items.Phase | None = None
        self._parts: list[content.Part | Unknown] = []
        self._open: Literal["text", "refusal"] | None = None
        self._written: list[str] = []
        self._logprobs: list[LogProb] = []
        self._annotations: list[Annotation | Unknown] = []

    def announce(self) -> list[Event]:
        return [self._added(items.Message("assistant", [], self.id, "in_progress", self.phase))]

    def write_text(self, delta: deltas.Text) -> list[Event]:
        told = [] if self._open == "text" else self._open_part("text")
        text, logprobs = delta.text, list(delta.logprobs)
        self._written.append(text)
        if logprobs:
            self._logprobs += logprobs
        told.append(
            events.OutputTextDelta(next(self._numbers), self.id, self.output_index, len(self._parts), text, logprobs)
        )
        return told

    def write_refusal(self, delta: deltas.Refusal) -> list[Event]:
        told = [] if self._open == "refusal" else self._open_part("refusal")
        self._written.append(delta.text)
        told.append(events.RefusalDelta(next(self._numbers), self.id, self.output_index, len(self._parts), delta.text))
        return told

    def annotate(self, delta: deltas.Annotate) -> list[Event]:
        told = [] if self._open == "text" else self._open_part("text")
        told.append(
            events.OutputTextAnnotationAdded(
                next(self._numbers),
                self.id,
                self.output_index,
                len(self._parts),
                len(self._annotations),
                delta.annotation,
            )
        )
        self._annotations.append(delta.annotation)
        return told

    def close(self, ending: Ending) -> tuple[list[Event], items.OutputItem]:
        told = self.end_part()
        item = items.Message("assistant", self._parts, self.id, ending, self.phase)
        told.append(self._done(item))
        return told, item

    def _open_part(self, kind: Literal["text", "refusal"]) -> list[Event]:
        told = self.end_part()
        self._open = kind
        part = content.OutputText("") if kind == "text" else content.Refusal("")
        told.append(events.ContentPartAdded(next(self._numbers), self.id, self.output_index, len(self._parts), part))
        return told

    def end_part(self) -> list[Event]:
        """What is written next goes into another part."""
        if self._open is None:
            return []
        where = (self.id, self.output_index, len(self._parts))
        text = "".join(self._written)
        part: content.Part
        done: Event
        if self._open == "text":
            part = content.OutputText(text, self._annotations, self._logprobs or None)
            done = events.OutputTextDone(next(self._numbers), *where, text, self._logprobs)
        else:
            part = content.Refusal(text)
            done = events.RefusalDone(next(self._numbers), *where, text)
        told: list[Event] = [done, events.ContentPartDone(next(self._numbers), *where, part)]
        self._parts.append(part)
        self._open, self._written, self._logprobs, self._annotations = None, [], [], []
        return told


class ReasoningDraft(Draft):
    """Reasoning: raw text in content parts, summaries in numbered parts, and its sealed form."""

    prefix = "rs"

    def __init__(self, item_id: str, output_index: int, numbers: Iterator[int]) -> None:
        super().__init__(item_id, output_index, numbers)
        self._parts: list[content.Part | Unknown] = []
        self._written: list[str] = []
        self._summaries: list[content.SummaryText] = []
        self._summary: list[str] = []
        self._summary_key: int | None = None
        self._sealed: str | None = None

    def announce(self) -> list[Event]:
        return [self._added(items.Reasoning(id=self.id, status="in_progress"))]

    def write_text(self, delta: deltas.Reasoning) -> list[Event]:
        told: list[Event] = []
        where = (self.id, self.output_index, len(self._parts))
        if not self._written:
            part = content.ReasoningText("")
            told.append(events.ContentPartAdded(next(self._numbers), *where, part))
        self._written.append(delta.text)
        told.append(events.ReasoningTextDelta(next(self._numbers), *where, delta.text))
        return told

    def end_part(self) -> list[Event]:
        """What is written next goes into another part."""
        if not self._written:
            return []
        where = (self.id, self.output_index, len(self._parts))
        part = content.ReasoningText("".join(self._written))
        self._parts.append(part)
        self._written = []
        return [
            events.ReasoningTextDone(next(self._numbers), *where, part.text),
            events.ContentPartDone(next(self._numbers), *where, part),
        ]

    def write_summary(self, delta: deltas.ReasoningSummary) -> list[Event]:
        told: list[Event] = []
        if delta.index != self._summary_key:
            told = self._close_summary()
            self._summary_key = delta.index
            part = content.SummaryText("")
            told.append(
                events.ReasoningSummaryPartAdded(
                    next(self._numbers), self.id, self.output_index, len(self._summaries), part
                )
            )
        self._summary.append(delta.text)
        told.append(
            events.ReasoningSummaryTextDelta(
                next(self._numbers), self.id, self.output_index, len(self._summaries), delta.text
            )
        )
        return told

    def seal(self, delta: deltas.ReasoningSeal) -> list[Event]:
        self._sealed = delta.encrypted_content or None
        return []

    def close(self, ending: Ending) -> tuple[list[Event], items.OutputItem]:
        told = self._close_summary() + self.end_part()
        item = items.Reasoning(self._summaries, self.id, self._parts or None, self._sealed, ending)
        told.append(self._done(item))
        return told, item

    def _close_summary(self) -> list[Event]:
        if self._summary_key is None:
            return []
        where = (self.id, self.output_index, len(self._summaries))
        part = content.SummaryText("".join(self._summary))
        self._summaries.append(part)
        self._summary, self._summary_key = [], None
        return [
            events.ReasoningSummaryTextDone(next(self._numbers), *where, part.text),
            events.ReasoningSummaryPartDone(next(self._numbers), *where, part),
        ]


class CallDraft(Draft):
    """A function call."""

    prefix = "fc"

    def __init__(
        self, item_id: str, output_index: int, numbers: Iterator[int], *, call_id: str, name: str, namespace: str | None
    ) -> None:
        super().__init__(item_id, output_index, numbers)
        self._call_id = call_id
        self._name = name
        self._namespace = namespace
        self._written: list[str] = []

    def announce(self) -> list[Event]:
        return [self._added(self._item("", "in_progress"))]

    def write(self, fragment: str) -> list[Event]:
        if not fragment:
            return []
        self._written.append(fragment)
        return [self._delta(fragment)]

    def is_whole(self) -> bool:
        """Whether what has been written so far could be all of it."""
        try:
            read_json("".join(self._written), msgspec.Raw)
        except msgspec.DecodeError:
            return False
        return True

    def close(self, ending: Ending) -> tuple[list[Event], items.OutputItem]:
        text = "".join(self._written)
        item = self._item(text, ending)
        return [self._finished(text), self._done(item)], item

    def _delta(self, fragment: str) -> Event:
        return events.FunctionCallArgumentsDelta(next(self._numbers), self.id, self.output_index, fragment)

    def _finished(self, text: str) -> Event:
        return events.FunctionCallArgumentsDone(next(self._numbers), self.id, self.output_index, text)

    def _item(self, text: str, status: Literal["in_progress", "completed", "incomplete"]) -> items.OutputItem:
        return items.FunctionCall(self._call_id, self._name, text, self.id, status, self._namespace)


class CustomCallDraft(CallDraft):
    """A custom tool call: the same life, with free text for input."""

    prefix = "ctc"

    def is_whole(self) -> bool:
        return True  # any text could be

    def _delta(self, fragment: str) -> Event:
        return events.CustomToolCallInputDelta(next(self._numbers), self.id, self.output_index, fragment)

    def _finished(self, text: str) -> Event:
        return events.CustomToolCallInputDone(next(self._numbers), self.id, self.output_index, text)

    def _item(self, text: str, status: Literal["in_progress", "completed", "incomplete"]) -> items.OutputItem:
        return items.CustomToolCall(self._call_id, self._name, text, self.id, status, self._namespace)
