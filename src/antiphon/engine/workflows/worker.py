"""A worker that is told by DBOS what to take, within limits that all processes share.

The store stays the one that knows what was asked, what was said, and whose a run is. DBOS hands runs out, no more:
whoever gets one claims it in the store like any worker.
"""

import asyncio
import hashlib
import logging
import math
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from antiphon.config import DbosSettings
from antiphon.engine.attempt import LEASES_FOR_OTHERS, Ways
from antiphon.engine.worker import LOOK_SECONDS, Worker, is_final, wait_for
from antiphon.engine.workflows.apart import run_apart
from antiphon.engine.workflows.comparison import Comparison
from antiphon.engine.workflows.database import is_file, prepare
from antiphon.errors import ConfigError
from antiphon.store.base import ClaimedRun, ListedRun, RunKey, Store

if TYPE_CHECKING:
    from antiphon.engine.workflows.client import Client
    from antiphon.engine.workflows.instance import Instance

logger = logging.getLogger(__name__)

CLEARING_SECONDS = 3600
# DBOS looks for work many times in a second. So long after the last run it ends: to begin again does not take long.
IDLE_SECONDS = 10.0
# A database that does not answer for so long is worth a line in the log; DBOS begins anew then.
PATIENCE_SECONDS = 5.0
# What is stuck in one is left behind when the server ends.
ENDING_SECONDS = 2.0
# Of its time, a process spends no more than one part in so many on comparing.
COMPARING_SHARE = 4

_performing: "WorkflowWorker | None" = None


