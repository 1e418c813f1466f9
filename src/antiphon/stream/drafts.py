"""Drafts: output items while they are being written.

A draft turns the deltas of one item into that item's events: it announces the item, adds to it, and closes it. It is
independent of the other items. Announced and final items are separate objects, because an event may be encoded after
the draft has changed.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from antiphon.protocol import content, events, items
from antiphon.protocol.content import Annotation, LogProb
from antiphon.protocol.events import Event
from antiphon.protocol.hosted import ShellCall
from antiphon.protocol.hosted_events import ShellCommandAdded, ShellCommandDelta, ShellCommandDone
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

Ending = Literal["completed", "incomplete"]
# Number of deltas of a batch that are copied at a time.
_COPIED_DELTAS = 256


class _Pieces(list[str]):
    """Text in pieces. `counted_length` is the length of the text that `take_length` has counted."""

    __slots__ = ("_counted", "counted_length")

    def __init__(self) -> None:
        self.counted_length = self._counted = 0

    def join(self) -> str:
        return "".join(self[:])  # a slice is a plain list, which is joined twice as fast

    def take_length(self) -> int:
        """Return the length of the text since the last call. Join its pieces: in one they take less memory."""
        new = "".join(self[self._counted :])
        if new:
            self[self._counted :] = [new]
            self._counted += 1
            self.counted_length += len(new)
        return len(new)


class Draft:
    """An output item in progress."""

    prefix: str

    def __init__(self, item_id: str, output_index: int, numbers: Iterator[int]) -> None:
        self.id = item_id
        self.output_index = output_index
        self.amendments: dict[str, msgspec.Raw] = {}
        self.announced: events.OutputItemAdded | None = None
        self._numbers = numbers
        self._ended_size = 0  # of text in parts that have ended, not yet taken

    def take_size(self) -> int:
        """Return the size of the text that was written since the last call."""
        size, self._ended_size = self._ended_size, 0
        return size

    def _added(self, item: items.OutputItem | Unknown) -> Event:
        self.announced = events.OutputItemAdded(next(self._numbers), self.output_index, item)
        return self.announced

    def _done(self, item: items.OutputItem | Unknown) -> Event:
        return events.OutputItemDone(next(self._numbers), self.output_index, item)


class MessageDraft(Draft):
    """A message in progress: a sequence of text parts and refusal parts."""

    prefix = "msg"

    def __init__(self, item_id: str, output_index: int, numbers: Iterator[int]) -> None:
        super().__init__(item_id, output_index, numbers)
        self.phase: items.Phase | None = None
        self._parts: list[content.Part | Unknown] = []
        self._open: Literal["text", "refusal"] | None = None
        self._fragments = _Pieces()
        self._logprobs: list[LogProb] = []
        self._annotations: list[Annotation | Unknown] = []

    def announce(self) -> list[Event]:
        return [self._added(items.Message("assistant", [], self.id, "in_progress", self.phase))]

    def write_text(self, delta: deltas.Text) -> list[Event]:
        emitted = [] if self._open == "text" else self._open_part("text")
        text, logprobs = delta.text, list(delta.logprobs)
        self._fragments.append(text)
        if logprobs:
            self._logprobs += logprobs
        emitted.append(
            events.OutputTextDelta(next(self._numbers), self.id, self.output_index, len(self._parts), text, logprobs)
        )
        return emitted

    def continue_text(self, batch: Sequence[Delta], start: int) -> list[Event | Unknown]:
        """Write the plain text in a batch from `start` on to the open text part: one event for each delta.

        Stop at the first delta that is anything else, and at once if no text part is open. The end of a long text may
        be left to the next call.
        """
        emitted: list[Event | Unknown] = []
        if self._open == "text":
            item_id, output_index, content_index = self.id, self.output_index, len(self._parts)
            # Local names, because this loop runs for every token.
            fragments, numbers = self._fragments, self._numbers
            text_delta, text_event = deltas.Text, events.OutputTextDelta
            # The part that is copied is bounded: a large batch may alternate between text and other deltas.
            for delta in batch[start : start + _COPIED_DELTAS] if start else batch:
                if type(delta) is not text_delta or delta.logprobs:
                    break
                text = delta.text
                if not text:
                    break
                fragments.append(text)
                emitted.append(text_event(next(numbers), item_id, output_index, content_index, text, []))
        return emitted

    def write_refusal(self, delta: deltas.Refusal) -> list[Event]:
        emitted = [] if self._open == "refusal" else self._open_part("refusal")
        self._fragments.append(delta.text)
        emitted.append(
            events.RefusalDelta(next(self._numbers), self.id, self.output_index, len(self._parts), delta.text)
        )
        return emitted

    def annotate(self, delta: deltas.Annotate) -> list[Event]:
        emitted = [] if self._open == "text" else self._open_part("text")
        emitted.append(
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
        return emitted

    def close(self, ending: Ending) -> tuple[list[Event], items.OutputItem]:
        emitted = self.end_part()
        item = items.Message("assistant", self._parts, self.id, ending, self.phase)
        emitted.append(self._done(item))
        return emitted, item

    def take_size(self) -> int:
        return super().take_size() + self._fragments.take_length()

    def _open_part(self, kind: Literal["text", "refusal"]) -> list[Event]:
        emitted = self.end_part()
        self._open = kind
        part = content.OutputText("", [], []) if kind == "text" else content.Refusal("")
        emitted.append(events.ContentPartAdded(next(self._numbers), self.id, self.output_index, len(self._parts), part))
        return emitted

    def end_part(self) -> list[Event]:
        """Close the open part. The next text starts another one."""
        if self._open is None:
            return []
        position = (self.id, self.output_index, len(self._parts))
        text = self._fragments.join()
        part: content.Part
        done: Event
        if self._open == "text":
            part = content.OutputText(text, self._annotations, self._logprobs)
            done = events.OutputTextDone(next(self._numbers), *position, text, self._logprobs)
        else:
            part = content.Refusal(text)
            done = events.RefusalDone(next(self._numbers), *position, text)
        emitted: list[Event] = [done, events.ContentPartDone(next(self._numbers), *position, part)]
        self._parts.append(part)
        self._ended_size += len(text) - self._fragments.counted_length
        self._open, self._fragments, self._logprobs, self._annotations = None, _Pieces(), [], []
        return emitted


class ReasoningDraft(Draft):
    """A reasoning item in progress: text in content parts, summaries in numbered parts, and encrypted content."""

    prefix = "rs"

    def __init__(self, item_id: str, output_index: int, numbers: Iterator[int]) -> None:
        super().__init__(item_id, output_index, numbers)
        self.has_status = True
        self._parts: list[content.Part | Unknown] = []
        self._fragments = _Pieces()
        self._summaries: list[content.SummaryText] = []
        self._summary = _Pieces()
        self._summary_key: int | None = None
        self._sealed: str | None = None

    def announce(self) -> list[Event]:
        return [self._added(items.Reasoning(id=self.id, status="in_progress" if self.has_status else None))]

    def write_text(self, delta: deltas.Reasoning) -> list[Event]:
        emitted: list[Event] = []
        position = (self.id, self.output_index, len(self._parts))
        if not self._fragments:
            part = content.ReasoningText("")
            emitted.append(events.ContentPartAdded(next(self._numbers), *position, part))
        self._fragments.append(delta.text)
        emitted.append(events.ReasoningTextDelta(next(self._numbers), *position, delta.text))
        return emitted

    def end_part(self) -> list[Event]:
        """Close the open part. The next text starts another one."""
        if not self._fragments:
            return []
        position = (self.id, self.output_index, len(self._parts))
        part = content.ReasoningText(self._fragments.join())
        self._parts.append(part)
        self._ended_size += len(part.text) - self._fragments.counted_length
        self._fragments = _Pieces()
        return [
            events.ReasoningTextDone(next(self._numbers), *position, part.text),
            events.ContentPartDone(next(self._numbers), *position, part),
        ]

    def write_summary(self, delta: deltas.ReasoningSummary) -> list[Event]:
        emitted: list[Event] = []
        if delta.index != self._summary_key:
            emitted = self._close_summary()
            self._summary_key = delta.index
            part = content.SummaryText("")
            emitted.append(
                events.ReasoningSummaryPartAdded(
                    next(self._numbers), self.id, self.output_index, len(self._summaries), part
                )
            )
        self._summary.append(delta.text)
        emitted.append(
            events.ReasoningSummaryTextDelta(
                next(self._numbers), self.id, self.output_index, len(self._summaries), delta.text
            )
        )
        return emitted

    def seal(self, delta: deltas.ReasoningSeal) -> list[Event]:
        self._sealed = delta.encrypted_content or None
        return []

    def close(self, ending: Ending) -> tuple[list[Event], items.OutputItem]:
        emitted = self._close_summary() + self.end_part()
        status = ending if self.has_status or ending == "incomplete" else None
        item = items.Reasoning(self._summaries, self.id, self._parts or None, self._sealed, status)
        emitted.append(self._done(item))
        return emitted, item

    def take_size(self) -> int:
        return super().take_size() + self._fragments.take_length() + self._summary.take_length()

    def _close_summary(self) -> list[Event]:
        if self._summary_key is None:
            return []
        position = (self.id, self.output_index, len(self._summaries))
        part = content.SummaryText(self._summary.join())
        self._summaries.append(part)
        self._ended_size += len(part.text) - self._summary.counted_length
        self._summary, self._summary_key = _Pieces(), None
        return [
            events.ReasoningSummaryTextDone(next(self._numbers), *position, part.text),
            events.ReasoningSummaryPartDone(next(self._numbers), *position, part),
        ]


class CallDraft(Draft):
    """A function call in progress. A call that a program makes keeps the status `in_progress`, as OpenAI sends it."""

    prefix = "fc"

    def __init__(
        self,
        item_id: str,
        output_index: int,
        numbers: Iterator[int],
        *,
        call_id: str,
        name: str,
        namespace: str | None,
        caller: JsonObject | None = None,
    ) -> None:
        super().__init__(item_id, output_index, numbers)
        self._call_id = call_id
        self._name = name
        self._namespace = namespace
        self.has_end = False
        self._caller = caller
        self._fragments = _Pieces()

    def announce(self) -> list[Event]:
        return [self._added(self._item("", "in_progress"))]

    def write(self, fragment: str) -> list[Event]:
        if not fragment:
            return []
        self._fragments.append(fragment)
        return [self._delta(fragment)]

    def is_whole(self) -> bool:
        """Return True if the arguments so far are complete JSON."""
        try:
            read_json(self._fragments.join(), msgspec.Raw)
        except msgspec.DecodeError:
            return False
        return True

    def is_object(self) -> bool:
        """Return True if the arguments so far are a complete JSON object. A longer text would not be JSON."""
        text = self._fragments.join().strip()
        return text.startswith("{") and text.endswith("}") and self.is_whole()

    def close(self, ending: Ending) -> tuple[list[Event], items.OutputItem]:
        text = self._fragments.join()
        item = self._item(text, ending if self._caller is None or ending == "incomplete" else "in_progress")
        return [self._complete(text), self._done(item)], item

    def take_size(self) -> int:
        return self._fragments.take_length()

    def _delta(self, fragment: str) -> Event:
        return events.FunctionCallArgumentsDelta(next(self._numbers), self.id, self.output_index, fragment)

    def _complete(self, text: str) -> Event:
        return events.FunctionCallArgumentsDone(next(self._numbers), self.id, self.output_index, text, self._name)

    def _item(self, text: str, status: Literal["in_progress", "completed", "incomplete"]) -> items.OutputItem:
        return items.FunctionCall(
            self._call_id, self._name, text, self.id, status, self._namespace, caller=self._caller
        )


class CustomCallDraft(CallDraft):
    """A custom tool call in progress. Its input is free text."""

    prefix = "ctc"

    def is_whole(self) -> bool:
        return True  # any text is valid

    def is_object(self) -> bool:
        return False  # free text can always continue

    def _delta(self, fragment: str) -> Event:
        return events.CustomToolCallInputDelta(next(self._numbers), self.id, self.output_index, fragment)

    def _complete(self, text: str) -> Event:
        return events.CustomToolCallInputDone(next(self._numbers), self.id, self.output_index, text)

    def _item(self, text: str, status: Literal["in_progress", "completed", "incomplete"]) -> items.OutputItem:
        return items.CustomToolCall(
            self._call_id, self._name, text, self.id, status, self._namespace, caller=self._caller
        )


def compose_command_events(call: ShellCall, output_index: int, numbers: Iterator[int]) -> Iterator[Event]:
    """Yield the events of the commands of a whole shell call."""
    for index, command in enumerate(call.action.commands):
        yield ShellCommandAdded(next(numbers), output_index, index, "")
        yield ShellCommandDelta(next(numbers), output_index, index, command)
        yield ShellCommandDone(next(numbers), output_index, index, command)
