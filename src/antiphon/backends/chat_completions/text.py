"""The text of an answer, as it comes: reasoning between tags is taken out of it, and bare white space is no message."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from antiphon.protocol.content import LogProb
from antiphon.stream.deltas import Reasoning, Text

OPENING, CLOSING = "<think>", "</think>"


class Split(NamedTuple):
    reasoning: str = ""
    text: str = ""


class Splitter:
    """Takes an answer apart as it comes. Only what it begins with can be reasoning; tags further on are text."""

    def __init__(self, *, thinking: bool = False) -> None:
        self._state: Literal["start", "thinking", "gap", "text"] = "thinking" if thinking else "start"
        self._held = ""
        self._silent = True  # nothing but white space of the reasoning has come

    @property
    def is_done(self) -> bool:
        """All that follows is text."""
        return self._state == "text"

    def feed(self, piece: str) -> Split:
        """What this piece makes certain."""
        if self._state == "text":
            return Split(text=piece)
        self._held += piece
        if self._state == "start" and not self._leave_start():
            return Split()
        reasoning = self._think() if self._state == "thinking" else ""
        return Split(reasoning, self._speak())

    def close(self) -> Split:
        """What was held back, when nothing more comes."""
        rest, self._held = self._held, ""
        if self._state == "thinking":
            return Split(reasoning="" if self._silent and not rest.strip() else rest)
        return Split(text="" if self._state == "gap" else rest)

    def _leave_start(self) -> bool:
        begun = self._held.lstrip()
        if begun.startswith(OPENING):
            self._held, self._state = begun.removeprefix(OPENING), "thinking"
        elif OPENING.startswith(begun):
            return False
        else:
            self._state = "text"
        return True

    def _think(self) -> str:
        thought, closed, rest = self._held.partition(CLOSING)
        if closed:
            self._held, self._state = rest, "gap"
            thought = thought.rstrip()
        else:  # white space may be the last before the tag, which does not count
            kept = _overlap(thought)
            self._held = thought[kept:]
            thought = thought[:kept]
        if self._silent:
            thought = thought.lstrip()
            self._silent = not thought
        return thought

    def _speak(self) -> str:
        if self._state == "gap":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "text"
        if self._state != "text":
            return ""
        text, self._held = self._held, ""
        return text


def _overlap(thought: str) -> int:
    """Where the end of the thought begins that may belong to the closing tag, with the white space before it."""
    place = next(
        (i for i in range(max(0, len(thought) - len(CLOSING)), len(thought)) if CLOSING.startswith(thought[i:])),
        len(thought),
    )
    return len(thought[:place].rstrip())


class Speech:
    """Many models put empty lines before and after their calls. White space waits until text follows it."""

    def __init__(self, *, tags: bool, thinking: bool) -> None:
        self._splitter = Splitter(thinking=thinking) if tags or thinking else None
        self._speaking = False
        self._blank = ""
        self._logprobs: list[LogProb] = []

    @property
    def is_flowing(self) -> bool:
        """Whether text that comes now is text that goes on, whatever it is."""
        return self._speaking and self._splitter is None

    def write(self, text: str, logprobs: tuple[LogProb, ...]) -> Iterator[Text | Reasoning]:
        """More of the answer's content."""
        if self.is_flowing:
            yield Text(text, logprobs)
            return
        self._logprobs += logprobs
        if self._splitter is None:
            yield from self._tell(Split(text=text))
            return
        split = self._splitter.feed(text)
        if self._splitter.is_done:
            self._splitter = None
        yield from self._tell(split)

    def flush(self) -> Iterator[Text | Reasoning]:
        """Something else follows: what might have been the beginning of a tag is none."""
        if self._splitter is not None:
            splitter, self._splitter = self._splitter, None
            yield from self._tell(splitter.close())

    def pause(self) -> None:
        """Something else is said now; the next text is a message of its own."""
        self._speaking = False

    def close(self, *, alone: bool) -> Iterator[Text | Reasoning]:
        """The answer is over. White space is told after all if it is `alone`: then it is what the model said."""
        yield from self.flush()
        if alone and self._blank:
            yield Text(self._blank, tuple(self._logprobs))

    def _tell(self, split: Split) -> Iterator[Text | Reasoning]:
        if split.reasoning:
            self._logprobs.clear()  # they are of the reasoning's tokens, or cannot be told apart
            yield Reasoning(split.reasoning)
        text = self._blank + split.text
        if not text or (not self._speaking and text.isspace()):
            self._blank = text
            return
        logprobs, self._logprobs, self._blank = tuple(self._logprobs), [], ""
        self._speaking = True
        yield Text(text, logprobs)
