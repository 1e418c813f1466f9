"""Reasoning that stands in the text, between tags, as models write it when their server does not take it out."""

from typing import Literal, NamedTuple

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
