"""The streamed text of an answer: extract tagged reasoning, and hold back white space without text."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from antiphon.protocol.content import LogProb
from antiphon.stream.deltas import Reasoning, Text

OPENING, CLOSING = "<think>", "</think>"

# More white space than this is not held back: it is searched again with each piece.
_MAX_BLANK = 64 * 1024


class Split(NamedTuple):
    reasoning: str = ""
    text: str = ""


class ThinkingSplitter:
    """Splits streamed text into reasoning and text. Only tags at the beginning count; later ones are text."""

    def __init__(self, *, thinking: bool = False) -> None:
        self._state: Literal["start", "thinking", "gap", "text"] = "thinking" if thinking else "start"
        self._held = ""
        self._is_blank = True  # the reasoning has only white space so far

    @property
    def is_done(self) -> bool:
        """True if all that follows is text."""
        return self._state == "text"

    def feed(self, piece: str) -> Split:
        """Return the reasoning and text that are certain after this piece."""
        if self._state == "text":
            return Split(text=piece)
        self._held += piece
        if self._state == "start" and not self._leave_start():
            return Split()
        reasoning = self._take_reasoning() if self._state == "thinking" else ""
        return Split(reasoning, self._take_text())

    def close(self) -> Split:
        """Return the held-back rest at the end."""
        rest, self._held = self._held, ""
        if self._state == "thinking":
            return Split(reasoning="" if self._is_blank and not rest.strip() else rest)
        return Split(text="" if self._state == "gap" else rest)

    def _leave_start(self) -> bool:
        begun = self._held.lstrip()
        if begun.startswith(OPENING):
            self._held, self._state = begun.removeprefix(OPENING), "thinking"
        elif OPENING.startswith(begun) and len(self._held) <= _MAX_BLANK:
            return False
        else:
            self._state = "text"
        return True

    def _take_reasoning(self) -> str:
        reasoning, closed, rest = self._held.partition(CLOSING)
        if closed:
            self._held, self._state = rest, "gap"
            reasoning = reasoning.rstrip()
        else:  # trailing white space is dropped if the tag follows
            end = _find_certain_end(reasoning)
            self._held = reasoning[end:]
            reasoning = reasoning[:end]
        if self._is_blank:
            reasoning = reasoning.lstrip()
            self._is_blank = not reasoning
        return reasoning

    def _take_text(self) -> str:
        if self._state == "gap":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "text"
        if self._state != "text":
            return ""
        text, self._held = self._held, ""
        return text


def _find_certain_end(reasoning: str) -> int:
    """Return the index after which the text may be white space and a part of the closing tag."""
    start = next(
        (i for i in range(max(0, len(reasoning) - len(CLOSING)), len(reasoning)) if CLOSING.startswith(reasoning[i:])),
        len(reasoning),
    )
    return max(len(reasoning[:start].rstrip()), start - _MAX_BLANK)


class TextStream:
    """The text of one answer. White space is held back until text follows: many models put blank lines around calls."""

    def __init__(self, *, tags: bool, thinking: bool) -> None:
        self._splitter = ThinkingSplitter(thinking=thinking) if tags or thinking else None
        self._is_open = False
        self._blank = ""
        self._logprobs: list[LogProb] = []
        self._has_reasoning = False  # tokens since the last text belong to reasoning

    @property
    def is_plain_text(self) -> bool:
        """True if the next piece continues the open text, whatever it contains."""
        return self._is_open and self._splitter is None

    def begin(self, text: str) -> bool:
        """Open the text with its first piece. Return False, and do nothing, if only `write` can tell if it is text."""
        visible = text.lstrip()
        if not visible or visible[0] == OPENING[0]:
            return False
        self._splitter = None
        self._is_open = True
        return True

    def write(self, text: str, logprobs: tuple[LogProb, ...]) -> Iterator[Text | Reasoning]:
        """Return the deltas of the next piece of content."""
        if self.is_plain_text:
            yield Text(text, logprobs)
            return
        self._logprobs += logprobs
        if self._splitter is None:
            yield from self._emit(Split(text=text))
            return
        split = self._splitter.feed(text)
        if self._splitter.is_done:
            self._splitter = None
        yield from self._emit(split)

    def flush(self) -> Iterator[Text | Reasoning]:
        """Emit held-back text, because another kind of delta follows."""
        if self._splitter is not None:
            splitter, self._splitter = self._splitter, None
            yield from self._emit(splitter.close())

    def pause(self) -> None:
        """End the open text. The next text is a new message."""
        self._is_open = False

    def close(self, *, alone: bool) -> Iterator[Text | Reasoning]:
        """End the answer. Held-back white space is emitted if `alone`: it is then the whole answer."""
        yield from self.flush()
        if alone and self._blank:
            yield Text(self._blank, tuple(self._logprobs))

    def _emit(self, split: Split) -> Iterator[Text | Reasoning]:
        text = self._blank + split.text
        if split.reasoning:
            self._has_reasoning = True
            if not split.text:
                self._logprobs.clear()
            yield Reasoning(split.reasoning)
        if not text or (not self._is_open and len(text) <= _MAX_BLANK and text.isspace()):
            self._blank = text
            return
        logprobs = _select_logprobs(self._logprobs, text)
        if not logprobs and not self._has_reasoning:
            logprobs = tuple(self._logprobs)
        self._logprobs, self._blank, self._has_reasoning = [], "", False
        self._is_open = True
        yield Text(text, logprobs)


def _select_logprobs(logprobs: list[LogProb], text: str) -> tuple[LogProb, ...]:
    """Return the log probabilities of the last tokens, which make up the text. Return none if no tokens do."""
    length = 0
    for index in range(len(logprobs) - 1, -1, -1):
        length += len(logprobs[index].token)
        if length >= len(text):
            tokens = logprobs[index:]
            return tuple(tokens) if "".join(token.token for token in tokens) == text else ()
    return ()
