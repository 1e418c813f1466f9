"""Execution of steps in PostgreSQL."""

import asyncio
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from antiphon.store.changes import Announcement
from antiphon.store.escaped_text import escape_all
from antiphon.store.postgres.database import PostgresDatabase
from antiphon.store.postgres.writer import GroupedStatement
from antiphon.store.sql_steps import (
    AnyStep,
    Batch,
    Clock,
    Lock,
    Result,
    RowInsert,
    SqliteStep,
    Statement,
    StepDatabase,
    Steps,
    TryLock,
    Variants,
)

if TYPE_CHECKING:
    from asyncpg import Connection

_LOCK_NUMBER = "hashtextextended('antiphon ' || current_schema() || ' ' || $1::text, 0)"
_LOCK = f"SELECT pg_advisory_xact_lock({_LOCK_NUMBER})"
_TRY_LOCK = f"SELECT pg_try_advisory_xact_lock({_LOCK_NUMBER})"
_NOW = "extract(epoch FROM clock_timestamp())::float8"
_CLOCK = f"SELECT {_NOW}"

# Longest item id that is used as a key. An entry of an index has at most 2704 bytes.
_MAX_KEY_LENGTH = 500


class PostgresSteps(PostgresDatabase, StepDatabase):
    """Base of the parts of a PostgreSQL database that are written as steps."""

    async def _read(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        result: Result = await self._reader.read(_run, (work, parameters, self._clock))
        return result

    async def _write(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        result: Result = await self._writer.submit(_run, (work, parameters, self._clock))
        return result

    async def _write_apart(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        async with self._reader.transact() as connection:
            result: Result = await _run(connection, work, parameters, self._clock)
        return result

    async def _fetch(self, statement: Statement, parameters: Sequence[object]) -> list[Any]:
        rows = await self._reader.submit(translate(statement), _convert(parameters))
        return [tuple(row) for row in rows]

    def _change(
        self, statement: str, parameters: Sequence[object], *, is_idempotent: bool = False
    ) -> asyncio.Future[int]:
        return self._writer.submit(_count_changes(statement, is_idempotent=is_idempotent), _convert(parameters))

    def _insert(self, insert: RowInsert, row: Sequence[object]) -> asyncio.Future[Any]:
        statement = _count_changes(insert.one_row, is_idempotent=True, after_repeat=insert.after_repeat)
        return self._writer.submit(statement, row)

    async def _measure_clock_offset(self) -> float:
        if self._clock is not None:
            return 0.0
        began_at = self._now()
        ((present,),) = await self._fetch(_CLOCK, ())
        ended_at = self._now()
        # The database has read its clock at any time between the two.
        return float(min(present - began_at, max(0.0, present - ended_at)))

    def _read_clock(self) -> float | None:
        return None if self._clock is None else float(self._clock())

    def _make_item_key(self, item_id: str) -> str:
        return make_item_key(item_id)

    def announce(self, announcement: Announcement) -> None:
        self._notifications.announce(announcement)

    def _track_write(self, project: str, response_id: str, first: int) -> AbstractContextManager[bool]:
        return self._uncertain.track(project, response_id, first)

    def _is_uncertain(self, project: str, response_id: str) -> bool:
        return (project, response_id, -1) in self._uncertain


def make_item_key(item_id: str) -> str:
    """Return the key of an item: its id, or a digest of a long id. Clients choose the ids of their items."""
    if len(item_id) <= _MAX_KEY_LENGTH:
        return item_id
    return f"{item_id[:100]}#{hashlib.sha256(item_id.encode(errors='surrogatepass')).hexdigest()}"


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
    if isinstance(step, Lock | TryLock):
        return [(await connection.fetchval(_LOCK if isinstance(step, Lock) else _TRY_LOCK, step.key),)]
    statement = translate(step.statement)
    if isinstance(step, Batch):
        if step.rows:
            await connection.executemany(statement, [_convert(row) for row in step.rows])
        return []
    return [tuple(row) for row in await connection.fetch(statement, *_convert(step.parameters))]


def _convert(parameters: Sequence[object]) -> list[object]:
    return [_convert_list(value) if isinstance(value, (list, tuple)) else value for value in parameters]


def _convert_list(values: Sequence[Any]) -> list[Any]:
    return escape_all(values) if values and isinstance(values[0], str) else list(values)


@functools.cache
def translate(statement: Statement) -> str:
    """Return a statement as PostgreSQL executes it, with numbers for its parameters."""
    numbers = itertools.count(1)
    text = statement.postgres if isinstance(statement, Variants) else statement
    text = re.sub(r"IN TEXTS\((\?\d*)\)", r"= ANY(\1::text[])", text)
    text = re.sub(r"IN NUMBERS\((\?\d*)\)", r"= ANY(\1::bigint[])", text)
    text = re.sub(r"NOW\((\?\d*)\)", rf"coalesce(\1::float8, {_NOW})", text)
    text = re.sub(r"\browid\b", "position", text)
    return re.sub(r"\?(\d*)", lambda match: f"${match[1] or next(numbers)}", text)


@functools.cache
def _count_changes(statement: str, *, is_idempotent: bool, after_repeat: str | None = None) -> GroupedStatement:
    """Return a statement whose result is the number of rows that the given one changes."""
    changing = f"WITH changed AS ({translate(statement)} RETURNING 1)"
    correction = after_repeat and translate(after_repeat)
    return GroupedStatement(f"{changing} SELECT count(*) FROM changed", is_idempotent, correction)
