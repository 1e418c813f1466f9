"""The text of an answer, as it comes: reasoning between tags is taken out of it, and bare white space is no message."""

from collections.abc import Iterator

from antiphon.backends.chat_completions.thinking import Split, Splitter
from antiphon.protocol.content import LogProb
from antiphon.stream.deltas import Reasoning, Text


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
