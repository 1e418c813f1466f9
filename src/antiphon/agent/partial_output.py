"""Typed output while the model writes it: the beginning of a JSON text, completed and validated."""

import re
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec

from antiphon.agent.outcome import (
    AgentChanged,
    ArgumentsDelta,
    PartialOutput,
    RunEnded,
    RunEvent,
    RunEvents,
    TextDelta,
    TurnRestarted,
    TurnStarted,
)
from antiphon.agent.typed_output import AnyType, TypedOutput
from antiphon.protocol.json_text import read_json

# A text is parsed again when it has grown by this part of its length, so that the whole cost stays linear.
_GROWTH = 64

_CLOSERS = {"{": "}", "[": "]"}
_ESCAPE_LENGTHS = {"u": 6}
_SPACE = " \t\r\n"
_WORD_END = re.compile(rf"[{_SPACE},\]}}]")


class PartialJson:
    """The beginning of a JSON text. Text before the first brace is skipped.

    `complete` closes strings, arrays and objects. A key without a value is dropped, and so is a number or a literal at
    the end, which may continue.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        """The position up to which the text is scanned. Before the first brace it is 0 and the text is empty."""
        self._closers: list[str] = []
        self._is_key = False
        """True if the next string, or the one that is open, is a key of an object."""
        self._string_start: int | None = None
        self._word_length = 0
        """The length of the text in which the end of the last number or literal was not found."""
        self._safe_length = 0
        """The length of the text that is complete except for its closing brackets, `_closers`."""
        self.is_closed = False

    def feed(self, delta: str) -> None:
        if self.is_closed:
            return
        if not self._text:
            start = delta.find("{")
            delta = delta[start:] if start >= 0 else ""
        self._text += delta
        while self._position < len(self._text) and not self.is_closed:
            if not (self._scan_string() if self._string_start is not None else self._scan_token()):
                return

    def complete(self) -> str:
        """Return the text with all that is missing at its end. "" before the first brace."""
        if self._string_start is not None and not self._is_key:
            return self._text[: self._position] + '"' + self._close()
        return self._text[: self._safe_length] + self._close()

    def _close(self) -> str:
        return "".join(reversed(self._closers))

    def _scan_string(self) -> bool:
        """Scan a string. Return False if the text ends within it."""
        text, position = self._text, self._position
        while position < len(text):
            if text[position] == '"':
                self._string_start, self._position = None, position + 1
                if not self._is_key:
                    self._mark()
                return True
            step = _measure_escape(text, position) if text[position] == "\\" else 1
            if position + step > len(text):
                break
            position += step
        self._position = position
        return False

    def _scan_token(self) -> bool:
        """Scan one character, or a number or literal. Return False if the text ends within it."""
        character = self._text[self._position]
        if character in "{[":
            self._closers.append(_CLOSERS[character])
            self._is_key = character == "{"
            self._position += 1
            self._mark()
        elif character in "}]":
            self._closers.pop()
            self._position += 1
            self._mark()
            self.is_closed = not self._closers
        elif character == '"':
            self._string_start = self._position
            self._position += 1
        elif character in ",:":
            self._is_key = character == "," and self._closers[-1] == "}"
            self._position += 1
        elif character in _SPACE:
            self._position += 1
        else:
            return self._scan_word()
        return True

    def _scan_word(self) -> bool:
        found = _WORD_END.search(self._text, max(self._position, self._word_length))
        if found is None:
            self._word_length = len(self._text)
            return False
        self._position = found.start()
        self._mark()
        return True

    def _mark(self) -> None:
        """Remember that the text up to here is complete except for its closing brackets."""
        self._safe_length = self._position


def _measure_escape(text: str, position: int) -> int:
    """Return the length of an escape sequence. A high surrogate belongs to the low one after it."""
    length = _ESCAPE_LENGTHS.get(text[position + 1 : position + 2], 2)
    is_high = length == 6 and text[position + 2 : position + 4].lower() in ("d8", "d9", "da", "db")
    return 12 if is_high else length


class PartialReader:
    """Makes partial outputs of the deltas of one answer. `kind` is the type of the answer."""

    def __init__(self, kind: AnyType) -> None:
        self._kind = kind
        self._json = PartialJson()
        self._length = 0
        self._due = 0
        self._last: Any = None

    def feed(self, delta: str) -> tuple[Any, Any] | None:
        """Return the data so far and the validated value, or None for it. None if nothing is new."""
        self._json.feed(delta)
        self._length += len(delta)
        if self._length < self._due and not self._json.is_closed:
            return None
        self._due = self._length + self._length // _GROWTH
        try:
            data = read_json(self._json.complete())
        except msgspec.DecodeError:
            return None
        value = self._kind.unwrap(data)
        if value is None or data == self._last:
            return None
        self._last = data
        try:
            return value, self._kind.convert(data)
        except msgspec.ValidationError:
            return value, None


async def add_partial_outputs(events: RunEvents, find_output: Callable[[str | None], TypedOutput | None]) -> RunEvents:
    """Yield the events of a run, with a PartialOutput after each delta that adds to the answer.

    `find_output` returns the output of the agent of a name, or of the active one for None.
    """
    output, is_known = None, False
    readers: dict[str, PartialReader] = {}
    last: PartialOutput | None = None
    async with aclosing(events):
        async for event in events:
            if not is_known or isinstance(event, AgentChanged):
                output, is_known = find_output(event.agent if isinstance(event, AgentChanged) else None), True
            if isinstance(event, TurnStarted | TurnRestarted):
                readers = {}
            if isinstance(event, RunEnded) and output is not None:
                whole = _make_last(event, output, last)
                if whole is not None:
                    yield whole
            yield event
            partial = None if output is None else _read_event(event, output, readers)
            if partial is not None:
                last = partial
                yield partial


def _read_event(event: RunEvent, output: TypedOutput, readers: dict[str, PartialReader]) -> PartialOutput | None:
    if isinstance(event, TextDelta) and not output.tools:
        key, kind = "", output.type
    elif isinstance(event, ArgumentsDelta) and event.name in output.tools:
        key, kind = event.call_id, output.tools[event.name]
    else:
        return None
    read = readers.setdefault(key, PartialReader(kind)).feed(event.text)
    return None if read is None else PartialOutput(event.run_id, *read, parent_id=event.parent_id)


def _make_last(event: RunEnded, output: TypedOutput, last: PartialOutput | None) -> PartialOutput | None:
    """Return the whole output, unless it was the last partial one."""
    outcome = event.outcome
    if outcome.output is None or (last is not None and last.output == outcome.output):
        return None
    data = output.type.unwrap(read_json(output.encode(outcome.output)))
    return PartialOutput(event.run_id, data, outcome.output, parent_id=event.parent_id)
