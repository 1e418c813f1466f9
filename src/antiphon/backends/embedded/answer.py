"""What the model says, as deltas: text, or calls in the form the grammar gives them."""

import json

from antiphon.backends.embedded.grammar import CALL_ARGUMENTS, CALL_NAME
from antiphon.backends.embedded.model import Chunk, Timings, Token
from antiphon.protocol.content import LogProb, TopLogProb
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.stream.deltas import Delta, Finish, Text, Tokens, ToolCall


class Answer:
    """Reads an answer as it comes. `finished` once its last delta is out."""

    def __init__(self, *, may_call: bool) -> None:
        self.finished = False
        self._calls: Calls | None = None
        self._opening = may_call
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
                self._calls = Calls()
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
            deltas.append(Tokens(_count(self._timings)))
        deltas.append(Finish("length" if reason == "length" else "stop"))
        return deltas


class Calls:
    """Splits calls out of the text. The first one goes out as it grows, later ones whole.

    A small model often ends in a loop of the same call. So a call that was made before in this answer is not made
    again, and `repeating` tells that nothing new will come.
    """

    def __init__(self) -> None:
        self.repeating = False
        self._buffer = ""
        self._made: list[tuple[str, str]] = []
        self._name: str | None = None
        self._scanner = Scanner()
        self._arguments = ""

    def read(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while not self.repeating and (self._name is not None or self._read_name()):
            more, closed = self._scanner.scan(self._buffer)
            self._arguments += more
            if not self._made:
                deltas += self._tell(more)
            if not closed:
                self._buffer = ""
                break
            self._buffer = self._buffer[len(more) + 1 :]
            deltas += self._close_call()
        return deltas

    def end(self) -> list[Delta]:
        """What is left of a call that was cut off."""
        if self._name is None or not self._made or self.repeating:
            return []
        return self._tell(self._arguments)

    def _read_name(self) -> bool:
        # The grammar lets nothing else come here but the end of one call and the beginning of the next.
        head, found, tail = self._buffer.partition(CALL_ARGUMENTS)
        if not found:
            return False
        self._name = json.loads(head[head.index(CALL_NAME) + len(CALL_NAME) :])
        self._buffer = tail
        self._scanner = Scanner()
        self._arguments = ""
        return True

    def _tell(self, arguments: str) -> list[Delta]:
        if not arguments:
            return []
        name = self._name if arguments == self._arguments else None
        return [ToolCall(len(self._made), arguments, name or "")]

    def _close_call(self) -> list[Delta]:
        call = (self._name or "", self._arguments)
        self.repeating = call in self._made
        deltas = self._tell(self._arguments) if self._made and not self.repeating else []
        self._made.append(call)
        self._name = None
        return deltas


class Scanner:
    """Finds where the arguments end: at a brace that none of their own has opened."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def scan(self, text: str) -> tuple[str, bool]:
        """The part of the text that belongs to the arguments, and whether their end was in it."""
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
                    return text[:position], True
                self._depth -= 1
        return text, False


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
