"""Chunks of a text by tokens, and the windows of a chunk that fit the embedding model."""

import itertools
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

# Tokens that a window may have. The model reads 254, and the beginning of a window can move back to a word.
WINDOW_TOKENS = 230
_MAX_MOVE = 20
_SEGMENT_CHARACTERS = 200_000
# A longer token, or one with more space after it, counts as several. A tokenizer may take a word of any length as one.
MAX_TOKEN_CHARACTERS = 64
# An estimate of tokens: a CJK character, up to six letters, or any other character.
_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w{1,6}|[^\w\s]")


class TextTokenizer(Protocol):
    def tokenize(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ids of the tokens of a text, and the offset of each token's first character."""


class EstimatingTokenizer:
    """Estimates the tokens of a text, for embedding models whose tokenizer is not known. All ids are 0."""

    def tokenize(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        starts = [found.start() for found in _TOKEN.finditer(text)]
        return [0] * len(starts), starts


class TextChunk(NamedTuple):
    """A chunk: its offset and its text, and its windows as ranges of tokens."""

    starts_at: int
    text: str
    windows: list[tuple[int, int]]


class ChunkedText:
    """A tokenized text. `ids` are the ids of all tokens. A very long token is repeated."""

    def __init__(self, text: str, tokenizer: TextTokenizer) -> None:
        self._text = text
        self.ids = array("i")
        self._starts = array("q")
        for start, segment in _split(text):
            for token, offset in zip(*tokenizer.tokenize(segment), strict=True):
                self._fill(start + offset)
                self.ids.append(token)
                self._starts.append(start + offset)
        self._fill(len(text))

    def _fill(self, end: int) -> None:
        """Repeat the last token up to this character, so that no token has too many of them."""
        if self.ids and end - self._starts[-1] > MAX_TOKEN_CHARACTERS:
            repeated = range(self._starts[-1] + MAX_TOKEN_CHARACTERS, end, MAX_TOKEN_CHARACTERS)
            self.ids.extend([self.ids[-1]] * len(repeated))
            self._starts.extend(repeated)

    def __len__(self) -> int:
        return len(self.ids)

    def list_chunks(self, max_tokens: int, overlap_tokens: int) -> Iterator[TextChunk]:
        """Yield chunks of up to `max_tokens`. Each repeats the last `overlap_tokens` of the one before.

        Chunks begin and end at words. Together they cover the whole text: no character between two chunks is left
        out.
        """
        stride, count = max_tokens - overlap_tokens, len(self)
        windows = math.ceil(max_tokens / WINDOW_TOKENS)
        for first in range(0, max(count - overlap_tokens, 1), stride):
            points = [self._find_word(first + index * max_tokens // windows) for index in range(windows + 1)]
            begin, end = self._locate(points[0]) if first else 0, self._locate(points[-1])
            ranges = [(one, other) for one, other in itertools.pairwise(points) if one < other]
            yield TextChunk(begin, self._text[begin:end], ranges)

    def _find_word(self, token: int) -> int:
        """Return a position close before this one at which a word begins, or this one."""
        if token >= len(self):
            return len(self)
        for position in range(token, max(token - _MAX_MOVE, 0), -1):
            if self._text[self._starts[position] - 1].isspace():
                return position
        return token

    def _locate(self, token: int) -> int:
        return self._starts[token] if token < len(self) else len(self._text)


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Yield segments of a text with their offsets, because a tokenizer needs much memory for a long text."""
    start = 0
    while start < len(text):
        end = start + _SEGMENT_CHARACTERS
        if end < len(text):
            space = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
            end = space if space > start else end
        yield start, text[start:end]
        start = end
