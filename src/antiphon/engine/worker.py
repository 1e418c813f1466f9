"""Working off the queue of background responses: claiming runs, holding on to them, and giving them back.

A run belongs to the process that claimed it for as long as that process renews its lease; when it dies, another one
claims the run and goes on.
"""

import asyncio
import logging
import math
import secrets
import time
from contextlib import suppress

from antiphon.engine.attempt import Attempt, LeftToOthers, Ways
from antiphon.protocol.response import FINAL_STATUSES
from antiphon.store.base import ClaimedRun, LeaseLost, RunKey, Store, StoredResponse

logger = logging.getLogger(__name__)

# How often the queue is looked at for what a dead process has left.
LOOK_SECONDS = 1.0
# More names of models than this that others have, and we have not, are not remembered at once.
MOST_NAMES = 100


class Worker:
    """Works on up to `slots` runs at a time, each held by a lease of so many seconds.

    `attempts` are those at work here; `changed` is set, and replaced, when that changes.
    """

    def __init__(self, store: Store, ways: Ways, *, slots: int, lease: float) -> None:
        self._store = store
        self._ways = ways
        self._slots = slots
        self._lease = lease
        self._owner = secrets.token_hex(16)
        self._tasks: dict[RunKey, asyncio.Task[bool]] = {}
        self._claiming: list[RunKey] = []
        self._patience: dict[str, float] = {}
        self._renewed = -math.inf
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._full = False
        self.attempts: dict[RunKey, Attempt] = {}
        self.changed = asyncio.Event()

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

    def announce(self, key: RunKey) -> None:
        """This run is new in the queue."""
        self._wake.set()

    def look(self) -> None:
        """See what there is to do, without waiting for the next time."""
        self._wake.set()

    def stop(self, key: RunKey) -> None:
        """The response is gone: whoever works on it here need not go on."""
        if key in self._tasks:
            self._tasks[key].cancel()

    def cancel(self, key: RunKey) -> bool:
        """End a run as cancelled if it is worked on here: False if it is not."""
        attempt = self.attempts.get(key)
        if attempt is not None:
            attempt.cancel()
        return attempt is not None

    def heed_cancellations(self) -> None:
        """Somebody has asked the store for one: the next look asks it about all that we hold."""
        self._renewed = -math.inf

    def tell_change(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def _work_off(self) -> None:
        while True:
            began = time.time()
            try:
                if time.monotonic() - self._renewed >= self._lease / 3:
                    self._renewed = time.monotonic()
                    await self._renew()
                await self._take(began)
            except Exception:
                logger.exception("the queue of background responses cannot be reached")
            await wait_for(self._wake, min(self._lease / 3, LOOK_SECONDS))
            self._wake.clear()

    async def _renew(self) -> None:
        held = await self._store.renew(self._owner, lease=self._lease)
        for key, attempt in self.attempts.items():
            if key not in held:
                self._tasks[key].cancel()  # another process took over, or the response was deleted
            elif held[key]:
                attempt.cancel()
        for key in held.keys() - self.attempts.keys() - set(self._claiming):
            # We gave it up, and could not say so. Held on to by our name, it would never be anyone's.
            await self._store.abandon(self._owner, *key)

    async def _take(self, began: float) -> None:
        """Claim what there is room for."""
        free = max(0, self._slots - len(self.attempts))
        self._full = await self._claim(began, free) >= free

    async def _claim(self, began: float, limit: int) -> int:
        claimed = await self._store.claim(
            self._owner, as_of=began, lease=self._lease, limit=limit, patience=self._patience
        )
        for run in claimed:
            self._begin(run)
        return len(claimed)

    def _begin(self, claimed: ClaimedRun) -> asyncio.Task[bool]:
        key = RunKey(claimed.project, claimed.response_id)
        attempt = Attempt(claimed, self._owner, self._store, self._ways, lease=self._lease)
        # We may have lost the run and got it back before our first attempt noticed: it writes under the same name.
        stale = self._tasks.get(key)
        if stale is not None:
            stale.cancel()
        self.attempts[key] = attempt
        task = self._tasks[key] = asyncio.create_task(self._work(claimed, attempt, stale))
        # Not in the task itself: if it is cancelled before its first step, it takes none.
        task.add_done_callback(lambda _: self._end(key, attempt))
        self.tell_change()
        return task

    async def _work(self, claimed: ClaimedRun, attempt: Attempt, stale: asyncio.Task[bool] | None) -> bool:
        """Whether the run is left to others."""
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
            return True
        except Exception:
            logger.exception("a background response could not be worked on", extra={"response_id": key.response_id})
            with suppress(Exception):  # then renewing does it
                await self._store.abandon(self._owner, *key)
        return False

    def _end(self, key: RunKey, attempt: Attempt) -> None:
        if self.attempts.get(key) is attempt:
            del self.attempts[key], self._tasks[key]
        attempt.journal.end()
        self.tell_change()
        if self._full:  # somebody may have waited for this place
            self._wake.set()


def is_final(stored: StoredResponse | None) -> bool:
    """Whether nothing is left to do for a response: it has ended, or is gone."""
    return stored is None or stored.response.status in FINAL_STATUSES


async def wait_for(event: asyncio.Event, seconds: float | None) -> None:
    """Until it happens, or for so long."""
    with suppress(TimeoutError):
        # Not asyncio.wait_for: before Python 3.12 it can lose a cancellation that comes together with the event.
        async with asyncio.timeout(seconds):
            await event.wait()
