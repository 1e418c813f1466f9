"""A worker that is told by DBOS what to take, within limits that all processes share.

The store stays the one that knows what was asked, what was said, and whose a run is. DBOS hands runs out, no more:
whoever gets one claims it in the store like any worker.
"""

import asyncio
import logging
import time
from concurrent.futures import Future
from contextlib import suppress

from antiphon.config import DbosSettings
from antiphon.engine.attempt import LEASES_FOR_OTHERS, Ways
from antiphon.engine.worker import LOOK_SECONDS, Worker, is_final, wait_for
from antiphon.engine.workflows.tending import Tending
from antiphon.errors import ConfigError
from antiphon.store.base import ClaimedRun, ListedRun, RunKey, Store

logger = logging.getLogger(__name__)

_performing: "WorkflowWorker | None" = None


class WorkflowWorker(Worker):
    """There is one for each process, as there is one DBOS."""

    def __init__(self, store: Store, ways: Ways, settings: DbosSettings, *, slots: int, lease: float) -> None:
        super().__init__(store, ways, slots=slots, lease=lease)
        self._performances: set[asyncio.Task[None]] = set()
        # DBOS hands out as many as whoever has told it last can take.
        self._places = asyncio.Semaphore(slots)
        self._closing = False
        self._tending = Tending(
            store,
            settings,
            owner=self._owner,
            slots=slots,
            ours=self._is_ours,
            perform=self._submit,
            cancel=self.cancel,
        )

    async def start(self) -> None:
        global _performing  # noqa: PLW0603
        if _performing is not None:
            raise ConfigError("dbos: DBOS is one for each process, and another engine of this one has it.")
        _performing = self
        self._event_loop = asyncio.get_running_loop()
        try:
            await self._tending.start()
        except BaseException:
            _performing = None
            raise
        await super().start()

    async def close(self) -> None:
        global _performing  # noqa: PLW0603
        if _performing is not self:
            return
        self._closing = True
        await self._tending.close()  # first: for what is left, DBOS would hand out something else
        for performance in self._performances:
            performance.cancel()
        await asyncio.gather(*self._performances, return_exceptions=True)
        await super().close()
        _performing = None

    def announce(self, key: RunKey) -> None:
        self._tending.announce(key)

    def _is_ours(self, run: ListedRun) -> bool:
        """Whether we are to see that somebody works on this run: others have had their time to take it."""
        if run.ours or run.key in self.attempts:
            return True
        patience = LEASES_FOR_OTHERS[self._ways.classify(run.model)] * self._lease if run.model else 0.0
        patience = max(patience, self._patience.get(run.model, 0.0))
        return run.free and (not patience or time.time() - run.free_since >= patience)

    def _submit(self, key: RunKey) -> Future[None]:
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
                left = await self._attempt(key)
                if left or is_final(await self._store.load(*key)):
                    return
            except Exception:
                logger.exception("a background response cannot be reached", extra={"response_id": key.response_id})
            await wait_for(change, LOOK_SECONDS)

    async def _attempt(self, key: RunKey) -> bool:
        """Work on the run if it is free. Whether it is left to others."""
        await self._places.acquire()
        claimed = None
        try:
            claimed = await self._claim_one(key)
        finally:
            if claimed is None:
                self._places.release()
        if claimed is None:
            return False
        working = self._begin(claimed)
        # Not when this is cancelled: the attempt goes on, though DBOS ends.
        working.add_done_callback(lambda _: self._places.release())
        await asyncio.wait([working])
        return not working.cancelled() and working.result()

    async def _claim_one(self, key: RunKey) -> ClaimedRun | None:
        claiming = asyncio.ensure_future(self._store.claim_one(self._owner, key, as_of=time.time(), lease=self._lease))
        self._claiming.append(key)
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:  # DBOS ends: what is claimed all the same would be nobody's for a lease
            with suppress(Exception):
                claimed = await claiming
                if claimed is not None:
                    await self._store.put_back(self._owner, *key, free_since=claimed.free_since)
            raise
        finally:
            self._claiming.remove(key)

    async def _take(self, began: float) -> None:
        """Leave the queue to DBOS, but for what is to end: that takes no turn."""
        await self._claim(began, 0)
