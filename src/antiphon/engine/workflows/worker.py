"""A worker that is told by DBOS what to take, within limits that all processes share.

The store stays the one that knows what was asked, what was said, and whose a run is. DBOS hands runs out, no more:
whoever gets one claims it in the store like any worker.
"""

import asyncio
import logging
import math
import threading
import time
from concurrent.futures import Future
from contextlib import suppress

from dbos import DBOS, DBOSConfig

from antiphon.config import DbosSettings
from antiphon.engine.attempt import Attempt, Ways
from antiphon.engine.worker import LOOK_SECONDS, Worker, is_final, wait_for
from antiphon.engine.workflows.client import NAME, VERSION, WORKFLOW, Client
from antiphon.engine.workflows.comparison import Comparison
from antiphon.engine.workflows.database import connect
from antiphon.engine.workflows.quiet import quieten
from antiphon.errors import ConfigError
from antiphon.store.base import ClaimedRun, RunKey, Store

logger = logging.getLogger(__name__)

CLEARING_SECONDS = 3600
# Its threads may be stuck in a database that does not answer.
ENDING_SECONDS = 2.0
# Of its time, a process spends no more than one part in so many on comparing.
COMPARING_SHARE = 4

_performing: "WorkflowWorker | None" = None


@DBOS.workflow(name=WORKFLOW, max_recovery_attempts=None)  # an attempt counts interruptions itself
async def respond(project: str, response_id: str) -> None:
    assert _performing is not None
    # DBOS has a loop of its own: what it does there keeps nobody waiting here.
    await asyncio.wrap_future(_performing.submit(RunKey(project, response_id)))


class WorkflowWorker(Worker):
    def __init__(self, store: Store, ways: Ways, settings: DbosSettings, *, slots: int, lease: float) -> None:
        super().__init__(store, ways, slots=slots, lease=lease)
        self._settings = settings
        self._performances: set[asyncio.Task[None]] = set()
        self._announced: asyncio.Queue[RunKey] = asyncio.Queue()
        # Both wait for DBOS's database, which may be out of reach. Nobody else does.
        self._announcer: asyncio.Task[None] | None = None
        self._comparing: asyncio.Task[None] | None = None
        self._compared = asyncio.Event()
        self._out_of_reach = False
        self._closing = False

    async def start(self) -> None:
        global _performing  # noqa: PLW0603, workflows are functions of a module
        if _performing is not None:
            raise ConfigError("dbos: DBOS is one for each process, and another engine of this one has it.")
        _performing = self
        self._event_loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._launch)
        except ConfigError:
            _performing = None
            raise
        except Exception as error:
            await self._end_dbos()
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            raise ConfigError(f"dbos: its database cannot be used: {reason}") from error
        self._announcer = asyncio.create_task(self._announce())
        self._comparing = asyncio.create_task(self._compare())
        await super().start()

    def _launch(self) -> None:
        """In a thread without a loop: this takes a while, and DBOS shall not take ours for its workflows."""
        url = self._settings.database
        self._engine = connect(url)
        quieten()
        DBOS(config=self._configure())
        if DBOS.executor_id != self._owner:
            raise ConfigError("dbos: this process already uses DBOS for something else.")
        self._client = Client(url, self._engine)
        with suppress(Exception):  # so that new limits hold from the first on; a new database has no tables yet
            self._client.register_queue(self._settings, slots=self._slots)
        DBOS.launch()
        logging.getLogger("dbos").setLevel(logging.WARNING)
        self._client.register_queue(self._settings, slots=self._slots)

    def _configure(self) -> DBOSConfig:
        return DBOSConfig(
            name=NAME,
            system_database_url=self._settings.database,
            system_database_engine=self._engine,
            application_version=VERSION,
            # As fleeting as the owner's name: what a dead process has left is seen in the store, and resumed then.
            executor_id=self._owner,
            log_level="CRITICAL",  # until it is there: we tell what keeps it from that
            # We have no use for what it listens to; but closing waits until it looks up.
            notification_listener_polling_interval_sec=self._settings.polling_seconds,
        )

    async def close(self) -> None:
        if _performing is not self:
            return
        self._closing = True
        waiting = [*self._performances, *filter(None, (self._announcer, self._comparing))]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await super().close()
        await self._end_dbos()
        self._client.close()
        if self._engine is not None:
            self._engine.dispose()

    async def _end_dbos(self) -> None:
        global _performing  # noqa: PLW0603
        ended = asyncio.Event()

        def end() -> None:
            DBOS.destroy()
            self._event_loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=end, daemon=True).start()
        await wait_for(ended, ENDING_SECONDS)
        _performing = None

    # What DBOS is told

    def announce(self, key: RunKey) -> None:
        self._announced.put_nowait(key)

    async def _announce(self) -> None:
        await self._compared.wait()  # those that were there before come first
        while True:
            key = await self._announced.get()
            try:
                await self._client.enqueue(key)
            except Exception as error:  # the store has it: it is found there
                self._note(error)
            else:
                self._note(None)

    async def _compare(self) -> None:
        comparison = Comparison(self._store, self._client, self._owner, cancel=self.cancel)
        cleared = -math.inf
        while True:
            began = time.monotonic()
            try:
                await comparison.look()
                if began - cleared >= CLEARING_SECONDS:
                    await comparison.clear()
                    cleared = began
            except Exception as error:
                self._note(error)
            else:
                self._note(None)
            self._compared.set()
            await asyncio.sleep(max(LOOK_SECONDS, COMPARING_SHARE * (time.monotonic() - began)))

    def _note(self, error: Exception | None) -> None:
        """Tell once that DBOS's database is out of reach, and once that it is not any more."""
        if error is not None and not self._out_of_reach:
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            logger.warning("background responses wait: DBOS's database cannot be used: %s", reason)
        if error is None and self._out_of_reach:
            logger.warning("DBOS's database can be used again")
        self._out_of_reach = error is not None

    # What it hands out

    def submit(self, key: RunKey) -> Future[None]:
        """Have this run performed, from any thread."""
        return asyncio.run_coroutine_threadsafe(self.perform(key), self._event_loop)

    async def perform(self, key: RunKey) -> None:
        """Work on a run until it has ended, or watch over it while another process does."""
        task = asyncio.current_task()
        assert task is not None
        if self._closing:
            raise asyncio.CancelledError
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
        """Leave the queue to DBOS, but for what is to end: that takes no turn."""
        await self._claim(began, 0)
