"""Reading the event log of a background response in pages, which the followers of the response share."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from weakref import WeakValueDictionary

import msgspec

from antiphon.protocol.events import TERMINAL
from antiphon.protocol.unions import Unknown
from antiphon.store.base import EventLog, RunKey
from antiphon.stream.sse import encode_batch

# Default size of a page. A page is larger only if it has a single event.
PAGE_BYTES = 256 * 1024

_TERMINAL_TYPES = {str(event.__struct_config__.tag) for event in TERMINAL}


class EventPage(list[Unknown]):
    """Consecutive events of a log. `last_number` is the number of the last one. `is_last` is true if it is terminal.

    A page without events has only events that were damaged on disk.
    """

    def __init__(self, events: Iterable[Unknown], last_number: int) -> None:
        super().__init__(events)
        self.last_number = last_number
        self.is_last = bool(self) and self[-1].type in _TERMINAL_TYPES
        self._encoded: bytes | None = None

    def encode(self) -> bytes:
        """Encode the events for one write. The result is shared like the page."""
        if self._encoded is None:
            self._encoded = encode_batch(self)
        return self._encoded


EventPages = AsyncGenerator[EventPage, None]


def make_page(rows: Sequence[tuple[int, bytes]]) -> EventPage | None:
    """Return a page of the given numbers and payloads, or None if there are none.

    A payload damaged on disk is skipped, so that the end can be read.
    """
    events = [Unknown(payload) for _, payload in rows if _is_readable(payload)]
    return EventPage(events, rows[-1][0]) if rows else None


class EventReader:
    """Reads pages of up to `page_bytes`. All followers at the same number of a log get the same page.

    A page is in memory only while a follower holds it. Stored events never change once a follower has marked the run as
    watched, so a page stays valid.
    """

    def __init__(self, store: EventLog, *, page_bytes: int = PAGE_BYTES) -> None:
        self._store = store
        self._page_bytes = page_bytes
        self._pages: WeakValueDictionary[tuple[RunKey, int], EventPage] = WeakValueDictionary()
        self._reads: dict[tuple[RunKey, int], asyncio.Task[EventPage | None]] = {}

    async def read(self, key: RunKey, after: int) -> EventPage | None:
        """Return the events after this number, or None if no more were stored when this was called."""
        position = key, after
        page = self._pages.get(position)
        if page is not None:
            return page
        earlier = self._reads.get(position)
        if earlier is not None:
            page = await asyncio.shield(earlier)
            if page is not None:
                return page
        # The earlier read may have missed the newest events. Any read that has begun since then is recent enough.
        return await asyncio.shield(self._reads.get(position) or self._begin_read(position))

    def _begin_read(self, position: tuple[RunKey, int]) -> "asyncio.Task[EventPage | None]":
        task = self._reads[position] = asyncio.create_task(self._read(*position))
        task.add_done_callback(lambda _: self._reads.pop(position, None))
        task.add_done_callback(_retrieve_error)
        return task

    async def _read(self, key: RunKey, after: int) -> EventPage | None:
        page = make_page(await self._store.read_events(*key, after, max_bytes=self._page_bytes))
        if page is not None:
            self._pages[key, after] = page
        return page


def _is_readable(payload: bytes) -> bool:
    try:
        return bool(Unknown(payload).type)
    except (msgspec.DecodeError, ValueError):  # no JSON, or text that is not UTF-8
        return False


def _retrieve_error(read: "asyncio.Task[EventPage | None]") -> None:
    """Mark the error as retrieved. All followers may have disconnected before the read ended."""
    if not read.cancelled():
        read.exception()
