"""A cache of decoded links, so that the next turn of a chain decodes only the newest response.

A store gives every project a revision: a number that changes when a final response of the project is changed or
deleted, by any process. A link is valid for the revision at which it was read. Links of unfinished responses are not
cached, because these change without a new revision.
"""

from collections import OrderedDict
from typing import NamedTuple

from antiphon.store.base import Link

MAX_BYTES = 32 * 1024 * 1024

# Approximate size of an item in memory without its text, and of a link without its items.
_ITEM_BYTES = 500
_LINK_BYTES = 500


class _Entry(NamedTuple):
    link: Link
    revision: int
    size: int


class ChainCache:
    """The links of final responses. The least recently used are evicted first."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self.size = 0

    def find(self, project: str, response_id: str, revision: int) -> Link | None:
        """Return the link if it was read at this revision of the project."""
        key = project, response_id
        entry = self._entries.get(key)
        if entry is None or entry.revision != revision:
            return None
        self._entries.move_to_end(key)
        return entry.link

    def add(self, project: str, link: Link, revision: int, *, text_size: int) -> None:
        """Add a link that was read at this revision. `text_size` is the length of its JSON."""
        if not link.final:
            return
        key = project, link.id
        replaced = self._entries.pop(key, None)
        size = text_size + _ITEM_BYTES * len(link.items) + _LINK_BYTES
        self._entries[key] = _Entry(link, revision, size)
        self.size += size - (0 if replaced is None else replaced.size)
        while self.size > self._max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.size -= evicted.size

    def clear(self) -> None:
        self._entries.clear()
        self.size = 0
