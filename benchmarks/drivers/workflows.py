"""What the queues that run on DBOS have in common: how it is set up, and who waits for a response in this process."""

import asyncio
import sqlite3
import uuid
from pathlib import Path
from typing import Any

from dbos import DBOS, DBOSConfig, WorkflowHandleAsync

from benchmarks.drivers.desk import Model, Place, Record

NAME, VERSION = "benchmarks", "1"
STREAM = "events"
# A response that can be asked for must be kept beside what DBOS keeps of its run.
TABLES = (
    "CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, text TEXT)",
    "CREATE TABLE IF NOT EXISTS events (id TEXT, pieces TEXT)",
)
INSERT = "INSERT INTO responses (id) VALUES (:id)"
LOG = "INSERT INTO events (id, pieces) VALUES (:id, :pieces)"
# Whoever comes second changes nothing.
END = "UPDATE responses SET text = :text WHERE id = :id AND text IS NULL"
READ = "SELECT id, text, (SELECT count(*) FROM events WHERE events.id = responses.id) FROM responses"


class WorkflowQueue:
    """The part of a queue that is the same, however a workflow is started. The workflow tells its text with `tell`."""

    def __init__(self, place: Place) -> None:
        self.model = Model(place)
        self._place = place
        self._waiting: dict[str, asyncio.Future[str]] = {}

    async def answer(self) -> str:
        response_id = str(uuid.uuid4())
        # Its own ways to wait for the end look into the database again and again. Nobody has to wait for that here.
        self._waiting[response_id] = asyncio.get_running_loop().create_future()
        await self.start(response_id)
        try:
            return await self._waiting[response_id]
        finally:
            del self._waiting[response_id]

    async def accept(self) -> str:
        response_id = str(uuid.uuid4())
        await self.start(response_id)
        return response_id

    async def start(self, response_id: str) -> None:
        raise NotImplementedError

    async def hear(self, response_id: str) -> str:
        """The text of the model, whose reads are logged as they come, but for the last: that is the end's affair."""
        heard: list[str] = []
        async for pieces in self.model.speak():
            if heard:
                # Each shows who keeps it from being written by a process that has lost the run.
                await self.execute(LOG, id=response_id, pieces=heard[-1])
                await DBOS.write_stream_async(STREAM, heard[-1])
            heard.append("".join(pieces))
        return "".join(heard)

    async def execute(self, statement: str, **parameters: str) -> list[Any]:
        """A transaction of one statement."""
        raise NotImplementedError

    async def look(self, ids: list[str]) -> list[Record]:
        records = {response_id: Record(*record) for response_id, *record in await self.execute(READ)}
        return [records[response_id] for response_id in ids]

    async def read_outcomes(self, ids: list[str]) -> list[str]:
        return [await self._read_outcome(response_id) for response_id in ids]

    async def _read_outcome(self, response_id: str) -> str:
        handle: WorkflowHandleAsync[str] = await DBOS.retrieve_workflow_async(response_id)
        stream = [str(entry) async for entry in DBOS.read_stream_async(response_id, STREAM)]
        return "|".join([await handle.get_result(), *stream])

    def tell(self, response_id: str, text: str) -> None:
        if response_id in self._waiting:
            self._waiting[response_id].set_result(text)

    async def take_over(self, process: str) -> None:
        # Not public: its users have Conductor, a service, that tells a process to do this.
        await asyncio.to_thread(DBOS._recover_pending_workflows, [process])

    async def count_apart(self) -> int:
        first = DBOS(config=configure(self._place, self._place.folder / "first.db"))
        second = DBOS(config=configure(self._place, self._place.folder / "second.db"))
        return len({id(first), id(second)})


def configure(place: Place, path: Path, *, connections: int = 2, threads: int = 2) -> DBOSConfig:
    """As quick as we could make it. Few connections and threads are quicker than many: SQLite has one writer."""
    connection = sqlite3.connect(path)
    # It stays with the file. Synchronous FULL is what connections have by themselves.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    return DBOSConfig(
        name=NAME,
        system_database_url=f"sqlite:///{path}",
        executor_id=place.process,
        application_version=VERSION,
        sys_db_pool_size=connections,
        max_executor_threads=threads,
        log_level="ERROR",
    )
