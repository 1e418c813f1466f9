"""Background responses as workflows of DBOS: it decides when each begins, within limits that all processes share.

The store stays the one that knows what was asked, what was said, and whose a run is. DBOS hands runs out, no more:
whoever gets one claims it in the store like any worker, and a run that DBOS has lost is given to it again. This module
is loaded only where it is wanted: importing DBOS takes longer than everything else.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from antiphon.config import DbosSettings
from antiphon.engine.attempt import Attempt, Ways
from antiphon.engine.worker import LOOK_SECONDS, Worker, is_final, wait_for
from antiphon.errors import ConfigError
from antiphon.store.base import ClaimedRun, RunKey, Store

# It would log in a format of its own, and nothing to our handlers, if it found its logger without any.
logging.getLogger("dbos").addHandler(logging.NullHandler())

from dbos import DBOS, DBOSConfig, SetEnqueueOptions, SetWorkflowID  # noqa: E402

logger = logging.getLogger(__name__)

NAME = "antiphon"
QUEUE = "antiphon.responses"
# Any of our versions goes on with the runs of another: a workflow has nothing of them but an id.
VERSION = "1"
# So many runs are looked at in one go. Those behind them have their turn when these are gone.
MOST_LEFT = 100
# For so long DBOS's own tools can show a run that has ended.
SHOWN_SECONDS = 24 * 3600
CLEARING_SECONDS = 3600

_ENDED = ["SUCCESS", "ERROR", "CANCELLED"]
_performing: "WorkflowWorker | None" = None


@DBOS.workflow(name="antiphon.respond", max_recovery_attempts=None)  # an attempt counts interruptions itself
async def respond(project: str, response_id: str) -> None:
    assert _performing is not None
    await _performing.perform(RunKey(project, response_id))


class WorkflowWorker(Worker):
    """A worker that is told by DBOS what to take."""

    def __init__(self, store: Store, ways: Ways, settings: DbosSettings, *, slots: int, lease: float) -> None:
        super().__init__(store, ways, slots=slots, lease=lease)
        self._settings = settings
        self._performances: set[asyncio.Task[None]] = set()
        # Both wait for DBOS, which tries for ever if its database is out of reach. Nobody else waits for that.
        self._announcer: asyncio.Task[None] | None = None
        self._comparison: asyncio.Task[None] | None = None
        self._announced: asyncio.Queue[RunKey] = asyncio.Queue()
        self._cleared = time.monotonic()

    async def start(self) -> None:
        global _performing  # noqa: PLW0603, workflows are functions of a module
        if _performing is not None:
            raise ConfigError("dbos: DBOS is one for each process, and another engine of this one has it.")
        DBOS(config=self._configure())
        if DBOS.executor_id != self._owner:
            raise ConfigError("dbos: this process already uses DBOS for something else.")
        _performing = self
        try:
            _prepare_file(self._settings.database)
            # Here and not in a thread: the loop that this is called in is the one that workflows run in.
            DBOS.launch()
            logging.getLogger("dbos").setLevel(logging.WARNING)
            await DBOS.register_queue_async(QUEUE, **self._limit(), on_conflict="always_update")
        except Exception as error:
            await self._end_dbos()
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            raise ConfigError(f"dbos: its database cannot be used: {reason}") from error
        self._announcer = asyncio.create_task(self._announce())
        await super().start()

    async def close(self) -> None:
        if _performing is not self:
            return
        waiting = [*self._performances, *filter(None, (self._announcer, self._comparison))]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await super().close()
        await self._end_dbos()

    async def _end_dbos(self) -> None:
        global _performing  # noqa: PLW0603
        _performing = None
        with ThreadPoolExecutor(1) as waiter:
            await asyncio.get_running_loop().run_in_executor(waiter, DBOS.destroy)
        # DBOS had put its own in this place, which is closed now.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())

    def announce(self, key: RunKey) -> None:
        self._announced.put_nowait(key)

    async def _announce(self) -> None:
        while True:
            key = await self._announced.get()
            try:
                await self._enqueue(key)
            except Exception:  # the store has it: it is found there
                logger.exception("a background response waits to be queued", extra={"response_id": key.response_id})

    async def perform(self, key: RunKey) -> None:
        """Work on a run until it has ended, or watch over it while another process does."""
        task = asyncio.current_task()
        assert task is not None
        self._performances.add(task)
        task.add_done_callback(self._performances.discard)
        while True:
            change = self.changed
            try:
                claimed = await self._store.claim_one(self._owner, key, as_of=time.time(), lease=self._lease)
                if claimed is not None:
                    await asyncio.wait([self._begin(claimed)])
                if is_final(await self._store.load(*key)):
                    return
            except Exception:
                logger.exception("a background response cannot be reached", extra={"response_id": key.response_id})
            await wait_for(change, LOOK_SECONDS)

    def _make_attempt(self, claimed: ClaimedRun) -> Attempt:
        # There is nobody it could be left to: whoever DBOS gives it to has it.
        return Attempt(claimed, self._owner, self._store, self._ways, lease=0)

    async def _take(self, began: float) -> None:
        """Leave the queue to DBOS, but for what is to end, and see to what it has lost."""
        await self._claim(began, 0)
        if self._comparison is None:
            self._comparison = asyncio.create_task(self._compare(began, idle_since=began))
        elif self._comparison.done():
            self._comparison = asyncio.create_task(self._compare(began, idle_since=began - self._lease))

    async def _compare(self, began: float, *, idle_since: float) -> None:
        try:
            left = await self._store.list_left(self._owner, as_of=began, idle_since=idle_since, limit=MOST_LEFT)
            if left or self.attempts:
                await self._mend(left)
            if time.monotonic() - self._cleared > CLEARING_SECONDS:
                self._cleared = time.monotonic()
                await self._clear()
        except Exception:
            logger.exception("what DBOS knows of background responses cannot be compared")

    async def _mend(self, left: Sequence[RunKey]) -> None:
        """Where DBOS says one thing of a run, and the store another."""
        keys = {key.response_id: key for key in (*left, *self.attempts)}
        found = await DBOS.list_workflows_async(workflow_ids=list(keys), load_input=False, load_output=False)
        statuses = {workflow.workflow_id: workflow.status for workflow in found}
        for response_id, key in keys.items():
            if statuses.get(response_id) == "CANCELLED":  # with a tool of DBOS
                await self._store.request_cancel(*key)
                self.cancel(key)
        # Their process ended between two steps: it had not told DBOS yet, had not claimed the run, or could not end it.
        ended = [key.response_id for key in left if statuses.get(key.response_id) in ("SUCCESS", "ERROR")]
        if ended:
            await DBOS.delete_workflows_async(ended)
        for key in left:
            if key.response_id in ended or key.response_id not in statuses:
                await self._enqueue(key)
        begun = [key.response_id for key in left if statuses.get(key.response_id) == "PENDING"]
        if begun:
            await DBOS.resume_workflows_async(begun, queue_name=QUEUE)

    async def _enqueue(self, key: RunKey) -> None:
        with SetWorkflowID(key.response_id), SetEnqueueOptions(queue_partition_key=key.project):
            await DBOS.enqueue_workflow_async(QUEUE, respond, *key)

    async def _clear(self) -> None:
        before = datetime.fromtimestamp(time.time() - SHOWN_SECONDS, UTC).isoformat()
        old = await DBOS.list_workflows_async(
            queue_name=QUEUE, status=_ENDED, end_time=before, limit=10_000, load_input=False, load_output=False
        )
        if old:
            await DBOS.delete_workflows_async([workflow.workflow_id for workflow in old])

    def _configure(self) -> DBOSConfig:
        return DBOSConfig(
            name=NAME,
            system_database_url=self._settings.database,
            application_version=VERSION,
            # As fleeting as the owner's name: what a dead process has left is seen in the store, and resumed then.
            executor_id=self._owner,
            log_level="CRITICAL",  # until it is there: we tell what keeps it from that
            # We have no use for what it listens to; but closing waits until it looks up.
            notification_listener_polling_interval_sec=self._settings.polling_seconds,
        )

    def _limit(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "worker_concurrency": min(self._slots, settings.concurrency or self._slots),
            "global_concurrency": settings.concurrency,
            "partition_concurrency": settings.concurrency_per_project,
            "limiter": {"limit": settings.starts_per_minute, "period": 60.0} if settings.starts_per_minute else None,
            "polling_interval_sec": settings.polling_seconds,
        }


def _prepare_file(url: str) -> None:
    if not url.startswith("sqlite:///"):
        return
    path = Path(url.removeprefix("sqlite:///"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")  # it stays with the file
