"""Translate the model's output into deltas: text, or calls in the form that the grammar defines."""

import json
import re
from collections.abc import Collection, Iterable
from typing import Protocol

from antiphon.backends.embedded.grammar import CALL_ARGUMENTS, CALL_CLOSING, CALL_END, CALL_INPUT, CALL_NAME
from antiphon.backends.embedded.model import CompletionChunk, GeneratedToken, Timings
from antiphon.backends.embedded.printed_calls import CallForms
from antiphon.errors import ModelError
from antiphon.protocol.content import LogProb, TopLogProb
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.stream.deltas import CustomToolCall, Delta, Finish, Text, TokenUsage, ToolCall

_CALL_START = re.compile(
    rf'{re.escape(CALL_NAME)}("(?:[^"\\]|\\.)*")({re.escape(CALL_ARGUMENTS)}|{re.escape(CALL_INPUT)})'
)


class OutputReader:
    """Reads the output of one turn. `finished` is True after the last delta.

    `tools` are the tools that may be called. A call of an `open_ended` tool ends only with the output. With `forms`, an
    answer that starts as a printed call is not emitted: `printed_tool` is then the tool's name. `earlier_tokens` is the
    number of prompt tokens that were read for this turn before, for a decision or in slices: llama.cpp counts them as
    cached.
    """

    def __init__(
        self, *, tools: Collection[str], open_ended: Collection[str] = (), forms: CallForms | None = None
    ) -> None:
        self.finished = False
        self.earlier_tokens = 0
        self.printed_tool: str | None = None
        self._tools = tools
        self._open_ended = open_ended
        self._forms = forms
        self._calls: CallReader | None = None
        # The output so far may be the beginning of a call.
        self._may_be_call = bool(tools)
        self._pending = ""
        self._logprobs: tuple[LogProb, ...] = ()
        self._timings: Timings | None = None

    @property
    def may_print_call(self) -> bool:
        """True while the output may still turn out to be a printed call."""
        return self._forms is not None and not self.finished

    def read_all(self, chunks: Iterable[CompletionChunk]) -> list[Delta]:
        """Read chunks up to the last delta of the turn."""
        deltas: list[Delta] = []
        for chunk in chunks:
            deltas += self.read(chunk)
            if self.finished or self.printed_tool is not None:
                break
        return deltas

    def read(self, chunk: CompletionChunk) -> list[Delta]:
        if chunk.timings is not None:
            self._timings = chunk.timings
        deltas: list[Delta] = []
        for choice in chunk.choices:
            if choice.text:
                deltas += self._read_text(choice.text, choice.logprobs.content if choice.logprobs else [])
            if self.printed_tool is not None:
                return deltas
            if self._calls is not None and self._calls.is_repeating:
                return [*deltas, *self._finish("stop")]
            if choice.finish_reason is not None:
                deltas += self._finish(choice.finish_reason)
        return deltas

    def _read_text(self, text: str, tokens: list[GeneratedToken]) -> list[Delta]:
        if self._calls is not None:
            return self._calls.read(text)
        self._pending += text
        self._logprobs += tuple(map(_translate_token, tokens))
        if self._may_be_call:
            if self._pending.startswith(CALL_NAME):
                self._calls = CallReader(self._tools, self._open_ended)
                return self._calls.read(self._pending)
            if CALL_NAME.startswith(self._pending):
                return []
        self._may_be_call = False
        if self._forms is not None:
            self.printed_tool = self._forms.find_tool(self._pending)
            if self.printed_tool is not None or self._forms.may_be_call(self._pending):
                return []
            self._forms = None
        return self._release_text()

    def _release_text(self) -> list[Delta]:
        text, self._pending = self._pending, ""
        logprobs, self._logprobs = self._logprobs, ()
        return [Text(text, logprobs)] if text else []

    def _finish(self, reason: str) -> list[Delta]:
        self.finished = True
        deltas = self._calls.end() if self._calls is not None else []
        # A call that was cut off before its name is dropped, not emitted as text.
        if self._calls is None and not (self._may_be_call and reason == "length"):
            deltas = self._release_text()
        if self._timings is not None:
            deltas.append(TokenUsage(_sum_usage(self._timings, self.earlier_tokens)))
        deltas.append(Finish("length" if reason == "length" else "stop"))
        return deltas


