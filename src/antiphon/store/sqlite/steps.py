"""Execution of steps in SQLite."""

import functools
import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from antiphon.store.sql_steps import AnyStep, Batch, Clock, Lock, Result, StepDatabase, Steps
from antiphon.store.sqlite.database import Database

_LIST = "IN (SELECT value FROM json_each(?))"


class SqliteSteps(Database, StepDatabase):
    """Base of the parts of a SQLite database that are written as steps."""

    async def _read(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        result: Result = await self._reader.submit(_run, (work, parameters, self._now))
        return result

    async def _write(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        result: Result = await self._writer.submit(_run, (work, parameters, self._now))
        return result


def _run(
    connection: sqlite3.Connection,
    work: Callable[..., Steps[Any]],
    parameters: Sequence[object],
    clock: Callable[[], float],
) -> Any:
    steps = work(*parameters)
    try:
        step = next(steps)
        while True:
            step = steps.send(_execute(connection, step, clock))
    except StopIteration as end:
        return end.value


def _execute(connection: sqlite3.Connection, step: AnyStep, clock: Callable[[], float]) -> list[Any]:
    if isinstance(step, Clock):
        return [(clock(),)]
    if isinstance(step, Lock):
        return []
    statement = _translate(step.statement)
    if isinstance(step, Batch):
        connection.executemany(statement, step.rows)
        return []
    parameters = [json.dumps(list(value)) if isinstance(value, (list, tuple)) else value for value in step.parameters]
    return connection.execute(statement, parameters).fetchall()


@functools.cache
def _translate(statement: str) -> str:
    return statement.replace("IN TEXTS(?)", _LIST).replace("IN NUMBERS(?)", _LIST)
