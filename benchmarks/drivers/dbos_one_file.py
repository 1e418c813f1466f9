"""DBOS in the file of the responses: a response and its run are accepted in one transaction. See desk.py.

DBOS allows that for what it takes from a queue. It looks there every 10 ms, because nothing would wake it.
"""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import sqlalchemy
from dbos import DBOS, DBOSClient, EnqueueOptions

from benchmarks.drivers.desk import Place, serve
from benchmarks.drivers.workflows import END, INSERT, NAME, TABLES, VERSION, WorkflowQueue, configure

T = TypeVar("T")

QUEUE = "responses"
_POLLING = 0.01


class DbosOneFile(WorkflowQueue):
    def __init__(self, place: Place, engine: sqlalchemy.Engine) -> None:
        super().__init__(place)
        self._engine = engine
        self._client = DBOSClient(system_database_engine=engine, application_name=NAME)
        self._writer = ThreadPoolExecutor(1)

    async def start(self, response_id: str) -> None:
        def accept(connection: sqlalchemy.Connection) -> None:
            options = EnqueueOptions(
                queue_name=QUEUE, workflow_name="respond", workflow_id=response_id, app_version=VERSION
            )
            connection.execute(sqlalchemy.text(INSERT), {"id": response_id})
            self._client.enqueue_in_transaction(connection, options, response_id)

        await self._transact(accept)

    async def stop_short(self) -> str:
        response_id = str(uuid.uuid4())
        await self.start(response_id)
        return response_id

    async def execute(self, statement: str, **parameters: str) -> list[Any]:
        def run(connection: sqlalchemy.Connection) -> list[Any]:
            result = connection.execute(sqlalchemy.text(statement), parameters)
            return list(result) if result.returns_rows else []

        return await self._transact(run)

    async def _transact(self, work: Callable[[sqlalchemy.Connection], T]) -> T:
        def run() -> T:
            with self._engine.begin() as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._writer, run)


queue: DbosOneFile


@DBOS.step()
async def ask(response_id: str) -> str:
    text = await queue.hear(response_id)
    await queue.execute(END, id=response_id, text=text)
    return text


@DBOS.workflow(name="respond")
async def respond(response_id: str) -> str:
    text = await ask(response_id)
    queue.tell(response_id, text)
    return text


def connect(url: str) -> sqlalchemy.Engine:
    """As DBOS itself connects."""
    engine = sqlalchemy.create_engine(url)

    @sqlalchemy.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = "IMMEDIATE"
        connection.execute("PRAGMA busy_timeout = 30000")
        connection.execute("PRAGMA foreign_keys = ON")

    return engine


async def open_queue(place: Place) -> DbosOneFile:
    global queue  # noqa: PLW0603, workflows are functions of a module
    path = place.folder / "responses.db"
    DBOS(config=configure(place, path, threads=4))
    engine = connect(f"sqlite:///{path}")
    with engine.begin() as connection:
        for table in TABLES:
            connection.execute(sqlalchemy.text(table))
    DBOS.launch()
    queue = DbosOneFile(place, engine)
    await DBOS.register_queue_async(QUEUE, polling_interval_sec=_POLLING)
    return queue


if __name__ == "__main__":
    serve(open_queue)
