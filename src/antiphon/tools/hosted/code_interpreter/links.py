"""Links of an answer to files of a container, as annotations."""

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote

_SCHEME = "sandbox:"
# Characters that may follow a link target.
_ENDS = frozenset(" \t\r\n)]>}\"'`,;*")


class LinkedFile(NamedTuple):
    """A file of a container. `path` is absolute, as the code sees it."""

    file_id: str
    path: str


class FileLink(NamedTuple):
    """The target of a link, at these positions of the text. `end` is exclusive."""

    file: LinkedFile
    start: int
    end: int


class LinkFinder:
    """Finds the links in a text that arrives in pieces.

    A target is recognized when the text after it has arrived, because `data.csv` may continue as `data.csv.gz`.
    """

    def __init__(self, files: Iterable[LinkedFile]) -> None:
        self._text = ""
        self._offset = 0  # position of `_text` in the whole text
        targets: dict[str, LinkedFile] = {}
        for file in files:
            targets[_SCHEME + file.path] = targets[_SCHEME + quote(file.path)] = file
        # The longest target first: one path can be the beginning of another.
        self._targets = sorted(targets.items(), key=lambda entry: -len(entry[0]))

    def feed(self, piece: str, *, is_last: bool = False) -> list[FileLink]:
        """Return the links that end before the end of this piece, or at it if it is the last one."""
        self._text += piece
        links: list[FileLink] = []
        position = 0
        while (start := self._text.find(_SCHEME, position)) >= 0:
            link = self._match(start, is_last=is_last)
            if link is not None:
                links.append(link)
                position = link.end - self._offset
            elif not is_last and self._may_continue(start):
                self._drop(start)
                return links
            else:
                position = start + len(_SCHEME)
        # A scheme can be split between two pieces.
        self._drop(max(position, len(self._text) - len(_SCHEME) + 1))
        return links

    def _match(self, start: int, *, is_last: bool) -> FileLink | None:
        for target, file in self._targets:
            if self._text.startswith(target, start):
                end = start + len(target)
                if end == len(self._text):
                    return FileLink(file, start + self._offset, end + self._offset) if is_last else None
                if self._ends_at(end, is_last=is_last):
                    return FileLink(file, start + self._offset, end + self._offset)
        return None

    def _ends_at(self, end: int, *, is_last: bool) -> bool:
        """Return True if a target ends here. A full stop ends one only before a space or at the end."""
        if self._text[end] == ".":
            return is_last if end + 1 == len(self._text) else self._text[end + 1] in _ENDS
        return self._text[end] in _ENDS

    def _may_continue(self, start: int) -> bool:
        """Return True if the text after `start` may become a link with the next piece."""
        rest = self._text[start:]
        return any(target.startswith(rest) or rest in (target, f"{target}.") for target, _ in self._targets)

    def _drop(self, count: int) -> None:
        self._text = self._text[count:]
        self._offset += count