class CallReader:
    """Splits the output into calls. The first call is emitted while it grows, later ones whole.

    Small models often repeat the same call endlessly. A call that equals an earlier one is dropped, and
    `is_repeating` is set: the rest of the output is not needed.
    """

    def __init__(self, tools: Collection[str], open_ended: Collection[str]) -> None:
        self.is_repeating = False
        self._tools = tools
        self._open_ended = open_ended
        self._buffer = ""
        self._finished_calls: list[tuple[str, str]] = []
        self._call: GrowingCall | None = None

    def read(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while not self.is_repeating and (call := self._call or self._open_call()):
            more, self._buffer, is_closed = call.scanner.scan(self._buffer)
            call.text += more
            if not is_closed:
                return deltas if self._finished_calls else [*deltas, *call.emit(0)]
            deltas += self._close_call(call)
        return deltas

    def end(self) -> list[Delta]:
        """Return the rest of a call that was cut off, or that ends with the output."""
        if self._call is None or self.is_repeating:
            return []
        self._call.text += self._buffer
        return self._call.emit(len(self._finished_calls), is_last=True)

    def _open_call(self) -> "GrowingCall | None":
        # The grammar allows only the end of one call and the start of the next here.
        found = _CALL_START.search(self._buffer)
        if found is None:
            return None
        self._buffer = self._buffer[found.end() :]
        name = json.loads(found[1])
        if name not in self._tools:  # llguidance stops enforcing a grammar that exceeds its limits
            raise ModelError(f"The model called '{name}', which is not an available tool.")
        if found[2] == CALL_ARGUMENTS:
            self._call = GrowingCall(name, ArgumentsScanner(), is_custom=False)
        else:
            scanner = OpenEndedScanner() if name in self._open_ended else InputScanner()
            self._call = GrowingCall(name, scanner, is_custom=True)
        return self._call

    def _close_call(self, call: "GrowingCall") -> list[Delta]:
        finished = (call.name, call.text)
        self.is_repeating = finished in self._finished_calls
        deltas = [] if self.is_repeating else call.emit(len(self._finished_calls), is_last=True)
        self._finished_calls.append(finished)
        self._call = None
        return deltas


class GrowingCall:
    """A call in progress. `text` is its arguments or input so far."""

    def __init__(self, name: str, scanner: "CallScanner", *, is_custom: bool) -> None:
        self.name = name
        self.scanner = scanner
        self.text = ""
        self._is_custom = is_custom
        self._emitted: int | None = None

    def emit(self, key: int, *, is_last: bool = False) -> list[Delta]:
        """Return a delta with the text since the last one."""
        more = self.text[self._emitted or 0 :]
        # Complete arguments are never empty, but a custom tool's input can be.
        if not more and not (is_last and self._is_custom and self._emitted is None):
            return []
        name = self.name if self._emitted is None else ""
        self._emitted = len(self.text)
        return [CustomToolCall(key, more, name) if self._is_custom else ToolCall(key, more, name)]


class CallScanner(Protocol):
    """Finds the end of a call."""

    def scan(self, text: str) -> tuple[str, str, bool]:
        """Return the text that belongs to the call, the text to scan again, and True if the end was found."""


class ArgumentsScanner:
    """JSON arguments, which end at an unmatched closing bracket."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_quoted = False
        self._is_escaped = False

    def scan(self, text: str) -> tuple[str, str, bool]:
        for position, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_escaped = character == "\\"
                self._is_quoted = character != '"'
            elif character == '"':
                self._is_quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                if self._depth == 0:
                    return text[:position], text[position + 1 :], True
                self._depth -= 1
        return text, "", False


class InputScanner:
    """A custom tool's input, which ends at the end marker and the line break before it."""

    def scan(self, text: str) -> tuple[str, str, bool]:
        before, marker, rest = text.partition(CALL_END)
        if marker:
            return before.removesuffix("\n"), rest, True
        for length in range(min(len(CALL_END), len(text)), 0, -1):
            # The end of the text may be the beginning of the marker.
            if CALL_CLOSING.startswith(text[-length:]) or CALL_END.startswith(text[-length:]):
                return text[:-length], text[-length:], False
        return text, "", False


class OpenEndedScanner:
    """A custom tool's input with a grammar, which ends with the output."""

    def scan(self, text: str) -> tuple[str, str, bool]:
        return text, "", False


def _translate_token(token: GeneratedToken) -> LogProb:
    top = [TopLogProb(each.token, each.logprob, each.bytes) for each in token.top_logprobs]
    return LogProb(token.token, token.logprob, token.bytes, top)


def _sum_usage(timings: Timings, earlier_tokens: int) -> Usage:
    input_tokens = timings.cache_n + timings.prompt_n
    return Usage(
        input_tokens=input_tokens,
        output_tokens=timings.predicted_n,
        total_tokens=input_tokens + timings.predicted_n,
        input_tokens_details=InputTokensDetails(cached_tokens=max(0, timings.cache_n - earlier_tokens)),
    )