class WorkflowWorker(Worker):
    """Has DBOS at work while there are runs, and no longer."""

    def __init__(self, store: Store, ways: Ways, settings: DbosSettings, *, slots: int, lease: float) -> None:
        super().__init__(store, ways, slots=slots, lease=lease)
        self._settings = settings
        self._performances: set[asyncio.Task[None]] = set()
        # DBOS hands out as many as whoever has told it last can take.
        self._places = asyncio.Semaphore(slots)
        self._comparison = Comparison(store, self._owner, ours=self._is_ours, cancel=self.cancel)
        self._announced: asyncio.Queue[RunKey] = asyncio.Queue()
        self._news = asyncio.Event()
        # It waits for DBOS's database, which may be out of reach. Nobody else does.
        self._tending: asyncio.Task[None] | None = None
        self._cleared = -math.inf
        self._out_of_reach = False
        self._closing = False

    async def start(self) -> None:
        global _performing  # noqa: PLW0603
        if _performing is not None:
            raise ConfigError("dbos: DBOS is one for each process, and another engine of this one has it.")
        _performing = self
        self._event_loop = asyncio.get_running_loop()
        try:
            instance = await self._begin_dbos()
        except BaseException:
            _performing = None
            raise
        self._tending = asyncio.create_task(self._tend(instance))
        await super().start()

    async def close(self) -> None:
        global _performing  # noqa: PLW0603
        if self._tending is None:
            return
        self._closing = True
        for task in self._performances:
            task.cancel()
        await asyncio.gather(*self._performances, return_exceptions=True)
        await super().close()
        self._tending.cancel()
        await asyncio.gather(self._tending, return_exceptions=True)
        self._tending = _performing = None

    # When there is a DBOS

    async def _begin_dbos(self) -> "Instance | None":
        """See whether its database can be used. It takes DBOS itself to tell that of a server."""
        try:
            if not is_file(self._settings.database):
                return await self._launch()
            await run_apart(lambda: prepare(self._settings.database))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"dbos: its database cannot be used: {_shorten(error)}") from error
        return None

    async def _tend(self, instance: "Instance | None") -> None:
        while True:
            try:
                if instance is None:
                    await self._wait_for_runs()
                    instance = await self._launch()
                await self._hand_out(instance)
            except Exception as error:
                self._note(error)
                await asyncio.sleep(LOOK_SECONDS)
            finally:
                if instance is not None:
                    await self._end_dbos(instance)
            instance = None

    async def _wait_for_runs(self) -> None:
        while True:
            self._news.clear()
            with suppress(Exception):  # whoever renews the leases tells that the store fails
                if any(map(self._is_ours, await self._store.list_runs(self._owner, as_of=time.time()))):
                    return
            await wait_for(self._news, LOOK_SECONDS)

    async def _launch(self) -> "Instance":
        making = run_apart(self._make_dbos)
        try:
            await asyncio.wait([making], timeout=PATIENCE_SECONDS)
            if not making.done():
                self._note(TimeoutError("it does not answer"))
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait([making], timeout=ENDING_SECONDS)
            if making.done() and making.exception() is None:
                await self._end_dbos(making.result())
            raise

    def _make_dbos(self) -> "Instance":
        from antiphon.engine.workflows.instance import Instance

        # The name is as fleeting as a process: what a dead one has left is seen in the store, and resumed then.
        return Instance(
            self._settings,
            executor=self._owner,
            version=hashlib.sha256(self._store.home.encode()).hexdigest()[:16],
            slots=self._slots,
            perform=self.submit,
        )

    async def _end_dbos(self, instance: "Instance") -> None:
        ending = run_apart(instance.end)
        try:
            await asyncio.wait([ending], timeout=ENDING_SECONDS if self._closing else None)
        except asyncio.CancelledError:
            await asyncio.wait([ending], timeout=ENDING_SECONDS)
            raise

    def _is_ours(self, run: ListedRun) -> bool:
        """Whether we are to see that somebody works on this run: others have had their time to take it."""
        if run.ours or run.key in self.attempts:
            return True
        patience = LEASES_FOR_OTHERS[self._ways.classify(run.model)] * self._lease if run.model else 0.0
        patience = max(patience, self._patience.get(run.model, 0.0))
        return run.free and (not patience or time.time() - run.free_since >= patience)

    # What DBOS is told

    def announce(self, key: RunKey) -> None:
        self._announced.put_nowait(key)
        self._news.set()

    async def _announce(self, client: "Client") -> None:
        while True:
            key = await self._announced.get()
            try:
                await client.enqueue(key)
            except Exception as error:  # the store has it: it is found there
                self._note(error)
            else:
                self._note(None)

    async def _hand_out(self, instance: "Instance") -> None:
        """Until there has been nothing to do for a while, or its database is lost."""
        self._announced = asyncio.Queue()  # what the first look finds need not be told twice
        announcing: asyncio.Task[None] | None = None
        heard = busy = time.monotonic()
        try:
            while not instance.is_lost():
                began = time.monotonic()
                found = await self._look(instance.client)
                now = time.monotonic()
                heard = heard if found is None else now
                busy = busy if found is False else now
                if now - heard >= PATIENCE_SECONDS or (now - busy >= IDLE_SECONDS and announcing is None):
                    return
                if now - busy >= IDLE_SECONDS and announcing is not None:
                    announcing.cancel()
                    announcing = None
                    continue  # one more look, now that nothing comes in between
                if announcing is None:  # those that were there before come first
                    announcing = asyncio.create_task(self._announce(instance.client))
                await asyncio.sleep(max(LOOK_SECONDS, COMPARING_SHARE * (now - began)))
        finally:
            if announcing is not None:
                announcing.cancel()

    async def _look(self, client: "Client") -> bool | None:
        """Whether there are runs of ours. None if DBOS's database cannot be asked."""
        try:
            found = await self._comparison.look(client)
            if time.monotonic() - self._cleared >= CLEARING_SECONDS:
                await self._comparison.clear(client)
                self._cleared = time.monotonic()
        except Exception as error:
            self._note(error)
            return None
        self._note(None)
        return found

    def _note(self, error: Exception | None) -> None:
        """Tell once that DBOS's database is out of reach, and once that it is not any more."""
        if error is not None and not self._out_of_reach:
            reason = error if isinstance(error, ConfigError) else f"DBOS's database cannot be used: {_shorten(error)}"
            logger.warning("background responses wait: %s", reason)
        if error is None and self._out_of_reach:
            logger.warning("DBOS's database can be used again")
        self._out_of_reach = error is not None

    # What it hands out

    def submit(self, key: RunKey) -> Future[None]:
        """Have this run performed, from any thread."""
        return asyncio.run_coroutine_threadsafe(self.perform(key), self._event_loop)

    async def perform(self, key: RunKey) -> None:
        """Work on a run until it has ended or is left to others, or watch over it while another process does."""
        performance = asyncio.current_task()
        assert performance is not None
        if self._closing:
            raise asyncio.CancelledError
        self._performances.add(performance)
        performance.add_done_callback(self._performances.discard)
        while True:
            change = self.changed
            try:
                async with self._places:
                    left = await self._attempt(key)
                if left or is_final(await self._store.load(*key)):
                    return
            except Exception:
                logger.exception("a background response cannot be reached", extra={"response_id": key.response_id})
            await wait_for(change, LOOK_SECONDS)

    async def _attempt(self, key: RunKey) -> bool:
        """Work on the run if it is free. Whether it is left to others."""
        claimed = await self._claim_one(key)
        if claimed is None:
            return False
        working = self._begin(claimed)
        await asyncio.wait([working])
        return not working.cancelled() and working.result()

    async def _claim_one(self, key: RunKey) -> ClaimedRun | None:
        claiming = asyncio.ensure_future(self._store.claim_one(self._owner, key, as_of=time.time(), lease=self._lease))
        self._claiming.add(key)
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:  # DBOS ends: what is claimed all the same would be nobody's for a lease
            with suppress(Exception):
                claimed = await claiming
                if claimed is not None:
                    await self._store.put_back(self._owner, *key, free_since=claimed.free_since)
            raise
        finally:
            self._claiming.discard(key)

    async def _take(self, began: float) -> None:
        """Leave the queue to DBOS, but for what is to end: that takes no turn."""
        await self._claim(began, 0)


def _shorten(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
