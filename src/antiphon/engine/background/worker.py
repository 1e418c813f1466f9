"""The scheduler on the store's own queue: claims runs under leases and works on them.

A run belongs to the process that claimed it for as long as that process renews its lease. When the process dies,
another one claims the run: the store selects it (`store/claims.py`), and `attempt.py` continues it.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

from antiphon.bounds import remove_oldest
from antiphon.engine.background.attempt import Attempt, LeftToOthers, Overloaded, StoreFailed
from antiphon.engine.background.change_signal import ChangeSignal
from antiphon.engine.serve.pipeline import Pipeline
from antiphon.engine.usage import UsageRecorder
from antiphon.errors import StoreLost, StoreUnavailable
from antiphon.store.base import NO_LIMITS, ClaimedRun, LeaseLost, RunKey, Store
from antiphon.store.history_budget import HistoryBudget
from antiphon.store.limits import RunLimits
from antiphon.tasks import cancel_tasks
from antiphon.turn_queue import Throughput

logger = logging.getLogger(__name__)

# Interval between checks of the queue, for runs that other processes queued or left.
CHECK_SECONDS = 1.0
# Delay of a run for which there is no memory. The run has already waited for memory.
OVERLOAD_SECONDS = 5.0
# Delay of a run for which the store failed.
STORE_RETRY_SECONDS = 5.0
# Time from the first failure of the store for a run. After it, each further one counts as an interruption.
STORE_FAILURE_SECONDS = 600.0
# Maximum of the time after which a refused response may be tried again.
MAX_RETRY_SECONDS = 3600.0
# Maximum number of unserved model names to cache.
MAX_MODEL_NAMES = 100
# Maximum number of runs for which the store failed to cache.
MAX_STORE_FAILURES = 10_000


class Worker:
    """Works on up to `slots` runs at a time, each under a lease of `lease` seconds. Implements `Scheduler`.

    `limits` are shared with all other processes. The store counts them when it hands out runs.
    """

    def __init__(
        self,
        store: Store,
        pipeline: Pipeline,
        *,
        slots: int,
        lease: float,
        limits: RunLimits = NO_LIMITS,
        usage: UsageRecorder | None = None,
        histories: HistoryBudget | None = None,
    ) -> None:
        self._store = store
        self._pipeline = pipeline
        self._slots = slots
        self._lease = lease
        self._limits = limits
        self._usage = usage
        self._histories = histories
        self.owner = secrets.token_hex(16)
        self._dead_owners: set[str] = set()
        self._lost: list[tuple[RunKey, int]] = []  # with the number of the attempt
        self._tasks: dict[RunKey, asyncio.Task[None]] = {}
        self._waits: dict[str, float] = {}
        self._store_failures: dict[RunKey, float] = {}  # the time of the first one
        self._renewed = -math.inf
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._full = False
        self._has_announced = False  # since the last check of the queue
        self._accepts_runs = True
        self._failure = ""
        self._throughput = Throughput()
        self.attempts: dict[RunKey, Attempt] = {}
        self.changed = ChangeSignal()
        self.on_begin: Callable[[RunKey, Attempt], None] | None = None
        self.on_end: Callable[[RunKey], None] | None = None
        self.on_full: Callable[[], None] | None = None

    def reconfigure(self, pipeline: Pipeline, *, slots: int, limits: RunLimits) -> None:
        """Work on the next runs with another pipeline, and with other limits."""
        self._pipeline, self._slots, self._limits = pipeline, slots, limits
        self._waits.clear()
        self._wake.set()

    def stop_claiming(self) -> None:
        """Leave the queue to other processes. The attempts in progress continue."""
        self._accepts_runs = False

    async def start(self) -> None:
        self._loop = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Stop all attempts and release their runs: another process, or the next start, continues them."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        await cancel_tasks(loop, *self._tasks.values())
        with suppress(StoreUnavailable):  # the leases then expire
            await self._store.release(self.owner)

    def announce(self, key: RunKey) -> None:
        self._has_announced = True
        self._wake.set()

    def estimate_seconds(self, runs: int) -> float:
        return self._throughput.estimate_seconds(runs, running=len(self.attempts), longest=MAX_RETRY_SECONDS)

    def wake(self) -> None:
        self._wake.set()

    def check_runs(self) -> None:
        self._renewed = -math.inf  # renewing finds them
        self._wake.set()

    def take_over(self, owner: str) -> None:
        self._dead_owners.add(owner)
        self._wake.set()

    def stop(self, key: RunKey) -> None:
        if key in self._tasks:
            self._tasks[key].cancel()

    def cancel(self, key: RunKey) -> None:
        attempt = self.attempts.get(key)
        if attempt is not None:
            attempt.cancel()
        else:
            self._renewed = -math.inf  # renewing reads the cancellation requests

    async def _poll(self) -> None:
        while True:
            began = time.time()
            try:
                if time.monotonic() - self._renewed >= self._lease / 3:
                    self._renewed = time.monotonic()
                    await self._renew()
                if self._lost:
                    await self._withdraw_interruptions()
                if self._dead_owners:
                    await self._end_leases()
                if self._accepts_runs:
                    await self._claim(began)
            except StoreLost:
                self._stop_attempts()
            except StoreUnavailable:
                pass  # the store has logged the failure
            except Exception as error:
                self._log_failure(error)
            else:
                self._failure = ""
            await wait_for(self._wake, min(self._lease / 3, CHECK_SECONDS))
            self._wake.clear()

    def _log_failure(self, error: Exception) -> None:
        """Log a failure of the queue, but not again at every check."""
        failure = repr(error.__cause__ or error)
        if failure != self._failure:
            logger.error("cannot read the queue of background responses", exc_info=error)
        self._failure = failure

    def _stop_attempts(self) -> None:
        """Stop all attempts, because their events cannot be stored. If the store comes back, they are claimed again."""
        if self._tasks:
            logger.error("%d background responses are stopped: the store is lost", len(self._tasks))
        for task in self._tasks.values():
            task.cancel()

    async def _renew(self) -> None:
        held = await self._store.renew(self.owner, lease=self._lease)
        for key, attempt in self.attempts.items():
            if key not in held:
                self._tasks[key].cancel()
                self._lose(key, attempt)
            elif held[key]:
                attempt.cancel()
        for key in held.keys() - self.attempts.keys():
            # The attempt ended, but the release failed. While we renew its lease, no process can claim the run.
            await self._give_back(key)

    def _lose(self, key: RunKey, attempt: Attempt) -> None:
        """Note that another process took this run over, or that its response was deleted."""
        if not attempt.is_lost:
            attempt.is_lost = True
            self._lost.append((key, attempt.number))
            self._wake.set()

    async def _withdraw_interruptions(self) -> None:
        """Do not count the loss of runs whose leases expired while this process was suspended or cut off."""
        withdrawn = 0
        while self._lost:
            key, number = self._lost.pop()
            try:
                withdrawn += await self._store.withdraw_interruption(*key, attempt=number)
            except StoreUnavailable:
                self._lost.append((key, number))
                raise
        if withdrawn:
            logger.warning(
                "%d background responses were taken over by other processes: "
                "this one did not renew its leases for more than %g seconds",
                withdrawn,
                self._lease,
            )

    async def _end_leases(self) -> None:
        """End the leases of processes that have died. The next check, which follows at once, claims their runs."""
        while self._dead_owners:
            owner = next(iter(self._dead_owners))
            await self._store.end_leases(owner)
            self._dead_owners.remove(owner)
        self._wake.set()

    async def _claim(self, began: float) -> None:
        """Claim as many runs as there are free slots."""
        free = max(0, self._slots - len(self.attempts))
        has_announced, self._has_announced = self._has_announced, False
        claimed = await self._store.claim(
            self.owner,
            as_of=began,
            lease=self._lease,
            limit=free,
            wait_by_model=self._waits,
            limits=self._limits,
        )
        self._full = len(claimed) >= free
        for run in claimed:
            self._begin(run)
        if has_announced and self._full and self.on_full is not None:
            self.on_full()

    def _begin(self, claimed: ClaimedRun) -> None:
        key = RunKey(claimed.project, claimed.response_id)
        attempt = Attempt(
            claimed,
            self.owner,
            self._store,
            self._pipeline,
            lease=self._lease,
            usage=self._usage,
            histories=self._histories,
        )
        # We may have lost the run and claimed it again before our first attempt noticed: both write under one owner.
        stale = self._tasks.get(key)
        if stale is not None:
            stale.cancel()
        self.attempts[key] = attempt
        pipeline = self._pipeline
        pipeline.acquire()
        began_at = self._throughput.begin()
        task = self._tasks[key] = asyncio.create_task(self._work(claimed, attempt, stale))
        # Not in the task itself: a task that is cancelled before its first step runs no step.
        task.add_done_callback(lambda _: self._end(key, attempt, began_at, pipeline))
        self.changed.notify()
        if self.on_begin is not None:
            self.on_begin(key, attempt)

    async def _work(self, claimed: ClaimedRun, attempt: Attempt, stale: asyncio.Task[None] | None) -> None:
        key = RunKey(claimed.project, claimed.response_id)
        try:
            if stale is not None:
                await asyncio.wait([stale])
            await attempt.work()
        except LeaseLost:
            logger.warning("the run was taken over or deleted", extra={"response_id": key.response_id})
            self._lose(key, attempt)
        except LeftToOthers as left:
            logger.info(
                "the model %r is left to other processes", claimed.model, extra={"response_id": key.response_id}
            )
            self._waits[claimed.model] = left.seconds
            remove_oldest(self._waits, MAX_MODEL_NAMES)
            with suppress(Exception):  # the next renewal releases it
                await self._store.return_run(self.owner, *key, free_since=claimed.free_since)
        except Overloaded as error:
            logger.warning("a background response waits: %s", error, extra={"response_id": key.response_id})
            with suppress(Exception):  # the next renewal releases it
                await self._store.return_run(self.owner, *key, free_since=time.time() + OVERLOAD_SECONDS)
        except (StoreUnavailable, StoreFailed) as error:
            if key not in self._store_failures:
                logger.error(
                    "a background response waits for the store: %s", error, extra={"response_id": key.response_id}
                )
                self._store_failures[key] = time.monotonic()
                remove_oldest(self._store_failures, MAX_STORE_FAILURES)
            with suppress(Exception):  # the next renewal releases it
                await self._give_back(key)
        except Exception:
            logger.exception("an attempt at a background response failed", extra={"response_id": key.response_id})
            self._store_failures.pop(key, None)
            with suppress(Exception):  # the next renewal releases it
                await self._give_back(key)
        else:
            self._store_failures.pop(key, None)

    async def _give_back(self, key: RunKey) -> None:
        """Give up a run without ending it. That is an interruption, unless the store has failed for a short time."""
        failed_at = self._store_failures.get(key, -math.inf)
        if time.monotonic() - failed_at < STORE_FAILURE_SECONDS:
            await self._store.return_run(self.owner, *key, free_since=time.time() + STORE_RETRY_SECONDS)
        else:
            await self._store.stop_renewing(self.owner, *key)

    def _end(self, key: RunKey, attempt: Attempt, began_at: float, pipeline: Pipeline) -> None:
        pipeline.release()
        self._throughput.end(began_at)
        if self.attempts.get(key) is attempt:
            del self.attempts[key], self._tasks[key]
        attempt.events.end()
        self.changed.notify()
        if self.on_end is not None:
            self.on_end(key)
        # A queued run may have waited for this slot.
        if self._full or self._limits.counts_active or attempt.is_grouped:
            self._wake.set()


async def wait_for(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for the event, at most `seconds`."""
    with suppress(TimeoutError):
        # Not asyncio.wait_for: before Python 3.12 it can lose a cancellation that comes together with the event.
        async with asyncio.timeout(seconds):
            await event.wait()
