"""Execution of steps in PostgreSQL."""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from antiphon.store.postgres.connection import escape_all
from antiphon.store.postgres.database import PostgresDatabase
from antiphon.store.sql_steps import AnyStep, Batch, Clock, Lock, Result, SqliteStep, StepDatabase, Steps

if TYPE_CHECKING:
    from asyncpg import Connection

_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('antiphon ' || current_schema() || ' ' || $1::text, 0))"
_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"


class PostgresSteps(PostgresDatabase, StepDatabase):
    """Base of the parts of a PostgreSQL database that are written as steps."""

    async def _read(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        async with self._reader.transact() as connection:
            result: Result = await _run(connection, work, parameters, self._clock)
        return result

    async def _write(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        result: Result = await self._writer.submit(_run, (work, parameters, self._clock))
        return result

    async def _fetch(self, statement: str, parameters: Sequence[object]) -> list[Any]:
        rows = await self._reader.submit(number_parameters(statement), _convert(parameters))
        return [tuple(row) for row in rows]


async def _run(
    connection: "Connection[Any]",
    work: Callable[..., Steps[Any]],
    parameters: Sequence[object],
    clock: Callable[[], float] | None,
) -> Any:
    steps = work(*parameters)
    try:
        step = next(steps)
        while True:
            step = steps.send(await _execute(connection, step, clock))
    except StopIteration as end:
        return end.value


async def _execute(
    connection: "Connection[Any]", step: AnyStep, clock: Callable[[], float] | None
) -> list[Sequence[Any]]:
    if isinstance(step, Clock):
        return [(await connection.fetchval(_CLOCK) if clock is None else clock(),)]
    if isinstance(step, SqliteStep):
        return []
    if isinstance(step, Lock):
        await connection.execute(_LOCK, step.key)
        return []
    statement = number_parameters(step.statement)
    if isinstance(step, Batch):
        await connection.executemany(statement, [_convert(row) for row in step.rows])
        return []
    return [tuple(row) for row in await connection.fetch(statement, *_convert(step.parameters))]


def _convert(parameters: Sequence[object]) -> list[object]:
    return [_convert_list(value) if isinstance(value, (list, tuple)) else value for value in parameters]


def _convert_list(values: Sequence[Any]) -> list[Any]:
    return escape_all(values) if values and isinstance(values[0], str) else list(values)


@functools.cache
def number_parameters(statement: str) -> str:
    """Number the parameters."""
    numbers = itertools.count(1)
    statement = statement.replace("IN TEXTS(?)", "= ANY(?::text[])").replace("IN NUMBERS(?)", "= ANY(?::bigint[])")
    return re.sub(r"\?", lambda _: f"${next(numbers)}", statement)
