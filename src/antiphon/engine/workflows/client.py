"""What we ask of DBOS's database: which workflows there are, and to hand one out, again, or not at all."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import sqlalchemy
from dbos import DBOSClient, EnqueueOptions

from antiphon.config import DbosSettings
from antiphon.store.base import RunKey

NAME = "antiphon"
QUEUE = "antiphon.responses"
WORKFLOW = "antiphon.respond"
# A question to a database names only so many.
_MOST_IDS = 1000
# One for who announces, one for who compares.
_THREADS = 2


class Workflow(NamedTuple):
    """What DBOS says of one: its status, which processes it is for, whom it was handed out to, and when."""

    status: str
    version: str | None
    executor_id: str | None
    dequeued_at: int | None


class Client:
    """Asks in threads of its own: a database that is locked keeps them for as long as it is.

    What it enqueues is for the processes of this `version`.
    """

    def __init__(self, url: str, engine: sqlalchemy.Engine | None, *, version: str) -> None:
        self.version = version
        self._client = DBOSClient(
            system_database_url=url,
            system_database_engine=engine,
            application_name=NAME,
            lazy=True,  # there may be no database yet
            retry_connection_errors=False,
        )
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="dbos-client")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.destroy()

    def register_queue(self, settings: DbosSettings, *, slots: int) -> None:
        """Waits for the database: for a thread."""
        self._client.register_queue(
            QUEUE,
            worker_concurrency=min(slots, settings.concurrency or slots),
            global_concurrency=settings.concurrency,
            partition_concurrency=settings.concurrency_per_project,
            limiter={"limit": settings.starts_per_minute, "period": 60.0} if settings.starts_per_minute else None,
            polling_interval_sec=settings.polling_seconds,
            on_conflict="always_update",
        )

    async def enqueue(self, key: RunKey) -> None:
        """Changes nothing if there is a workflow with this id."""
        options = EnqueueOptions(
            queue_name=QUEUE,
            workflow_name=WORKFLOW,
            workflow_id=key.response_id,
            queue_partition_key=key.project,
            app_version=self.version,
        )
        await self._ask(lambda: self._client.enqueue(options, *key))

    async def list(self, **which: Any) -> Mapping[str, Workflow]:
        """Our workflows by their ids, oldest first. `which` are the filters of DBOS."""

        def read() -> Mapping[str, Workflow]:
            found = self._client.list_workflows(name=WORKFLOW, load_input=False, load_output=False, **which)
            return {
                each.workflow_id: Workflow(each.status, each.app_version, each.executor_id, each.dequeued_at)
                for each in found
            }

        listed: Mapping[str, Workflow] = await self._ask(read)
        return listed

    async def find(self, ids: Collection[str]) -> Mapping[str, Workflow]:
        """Those of these that there are, whatever became of them."""
        found: dict[str, Workflow] = {}
        for part in _divide(ids):
            found |= await self.list(workflow_ids=part)
        return found

    async def delete(self, ids: Collection[str]) -> None:
        for part in _divide(ids):
            await self._ask(partial(self._client.delete_workflows, part))

    async def resume(self, ids: Collection[str]) -> None:
        for part in _divide(ids):
            await self._ask(partial(self._client.resume_workflows, part, queue_name=QUEUE))

    async def _ask(self, question: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, question)


def _divide(ids: Collection[str]) -> list[list[str]]:
    every = [*ids]
    return [every[start : start + _MOST_IDS] for start in range(0, len(every), _MOST_IDS)]
