"""The finished output items of background responses in progress, for clients that poll.

An item is finished when the event log has its `response.output_item.done`. The store searches the log for these events,
so that no delta is read or decoded. A part of the log that was searched before is not searched again.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from antiphon import offload
from antiphon.engine.background.event_writer import list_finished_items
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.base import EventLog, RunKey

# Maximum size of the events that are kept for the next polls, of all responses together.
CACHE_BYTES = 16 * 1024 * 1024
# Number of searches at a time. Each of them may read large items.
MAX_SEARCHES = 4

# The beginning of each event that is searched for. The encoder writes the type first.
_DONE = b'{"type":"response.output_item.done"'
# Memory of a search without events, and of an event in addition to its bytes.
_SEARCH_BYTES = 600
_EVENT_BYTES = 100


class _Search(NamedTuple):
    """The events that a search has found, and the end of the log then: the last number, and a hash of its batch."""

    events: list[bytes]
    end: tuple[int, int]
    size: int


class FinishedItems:
    """Reads the finished items of responses. At most `max_bytes` of earlier searches are kept."""

    def __init__(self, store: EventLog, *, max_bytes: int = CACHE_BYTES) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._searches: dict[RunKey, _Search] = {}
        self._size = 0
        self._slots = asyncio.Semaphore(MAX_SEARCHES)

    async def load(self, key: RunKey) -> list[Item | Unknown]:
        """Return the finished items of a response, in the order of the output."""
        async with self._slots:
            payloads = await self._search(key)
            return await offload.run_sized(sum(map(len, payloads)), _decode_items, payloads)

    async def _search(self, key: RunKey) -> Sequence[bytes]:
        earlier = self._searches.get(key)
        batches = await self._store.search_events(*key, _DONE, start=-1 if earlier is None else earlier.end[0])
        if earlier is not None and (not batches or _identify(batches[0]) != earlier.end):
            earlier = None  # a new attempt has begun the log again
            batches = await self._store.search_events(*key, _DONE, start=-1)
        self._remove(key)
        if not batches:
            return ()
        found = [] if earlier is None else earlier.events
        new = batches if earlier is None else batches[1:]
        found = [*found, *(line for _, lines in new for line in lines.split(b"\n") if line.startswith(_DONE))]
        size = _SEARCH_BYTES + sum(map(len, found)) + _EVENT_BYTES * len(found)
        self._searches[key] = _Search(found, _identify(batches[-1]), size)
        self._size += size
        while self._size > self._max_bytes:
            self._remove(next(iter(self._searches)))
        return found

    def _remove(self, key: RunKey) -> None:
        removed = self._searches.pop(key, None)
        if removed is not None:
            self._size -= removed.size


def _identify(batch: tuple[int, bytes]) -> tuple[int, int]:
    last, lines = batch
    return last, hash(lines)


def _decode_items(payloads: Iterable[bytes]) -> list[Item | Unknown]:
    events: list[Event | Unknown] = []
    for payload in payloads:
        with suppress(ValueError):  # damaged on disk
            events.append(codec.decode_event(payload))
    return list_finished_items(events)
