"""Background responses: they are queued, run without their client, and can be read again from any event.

The queue is the store's, so accepting a response and queueing its run are one transaction. A run belongs to the process
that claimed it for as long as that process renews its lease; when it dies, another one claims the run and goes on.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from antiphon.engine.attempt import Attempt, MakeTurn, StartTurn
from antiphon.engine.run import Events
from antiphon.protocol.events import TERMINAL
from antiphon.protocol.open import Unknown
from antiphon.protocol.response import FINAL_STATUSES, Response
from antiphon.store.base import ClaimedRun, LeaseLost, RunKey, Store

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
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
    """Works off the queue, `slots` runs at a time."""

    def __init__(self, store: Store, *, slots: int, make_turn: MakeTurn, start_turn: StartTurn) -> None:
        self._store = store
        self._slots = slots
        self._make_turn = make_turn
        self._start_turn = start_turn
        self._owner = secrets.token_hex(16)
        self._attempts: dict[RunKey, Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
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
        working = (loop, *self._tasks)
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

    async def cancel(self, key: RunKey) -> None:
        """Ask for the end of a run, and wait for it if it is ours to end."""
        await self._store.request_cancel(*key)
        attempt = self._attempts.get(key)
        if attempt is not None:
            attempt.cancel()
        self._wake.set()
        await self._wait_for_end(key)

    async def follow(self, key: RunKey, after: int) -> Events:
        """The events beyond this number, and then those to come, until the response has ended."""
        while not self._dismissed:
            await self._store.watch(*key)
            attempt = self._attempts.get(key)
            # The order matters: a response that is final before its events are read has all of them in the log.
            final = attempt is None and await self._is_final(key)
            rows = attempt.journal.read(after) if attempt else await self._store.read_events(*key, after)
            if rows:
                after = rows[-1][0]
                batch = [Unknown(payload) for _, payload in rows]
                yield batch
                if batch[-1].type in _TERMINAL_TYPES:
                    return
            elif final:
                return
            elif attempt is not None:
                await attempt.journal.wait()
            else:
                await self._wait_for_change()

    async def _wait_for_end(self, key: RunKey) -> None:
        deadline = time.monotonic() + LEASE_SECONDS
        while not await self._is_final(key) and time.monotonic() < deadline:
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Until a run begins or ends here; those of other processes are looked at now and then."""
        with suppress(TimeoutError):
            # Not wait_for: before Python 3.12 it can lose a cancellation that comes together with the event.
            async with asyncio.timeout(POLL_SECONDS):
                await self._changed.wait()

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _is_final(self, key: RunKey) -> bool:
        stored = await self._store.load(*key)
        return stored is None or stored.response.status in FINAL_STATUSES

    # The work

    async def _work_off(self) -> None:
        renewed = 0.0
        while True:
            try:
                if time.monotonic() - renewed >= LEASE_SECONDS / 3:
                    renewed = time.monotonic()
                    await self._renew()
                await self._claim()
            except Exception:
                logger.exception("the queue of background responses cannot be reached")
            with suppress(TimeoutError):
                async with asyncio.timeout(LEASE_SECONDS / 3):
                    await self._wake.wait()
            self._wake.clear()

    async def _renew(self) -> None:
        for key in await self._store.renew(self._owner, now=time.time(), lease=LEASE_SECONDS):
            attempt = self._attempts.get(key)
            if attempt is not None:
                attempt.cancel()

    async def _claim(self) -> None:
        free = self._slots - len(self._attempts)
        if free <= 0:
            return
        claimed = await self._store.claim(self._owner, now=time.time(), lease=LEASE_SECONDS, limit=free)
        self._full = len(claimed) == free
        for run in claimed:
            task = asyncio.create_task(self._work(run))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, claimed: ClaimedRun) -> None:
        key = RunKey(claimed.project, claimed.response_id)
        attempt = self._attempts[key] = Attempt(
            claimed, self._owner, self._store, make_turn=self._make_turn, start_turn=self._start_turn
        )
        self._tell_change()
        try:
            await attempt.work()
        except LeaseLost:
            logger.warning("another process took over", extra={"response_id": claimed.response_id})
        except Exception:
            logger.exception("a background response could not be worked on", extra={"response_id": claimed.response_id})
            with suppress(Exception):  # it stays in the queue; when its lease has run out, somebody tries again
                await self._store.abandon(self._owner, *key)
        finally:
            del self._attempts[key]
            attempt.journal.end()
            self._tell_change()
            if self._full:  # somebody may have waited for this place
                self._wake.set()
