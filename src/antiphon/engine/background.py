"""Background responses: they are queued, run without their client, and can be read again from any event.

The queue is the store's, so accepting a response and queueing its run are one transaction. A run belongs to the process
that claimed it for as long as that process renews its lease; when it dies, another one claims the run and goes on.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from antiphon.engine.attempt import Attempt, Classify, LeftToOthers, MakeTurn, StartTurn
from antiphon.engine.journal import announce
from antiphon.engine.run import Events
from antiphon.errors import NotFound, Unavailable
from antiphon.protocol.events import TERMINAL, Event
from antiphon.protocol.open import Unknown
from antiphon.protocol.response import FINAL_STATUSES, Response
from antiphon.store.base import ClaimedRun, LeaseLost, RunKey, Store, StoredResponse
from antiphon.stream.sse import encode_line

logger = logging.getLogger(__name__)

# How often a response that another process works on is looked at.
POLL_SECONDS = 0.25
# How often the queue is looked at for what a dead process has left.
LOOK_SECONDS = 1.0
# More names of models than this that others have, and we have not, are not remembered at once.
MOST_NAMES = 100

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
    """Works off the queue, `slots` runs at a time, each held by a lease of so many seconds."""

    def __init__(
        self,
        store: Store,
        *,
        slots: int,
        lease: float,
        classify: Classify,
        make_turn: MakeTurn,
        start_turn: StartTurn,
    ) -> None:
        self._store = store
        self._slots = slots
        self._lease = lease
        self._classify = classify
        self._make_turn = make_turn
        self._start_turn = start_turn
        self._owner = secrets.token_hex(16)
        self._attempts: dict[RunKey, Attempt] = {}
        self._tasks: dict[RunKey, asyncio.Task[None]] = {}
        self._patience: dict[str, float] = {}
        self._renewed = -math.inf
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._full = False
        self._dismissed = False

    async def start(self) -> None:
        self._loop = asyncio.create_task(self._work_off())

    async def close(self) -> None:
        """Stop, and give the runs back: the next process, or the next start, goes on with them."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        working = (loop, *self._tasks.values())
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await self._store.release(self._owner)

    def wake(self) -> None:
        """There is something new in the queue."""
        self._wake.set()

    def dismiss_readers(self) -> None:
        """Let every `follow` end: the server stops, and they can go on reading elsewhere or later."""
        self._dismissed = True
        self._tell_change()
        for attempt in self._attempts.values():
            attempt.journal.nudge()

    def stop(self, key: RunKey) -> None:
        """The response is gone: whoever works on it here need not go on."""
        if key in self._tasks:
            self._tasks[key].cancel()

    async def cancel(self, key: RunKey) -> None:
        """Ask for the end of a run, and wait until whoever has it has seen to that."""
        self._cancel_here(key)  # first of all: the store may not be able to take it down
        await self._store.request_cancel(*key)
        if not self._cancel_here(key):
            self._renewed = -math.inf  # we may be claiming it at this moment: renewing tells
        await self._wait_for_end(key)

    def _cancel_here(self, key: RunKey) -> bool:
        attempt = self._attempts.get(key)
        if attempt is not None:
            attempt.cancel()
        return attempt is not None

    async def follow(self, key: RunKey, after: int) -> Events:
        """The events beyond this number, and then those to come, until the response has ended.

        Raises when it cannot tell the end: the server stops, or the response was deleted. An end would be a lie.
        """
        # Once is enough: a run keeps this mark, whoever goes on with it.
        await self._store.watch(*key)
        while not self._dismissed:
            attempt = self._attempts.get(key)
            # The order matters: what happens while we read must not be waited for. The log alone is read: an attempt
            # may have lost its lease without knowing it, and then its events are not those of the response.
            change = self._changed if attempt is None else attempt.journal.news
            stored = None if attempt is not None else await self._store.load(*key)
            # A response that is final before its events are read has all of them in the log.
            final = attempt is None and _is_final(stored)
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
                await _wait_for(change, POLL_SECONDS if attempt is None else None)
        raise Unavailable("The server is shutting down. The stream can be read on later.")

    async def _wait_for_end(self, key: RunKey) -> None:
        # If its process has just died, it is ours to end when the lease has run out.
        deadline = time.monotonic() + self._lease + 4 * POLL_SECONDS
        while time.monotonic() < deadline:
            change = self._changed
            self._wake.set()
            if _is_final(await self._store.load(*key)):
                return
            await _wait_for(change, POLL_SECONDS)

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # The work

    async def _work_off(self) -> None:
        while True:
            began = time.time()
            try:
                if time.monotonic() - self._renewed >= self._lease / 3:
                    self._renewed = time.monotonic()
                    await self._renew()
                await self._claim(began)
            except Exception:
                logger.exception("the queue of background responses cannot be reached")
            await _wait_for(self._wake, min(self._lease / 3, LOOK_SECONDS))
            self._wake.clear()

    async def _renew(self) -> None:
        held = await self._store.renew(self._owner, lease=self._lease)
        for key, attempt in self._attempts.items():
            if key not in held:
                self._tasks[key].cancel()  # another process took over, or the response was deleted
            elif held[key]:
                attempt.cancel()
        for key in held.keys() - self._attempts.keys():
            # We gave it up, and could not say so. Held on to by our name, it would never be anyone's.
            await self._store.abandon(self._owner, *key)

    async def _claim(self, began: float) -> None:
        free = max(0, self._slots - len(self._attempts))
        claimed = await self._store.claim(
            self._owner, as_of=began, lease=self._lease, limit=free, patience=self._patience
        )
        self._full = len(claimed) >= free
        for run in claimed:
            self._begin(run)

    def _begin(self, claimed: ClaimedRun) -> None:
        key = RunKey(claimed.project, claimed.response_id)
        attempt = Attempt(
            claimed,
            self._owner,
            self._store,
            lease=self._lease,
            classify=self._classify,
            make_turn=self._make_turn,
            start_turn=self._start_turn,
        )
        # We may have lost the run and got it back before our first attempt noticed: it writes under the same name.
        stale = self._tasks.get(key)
        if stale is not None:
            stale.cancel()
        self._attempts[key] = attempt
        task = self._tasks[key] = asyncio.create_task(self._work(claimed, attempt, stale))
        # Not in the task itself: if it is cancelled before its first step, it takes none.
        task.add_done_callback(lambda _: self._end(key, attempt))
        self._tell_change()

    async def _work(self, claimed: ClaimedRun, attempt: Attempt, stale: asyncio.Task[None] | None) -> None:
        key = RunKey(claimed.project, claimed.response_id)
        try:
            if stale is not None:
                await asyncio.wait([stale])
            await attempt.work()
        except LeaseLost:
            logger.warning("the run was taken over or deleted", extra={"response_id": key.response_id})
        except LeftToOthers as left:
            logger.info(
                "the model %r is left to other processes", claimed.model, extra={"response_id": key.response_id}
            )
            if len(self._patience) >= MOST_NAMES:
                del self._patience[next(iter(self._patience))]
            self._patience[claimed.model] = left.patience
            with suppress(Exception):  # then renewing does it
                await self._store.put_back(self._owner, *key, free_since=claimed.free_since)
        except Exception:
            logger.exception("a background response could not be worked on", extra={"response_id": key.response_id})
            with suppress(Exception):  # then renewing does it
                await self._store.abandon(self._owner, *key)

    def _end(self, key: RunKey, attempt: Attempt) -> None:
        if self._attempts.get(key) is attempt:
            del self._attempts[key], self._tasks[key]
        attempt.journal.end()
        self._tell_change()
        if self._full:  # somebody may have waited for this place
            self._wake.set()


def _is_final(stored: StoredResponse | None) -> bool:
    return stored is None or stored.response.status in FINAL_STATUSES


def _is_readable(payload: bytes) -> bool:
    """Whether it can be sent. What a disk has damaged is passed over, so that the end can be read."""
    try:
        return bool(Unknown(payload).type)
    except msgspec.DecodeError:
        return False


def _number(told: Sequence[Event]) -> list[tuple[int, bytes]]:
    return [(event.sequence_number, encode_line(event)) for event in told]


async def _wait_for(event: asyncio.Event, seconds: float | None) -> None:
    """Until it happens, or for so long."""
    with suppress(TimeoutError):
        # Not wait_for: before Python 3.12 it can lose a cancellation that comes together with the event.
        async with asyncio.timeout(seconds):
            await event.wait()
