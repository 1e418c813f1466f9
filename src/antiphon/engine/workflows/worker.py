"""A worker that is told by DBOS what to take, within limits that all processes share.

The store stays the one that knows what was asked, what was said, and whose a run is. DBOS hands runs out, no more:
whoever gets one claims it in the store like any worker.
"""

import asyncio
import hashlib
import logging
import math
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from antiphon.config import DbosSettings
from antiphon.engine.attempt import LEASES_FOR_OTHERS, Ways
from antiphon.engine.worker import LOOK_SECONDS, Worker, is_final, wait_for
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
# Its threads may be stuck in a database that does not answer.
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
        self._announced: asyncio.Queue[RunKey] = asyncio.Queue()
        self._news = asyncio.Event()
        # It waits for DBOS's database, which may be out of reach. Nobody else does.
        self._tending: asyncio.Task[None] | None = None
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
            await asyncio.to_thread(prepare, self._settings.database)
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
                await self._compare(instance.client)
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
            if any(map(self._is_ours, await self._store.list_runs(self._owner, as_of=time.time()))):
                return
            await wait_for(self._news, LOOK_SECONDS)

    async def _launch(self) -> "Instance":
        making = asyncio.create_task(asyncio.to_thread(self._make_dbos))
        try:
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
        ended = asyncio.Event()

        def end() -> None:
            instance.end()
            self._event_loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=end, daemon=True).start()
        try:
            await wait_for(ended, ENDING_SECONDS if self._closing else None)
        except asyncio.CancelledError:
            await wait_for(ended, ENDING_SECONDS)
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

    async def _compare(self, client: "Client") -> None:
        """Until there has been nothing to do for a while."""
        comparison = Comparison(self._store, client, self._owner, ours=self._is_ours, cancel=self.cancel)
        self._announced = asyncio.Queue()  # what the first look finds need not be told twice
        announcing: asyncio.Task[None] | None = None
        cleared, busy = -math.inf, time.monotonic()
        try:
            while time.monotonic() - busy < IDLE_SECONDS:
                began = time.monotonic()
                try:
                    if await comparison.look():
                        busy = began
                    if began - cleared >= CLEARING_SECONDS:
                        await comparison.clear()
                        cleared = began
                except Exception as error:
                    busy = began
                    self._note(error)
                else:
                    self._note(None)
                if announcing is None:  # those that were there before come first
                    announcing = asyncio.create_task(self._announce(client))
                await asyncio.sleep(max(LOOK_SECONDS, COMPARING_SHARE * (time.monotonic() - began)))
        finally:
            if announcing is not None:
                announcing.cancel()

    def _note(self, error: Exception | None) -> None:
        """Tell once that DBOS's database is out of reach, and once that it is not any more."""
        if error is not None and not self._out_of_reach:
            logger.warning("background responses wait: DBOS's database cannot be used: %s", _shorten(error))
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
                claimed = await self._store.claim_one(self._owner, key, as_of=time.time(), lease=self._lease)
                left = claimed is not None and await self._wait_for_attempt(claimed)
                if left or is_final(await self._store.load(*key)):
                    return
            except Exception:
                logger.exception("a background response cannot be reached", extra={"response_id": key.response_id})
            await wait_for(change, LOOK_SECONDS)

    async def _wait_for_attempt(self, claimed: ClaimedRun) -> bool:
        """Whether the run is left to others."""
        working = self._begin(claimed)
        await asyncio.wait([working])
        return not working.cancelled() and working.result()

    async def _take(self, began: float) -> None:
        """Leave the queue to DBOS, but for what is to end: that takes no turn."""
        await self._claim(began, 0)


def _shorten(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
