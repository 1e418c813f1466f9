"""Citation markers in the answers of models: `【3】` cites the third search result.

Markers are removed from the text, and each valid one becomes an annotation at the position where it stood. Other text
in these brackets, which East Asian languages use for headings, is not changed.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from antiphon.protocol.content import FileCitation
from antiphon.stream.deltas import Annotate, Text
from antiphon.tools.hosted.base import TextFilter

OPEN, CLOSE = "【", "】"
# A longer text in brackets, or one with a line break, is not a marker.
_MAX_LENGTH = 256
_NUMBERS = re.compile(r"\s*\d+(?:\s*[,;、]\s*\d+)*\s*")
_NUMBER = re.compile(r"\d+")
# Forms that models know from elsewhere: 【3†source】 names a result, 【4:0†source】 and ids of other files do not.
_NUMBER_AND_NAME = re.compile(r"\s*(\d+)\s*†.*")
_OTHER_MARKER = re.compile(r"\s*\d+:\d+\s*†.*|\s*file-\w+.*")
_MAX_DIGITS = 9


class Source(NamedTuple):
    """A file that can be cited."""

    file_id: str
    filename: str


def make_marker(number: int) -> str:
    """Return the marker of a result. The first one has number 1."""
    return f"{OPEN}{number}{CLOSE}"


class CitationFilter(TextFilter):
    """Turns the markers of one message into annotations. `sources` are the results in the order of their numbers."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._held = ""
        self._length = 0

    def feed(self, text: str) -> Sequence[Text | Annotate]:
        self._held += text
        found: list[Text | Annotate] = []
        while self._held:
            start = self._held.find(OPEN)
            if start < 0:
                self._emit(found, len(self._held))
                break
            self._emit(found, start)
            end = self._held.find(CLOSE)
            following = self._held.find(OPEN, 1)
            if end > 0 and (following < 0 or end < following):
                self._read_marker(found, end + 1)
            elif following > 0:  # the first bracket is not closed
                self._emit(found, following)
            elif len(self._held) > _MAX_LENGTH or "\n" in self._held:
                self._emit(found, len(self._held))
            else:
                break
        return found

    def close(self) -> Sequence[Text | Annotate]:
        found: list[Text | Annotate] = []
        self._emit(found, len(self._held))
        return found

    def _emit(self, found: list[Text | Annotate], length: int) -> None:
        if length:
            text, self._held = self._held[:length], self._held[length:]
            self._length += len(text)
            found.append(Text(text))

    def _read_marker(self, found: list[Text | Annotate], length: int) -> None:
        """Replace the marker at the beginning of the held text, or emit the text if it is not a marker."""
        cited = self._find_sources(self._held[1 : length - 1])
        if cited is None:
            self._emit(found, length)
            return
        self._held = self._held[length:]
        found.extend(Annotate(FileCitation(source.file_id, source.filename, self._length)) for source in cited)

    def _find_sources(self, content: str) -> list[Source] | None:
        """Return the sources that a marker names, without unknown ones. None if the text is not a marker."""
        if len(content) >= _MAX_LENGTH or "\n" in content:
            return None
        named = [source for source in self._sources if content.strip() in (source.filename, source.file_id)]
        if named:
            return named[:1]
        if found := _NUMBER_AND_NAME.fullmatch(content):
            content = found[1]
        if not _NUMBERS.fullmatch(content):
            return [] if _OTHER_MARKER.fullmatch(content) else None
        numbers = [int(digits) for digits in _NUMBER.findall(content) if len(digits) <= _MAX_DIGITS]
        return [self._sources[number - 1] for number in numbers if 0 < number <= len(self._sources)]
