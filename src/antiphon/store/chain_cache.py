"""A cache of decoded links, so that the next turn of a chain decodes only the newest response.

A store gives every project a revision: a number that changes when a final response of the project is changed or
deleted, by any process. A link is valid for the revision at which it was read. Links of unfinished responses are not
cached, because these change without a new revision.
"""

from collections import OrderedDict
from typing import NamedTuple

from antiphon.store.base import Link
from antiphon.store.memory_size import measure_items

MAX_BYTES = 32 * 1024 * 1024

# Approximate size of a link and its entry in the cache, without its items.
_LINK_BYTES = 700


def measure_link(link: Link) -> int:
    """Return the memory of a link."""
    return measure_items(link.items) + _LINK_BYTES


class _Entry(NamedTuple):
    link: Link
    revision: int
    size: int


class ChainCache:
    """The links of final responses, up to `max_bytes` in memory. The least recently used are evicted first."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self.size = 0
        self.bytes_found = 0
        """The size of all links that `find` has returned."""

    def find(self, project: str, response_id: str, revision: int) -> Link | None:
        """Return the link if it was read at this revision of the project."""
        key = project, response_id
        entry = self._entries.get(key)
        if entry is None or entry.revision != revision:
            return None
        self._entries.move_to_end(key)
        self.bytes_found += entry.size
        return entry.link

    def add(self, project: str, link: Link, revision: int, size: int | None = None) -> None:
        """Add a link that was read at this revision, unless it is larger than the cache.

        `size` is the result of `measure_link`, if it is known.
        """
        if not link.final:
            return
        key = project, link.id
        replaced = self._entries.pop(key, None)
        if replaced is not None:
            self.size -= replaced.size
        if size is None:
            size = measure_link(link)
        if size > self._max_bytes:
            return
        self._entries[key] = _Entry(link, revision, size)
        self.size += size
        while self.size > self._max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.size -= evicted.size

    def clear(self) -> None:
        self._entries.clear()
        self.size = 0
