"""What the model says, as deltas: text, or calls in the form the grammar gives them."""

import json
import re
from collections.abc import Collection
from typing import Protocol

from antiphon.backends.embedded.grammar import CALL_ARGUMENTS, CALL_CLOSING, CALL_END, CALL_INPUT, CALL_NAME
from antiphon.backends.embedded.model import Chunk, Timings, Token
from antiphon.errors import ModelError
from antiphon.protocol.content import LogProb, TopLogProb
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.stream.deltas import CustomToolCall, Delta, Finish, Text, TokenUsage, ToolCall


class Answer:
    """Reads an answer as it comes. `finished` once its last delta is out."""

    def __init__(self, *, tools: Collection[str], open_ended: Collection[str] = ()) -> None:
        """`tools` are those that may be called; the calls of the `open_ended` ones end with the answer alone."""
        self.finished = False
        self._tools = tools
        self._open_ended = open_ended
        self._calls: Calls | None = None
        self._opening = bool(tools)
        self._held = ""
        self._logprobs: tuple[LogProb, ...] = ()
        self._timings: Timings | None = None

    def read(self, chunk: Chunk) -> list[Delta]:
        if chunk.timings is not None:
            self._timings = chunk.timings
        deltas: list[Delta] = []
        for choice in chunk.choices:
            if choice.text:
                deltas += self._read_text(choice.text, choice.logprobs.content if choice.logprobs else [])
            if self._calls is not None and self._calls.repeating:
                return [*deltas, *self._end("stop")]
            if choice.finish_reason is not None:
                deltas += self._end(choice.finish_reason)
        return deltas

    def _read_text(self, text: str, tokens: list[Token]) -> list[Delta]:
        if self._calls is not None:
            return self._calls.read(text)
        self._held += text
        self._logprobs += tuple(map(_translate, tokens))
        if self._opening:
            # Which of the two it is shows as soon as the text leaves, or completes, the beginning of a call.
            if self._held.startswith(CALL_NAME):
                self._calls = Calls(self._tools, self._open_ended)
                return self._calls.read(self._held)
            if CALL_NAME.startswith(self._held):
                return []
        self._opening = False
        return self._release()

    def _release(self) -> list[Delta]:
        held, self._held = self._held, ""
        logprobs, self._logprobs = self._logprobs, ()
        return [Text(held, logprobs)] if held else []

    def _end(self, reason: str) -> list[Delta]:
        self.finished = True
        deltas = self._calls.end() if self._calls is not None else []
        # A call that was cut off before its name is known is no text either.
        if self._calls is None and not (self._opening and reason == "length"):
            deltas = self._release()
        if self._timings is not None:
            deltas.append(TokenUsage(_count(self._timings)))
        deltas.append(Finish("length" if reason == "length" else "stop"))
        return deltas


class Calls:
    """Splits calls out of the text. The first one goes out as it grows, later ones whole.

    A small model often ends in a loop of the same call. So a call that was made before in this answer is not made
    again, and `repeating` tells that nothing new will come.
    """

    def __init__(self, tools: Collection[str], open_ended: Collection[str]) -> None:
        self.repeating = False
        self._tools = tools
        self._open_ended = open_ended
        self._buffer = ""
        self._made: list[tuple[str, str]] = []
        self._call: Call | None = None

    def read(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while not self.repeating and (call := self._call or self._open_call()):
            more, self._buffer, closed = call.scanner.scan(self._buffer)
            call.said += more
            if not closed:
                return deltas if self._made else [*deltas, *call.tell(0)]
            deltas += self._close_call(call)
        return deltas

    def end(self) -> list[Delta]:
        """What is left of a call that was cut off, or that ends here."""
        if self._call is None or self.repeating:
            return []
        self._call.said += self._buffer
        return self._call.tell(len(self._made), last=True)

    def _open_call(self) -> "Call | None":
        # The grammar lets nothing else come here but the end of one call and the beginning of the next.
        found = _HEAD.search(self._buffer)
        if found is None:
            return None
        self._buffer = self._buffer[found.end() :]
        name = json.loads(found[1])
        if name not in self._tools:  # a grammar that becomes too much in the middle no longer holds the model
            raise ModelError(f"The model called '{name}', which it was not offered.")
        if found[2] == CALL_ARGUMENTS:
            self._call = Call(name, Arguments(), custom=False)
        else:
            self._call = Call(name, OpenInput() if name in self._open_ended else Input(), custom=True)
        return self._call

    def _close_call(self, call: "Call") -> list[Delta]:
        made = (call.name, call.said)
        self.repeating = made in self._made
        deltas = [] if self.repeating else call.tell(len(self._made), last=True)
        self._made.append(made)
        self._call = None
        return deltas


_HEAD = re.compile(rf'{re.escape(CALL_NAME)}("(?:[^"\\]|\\.)*")({re.escape(CALL_ARGUMENTS)}|{re.escape(CALL_INPUT)})')


class Call:
    """A call as it comes: what was said of its arguments or input, and how much of that was told."""

    def __init__(self, name: str, scanner: "Scanner", *, custom: bool) -> None:
        self.name = name
        self.scanner = scanner
        self.said = ""
        self._custom = custom
        self._told: int | None = None

    def tell(self, key: int, *, last: bool = False) -> list[Delta]:
        more = self.said[self._told or 0 :]
        # Arguments are never empty once they are whole, but an input may be.
        if not more and not (last and self._custom and self._told is None):
            return []
        name = self.name if self._told is None else ""
        self._told = len(self.said)
        return [CustomToolCall(key, more, name) if self._custom else ToolCall(key, more, name)]


class Scanner(Protocol):
    """Finds where a call ends."""

    def scan(self, text: str) -> tuple[str, str, bool]:
        """What of the text belongs to the call, what is to be looked at again, and whether the end was found."""


class Arguments:
    """They end at a brace that none of their own has opened."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def scan(self, text: str) -> tuple[str, str, bool]:
        for position, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                if self._depth == 0:
                    return text[:position], text[position + 1 :], True
                self._depth -= 1
        return text, "", False


class Input:
    """It ends at the sign that ends a call, or at the end of the line before it. What may become that waits."""

    def scan(self, text: str) -> tuple[str, str, bool]:
        said, found, rest = text.partition(CALL_END)
        if found:
            return said.removesuffix("\n"), rest, True
        for length in range(min(len(CALL_END), len(text)), 0, -1):
            if CALL_CLOSING.startswith(text[-length:]) or CALL_END.startswith(text[-length:]):
                return text[:-length], text[-length:], False
        return text, "", False


class OpenInput:
    """It ends with the answer."""

    def scan(self, text: str) -> tuple[str, str, bool]:
        return text, "", False


def _translate(token: Token) -> LogProb:
    top = [TopLogProb(each.token, each.logprob, each.bytes) for each in token.top_logprobs]
    return LogProb(token.token, token.logprob, token.bytes, top)


def _count(timings: Timings) -> Usage:
    read = timings.cache_n + timings.prompt_n
    return Usage(
        input_tokens=read,
        output_tokens=timings.predicted_n,
        total_tokens=read + timings.predicted_n,
        input_tokens_details=InputTokensDetails(cached_tokens=timings.cache_n),
    )
