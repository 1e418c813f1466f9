"""Background responses: they are queued, run without their client, and can be read again from any event.

The queue is part of the store, so accepting a response and queueing its run are one transaction. A `Scheduler` decides
when and where a queued run begins.
"""

import time
from collections.abc import Callable, Sequence

import msgspec

from antiphon.engine.background.event_writer import announce
from antiphon.engine.background.scheduler import Scheduler
from antiphon.engine.background.worker import is_final, wait_for
from antiphon.engine.respond.run import Events
from antiphon.errors import NotFound, Unavailable
from antiphon.protocol.events import TERMINAL, Event
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import RunKey, Store, StoredResponse
from antiphon.stream.sse import encode_json_line

# How often a response that another process works on is looked at.
POLL_SECONDS = 0.25

_TERMINAL_TYPES = {str(event.__struct_config__.tag) for event in TERMINAL}


class BackgroundRun:
    """A queued response, as its client sees it: it has a run's face, but closing its events only ends the reading."""

    def __init__(self, response: Response, warnings: Sequence[str], follow: Callable[[], Events]) -> None:
        self.response = response
        self.warnings = warnings
        self.events = follow

    async def drain(self) -> Response:
        """Whoever does not stream gets the queued response at once."""
        return self.response


class Background:
    """Queues background responses, reads their events and cancels them.

    `lease` is the time after which the run of a dead process is free.
    """

    def __init__(self, store: Store, scheduler: Scheduler, *, lease: float) -> None:
        self._store = store
        self._scheduler = scheduler
        self._lease = lease
        self._dismissed = False

    async def start(self) -> None:
        await self._scheduler.start()

    async def close(self) -> None:
        await self._scheduler.close()

    async def enqueue(self, project: str, stored: StoredResponse, request: bytes) -> None:
        """Save a response together with its run, for this or another process."""
        await self._store.enqueue(project, stored, request)
        self._scheduler.announce(RunKey(project, stored.response.id))

    def dismiss_readers(self) -> None:
        """Let every `follow` end: the server stops, and they can go on reading elsewhere or later."""
        self._dismissed = True
        self._scheduler.notify_change()
        for attempt in self._scheduler.attempts.values():
            attempt.journal.nudge()

    def stop(self, key: RunKey) -> None:
        """Stop the attempt at a run whose response was deleted."""
        self._scheduler.stop(key)

    async def cancel(self, key: RunKey) -> None:
        """Request the end of a run and wait until it has ended."""
        self._scheduler.cancel(key)  # before the request: the store may fail
        await self._store.request_cancel(*key)
        self._scheduler.cancel(key)  # it may have been claimed meanwhile
        await self._wait_for_end(key)

    async def follow(self, key: RunKey, after: int) -> Events:
        """The events beyond this number, and then those to come, until the response has ended.

        Raises when it cannot tell the end: the server stops, or the response was deleted. An end would be a lie.
        """
        # Once is enough: a run keeps this mark, whoever goes on with it.
        await self._store.watch(*key)
        while not self._dismissed:
            attempt = self._scheduler.attempts.get(key)
            # The order matters: what happens while we read must not be waited for. The log alone is read: an attempt
            # may have lost its lease without knowing it, and then its events are not those of the response.
            change = self._scheduler.changed if attempt is None else attempt.journal.news
            stored = None if attempt is not None else await self._store.load(*key)
            # A response that is final before its events are read has all of them in the log.
            final = attempt is None and is_final(stored)
            rows = await self._store.read_events(*key, after)
            if stored is not None and not rows and not final:
                rows = _number(announce(stored.response))[after + 1 :]
            if rows:
                after = rows[-1][0]
                batch = [Unknown(payload) for _, payload in rows if _is_readable(payload)]
                if batch:
                    yield batch
                if batch and batch[-1].type in _TERMINAL_TYPES:
                    return
            elif final and stored is None:
                raise NotFound(f"Response with id '{key.response_id}' not found.", param="response_id")
            elif final:
                return
            else:
                await wait_for(change, POLL_SECONDS if attempt is None else None)
        raise Unavailable("The server is shutting down. The stream can be read on later.")

    async def _wait_for_end(self, key: RunKey) -> None:
        # If its process has just died, it is ours to end when the lease has run out.
        deadline = time.monotonic() + self._lease + 4 * POLL_SECONDS
        while time.monotonic() < deadline:
            change = self._scheduler.changed
            self._scheduler.wake()
            if is_final(await self._store.load(*key)):
                return
            await wait_for(change, POLL_SECONDS)


def _is_readable(payload: bytes) -> bool:
    """Whether it can be sent. What a disk has damaged is passed over, so that the end can be read."""
    try:
        return bool(Unknown(payload).type)
    except msgspec.DecodeError:
        return False


def _number(told: Sequence[Event]) -> list[tuple[int, bytes]]:
    return [(event.sequence_number, encode_json_line(event)) for event in told]
