"""DBOS with a file of its own beside that of the responses: a workflow of one step, started directly. See desk.py."""

import asyncio
import sqlite3
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dbos import DBOS, SetWorkflowID

from benchmarks.drivers.desk import Place, serve
from benchmarks.drivers.workflows import END, INSERT, TABLES, WorkflowQueue, configure


class DbosTwoFiles(WorkflowQueue):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._responses = sqlite3.connect(place.folder / "responses.db", isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 30000"):
            self._responses.execute(f"PRAGMA {pragma}")
        for table in TABLES:
            self._responses.execute(table)
        self._writer = ThreadPoolExecutor(1)

    async def start(self, response_id: str) -> None:
        await self.execute(INSERT, id=response_id)
        with SetWorkflowID(response_id):
            await DBOS.start_workflow_async(respond, response_id)

    async def stop_short(self) -> str:
        response_id = str(uuid.uuid4())
        await self.execute(INSERT, id=response_id)
        return response_id

    async def execute(self, statement: str, **parameters: str) -> list[Any]:
        def run() -> list[Any]:
            return self._responses.execute(statement, parameters).fetchall()

        return await asyncio.get_running_loop().run_in_executor(self._writer, run)


queue: DbosTwoFiles


@DBOS.step()
async def ask(response_id: str) -> str:
    text = await queue.hear(response_id)
    await queue.execute(END, id=response_id, text=text)
    return text


@DBOS.workflow()
async def respond(response_id: str) -> str:
    text = await ask(response_id)
    queue.tell(response_id, text)
    return text


async def open_queue(place: Place) -> DbosTwoFiles:
    global queue  # noqa: PLW0603, workflows are functions of a module
    queue = DbosTwoFiles(place)
    DBOS(config=configure(place, place.folder / "dbos.db"))
    DBOS.launch()
    return queue


if __name__ == "__main__":
    serve(open_queue)
