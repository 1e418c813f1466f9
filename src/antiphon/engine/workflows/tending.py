"""Having DBOS at work while there are runs, and telling it of them.

DBOS looks for work all the time, and takes longer to import than a server to start.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from antiphon.config import DbosSettings
from antiphon.engine.worker import LOOK_SECONDS, wait_for
from antiphon.engine.workflows.apart import run_apart
from antiphon.engine.workflows.comparison import EXECUTOR_MARK, Comparison
from antiphon.engine.workflows.database import is_file, prepare
from antiphon.errors import ConfigError, ServerError
from antiphon.store.base import ListedRun, RunKey, Store

if TYPE_CHECKING:
    from antiphon.engine.workflows.client import Client
    from antiphon.engine.workflows.instance import Instance, Perform

logger = logging.getLogger(__name__)

CLEARING_SECONDS = 3600
# DBOS looks for work many times in a second. So long after the last run it ends: to begin again does not take long.
IDLE_SECONDS = 10.0
# A database that does not answer for so long is worth a line in the log; DBOS begins anew then.
PATIENCE_SECONDS = 5.0
# What is stuck in one is left behind when the server ends.
ENDING_SECONDS = 2.0
# Whoever starts a server waits for so long to hear that its database does not answer.
STARTING_SECONDS = 15.0
# Of its time, a process spends no more than one part in so many on comparing, if it can be that seldom.
COMPARING_SHARE = 4
LONGEST_PAUSE_SECONDS = 5.0


class Tending:
    """For the runs that are `ours`, as their owner says. `perform` works on one, `cancel` ends one at work here.

    It waits for DBOS's database, which may be out of reach. Nobody else does.
    """

    def __init__(
        self,
        store: Store,
        settings: DbosSettings,
        *,
        owner: str,
        slots: int,
        ours: Callable[[ListedRun], bool],
        perform: "Perform",
        cancel: Callable[[RunKey], object],
    ) -> None:
        self._store = store
        self._settings = settings
        self._owner = owner
        self._slots = slots
        self._is_ours = ours
        self._perform = perform
        self._comparison = Comparison(store, owner, ours=ours, cancel=cancel)
        self._announced: asyncio.Queue[RunKey] = asyncio.Queue()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._instances = 0
        self._cleared = -math.inf
        self._out_of_reach = False
        self._closing = False

    async def start(self) -> None:
        """Raises ConfigError if DBOS's database is of no use."""
        self._task = asyncio.create_task(self._tend(await self._begin_dbos()))

    async def close(self) -> None:
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def announce(self, key: RunKey) -> None:
        self._announced.put_nowait(key)
        self._news.set()

    # When there is a DBOS

    async def _begin_dbos(self) -> "Instance | None":
        """See whether its database can be used. It takes DBOS itself to tell that of a server."""
        try:
            if not is_file(self._settings.database):
                async with asyncio.timeout(STARTING_SECONDS):
                    return await self._launch()
            await run_apart(lambda: prepare(self._settings.database))
        except ConfigError:
            raise
        except TimeoutError:
            raise ConfigError("dbos: its database does not answer.") from None
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
            await self._wait_for_answer(making)
            return making.result()
        except asyncio.CancelledError:
            await asyncio.wait([making], timeout=ENDING_SECONDS)
            if making.done() and making.exception() is None:
                await self._end_dbos(making.result())
            raise

    def _make_dbos(self) -> "Instance":
        from antiphon.engine.workflows.instance import Instance

        # No name comes twice: DBOS would hand out again what goes on here. What a dead process has left is seen in the
        # store, and resumed then.
        self._instances += 1
        return Instance(
            self._settings,
            executor=f"{self._owner}{EXECUTOR_MARK}{self._instances}",
            version=hashlib.sha256(self._store.home.encode()).hexdigest()[:16],
            slots=self._slots,
            perform=self._perform,
        )

    async def _end_dbos(self, instance: "Instance") -> None:
        ending = run_apart(instance.end)
        try:
            if not self._closing:
                await self._wait_for_answer(ending)
            await asyncio.wait([ending], timeout=ENDING_SECONDS)
        except asyncio.CancelledError:
            await asyncio.wait([ending], timeout=ENDING_SECONDS)
            raise

    async def _wait_for_answer(self, question: asyncio.Future[Any]) -> None:
        """However long that takes. If it is long, tell."""
        await asyncio.wait([question], timeout=PATIENCE_SECONDS)
        if not question.done():
            self._note(TimeoutError("it, or the store, does not answer"))
            await asyncio.wait([question])

    # What it is told

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
                is_idle = now - busy >= IDLE_SECONDS
                if now - heard >= PATIENCE_SECONDS or (is_idle and announcing is None):
                    return
                if is_idle and announcing is not None:
                    announcing.cancel()
                    announcing = None
                    continue  # one more look, now that nothing comes in between
                if announcing is None:  # those that were there before come first
                    announcing = asyncio.create_task(self._announce(instance.client))
                await asyncio.sleep(max(LOOK_SECONDS, min(COMPARING_SHARE * (now - began), LONGEST_PAUSE_SECONDS)))
        finally:
            if announcing is not None:
                announcing.cancel()

    async def _look(self, client: "Client") -> bool | None:
        """Whether there are runs of ours. None if DBOS's database cannot be asked."""
        comparing = asyncio.create_task(self._compare(client))
        try:
            await self._wait_for_answer(comparing)
            found = comparing.result()
        except ServerError:  # of the store: whoever renews the leases tells it
            return True
        except Exception as error:
            self._note(error)
            return None
        finally:
            comparing.cancel()
        self._note(None)
        return found

    async def _compare(self, client: "Client") -> bool:
        found = await self._comparison.look(client)
        if time.monotonic() - self._cleared >= CLEARING_SECONDS:
            await self._comparison.clear(client)
            self._cleared = time.monotonic()
        return found

    def _note(self, error: Exception | None) -> None:
        """Tell once that DBOS's database is out of reach, and once that it is not any more."""
        if error is not None and not self._out_of_reach:
            reason = error if isinstance(error, ConfigError) else f"DBOS's database cannot be used: {_shorten(error)}"
            logger.warning("background responses wait: %s", reason)
        if error is None and self._out_of_reach:
            logger.warning("DBOS's database can be used again")
        self._out_of_reach = error is not None


def _shorten(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
