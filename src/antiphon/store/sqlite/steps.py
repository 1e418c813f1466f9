"""Execution of steps in SQLite."""

import asyncio
import functools
import json
import re
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from antiphon.store.escaped_text import escape_text
from antiphon.store.sql_steps import (
    AnyStep,
    Batch,
    Clock,
    Lock,
    Result,
    RowInsert,
    Statement,
    StepDatabase,
    Steps,
    TryLock,
    Variants,
)
from antiphon.store.sqlite.database import Database

_NUMBERS = r"IN (SELECT value FROM json_each(\1))"
# json_each() ends a text at U+0000, so `_convert` escapes it.
_TEXTS = r"IN (SELECT replace(replace(value, char(1) || '0', char(0)), char(1) || '1', char(1)) FROM json_each(\1))"
_ROW_LOCK = re.compile(r"\sFOR ((NO KEY )?UPDATE|KEY SHARE)( SKIP LOCKED)?")


class SqliteSteps(Database, StepDatabase):
    """Base of the parts of a SQLite database that are written as steps."""

    async def _read(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        result: Result = await self._reader.submit(_run, (work, parameters, self._now))
        return result

    async def _write(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        result: Result = await self._writer.submit(_run, (work, parameters, self._now))
        return result

    _write_apart = _write

    async def _fetch(self, statement: Statement, parameters: Sequence[object]) -> list[Any]:
        rows: list[Any] = await self._reader.submit(translate(statement), _convert(parameters))
        return rows

    def _change(
        self, statement: str, parameters: Sequence[object], *, is_idempotent: bool = False
    ) -> asyncio.Future[int]:
        return self._writer.submit(translate(statement), _convert(parameters))

    def _insert(self, insert: RowInsert, row: Sequence[object]) -> asyncio.Future[Any]:
        return self._writer.submit(insert, _make_bindable(row))


def _make_bindable(row: Sequence[Any]) -> list[Any]:
    """Return a row with the same values. sqlite3 searches for adapters of bytes and bool, which costs more."""
    return [bytearray(value) if type(value) is bytes else int(value) if type(value) is bool else value for value in row]


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
    if isinstance(step, Lock | TryLock):
        return [(True,)]
    statement = translate(step.statement)
    if isinstance(step, Batch):
        connection.executemany(statement, step.rows)
        return []
    return connection.execute(statement, _convert(step.parameters)).fetchall()


def _convert(parameters: Sequence[object]) -> list[object]:
    return [_encode_list(value) if isinstance(value, (list, tuple)) else value for value in parameters]


def _encode_list(values: Sequence[Any]) -> str:
    return json.dumps([escape_text(value) if isinstance(value, str) else value for value in values])


@functools.cache
def translate(statement: Statement) -> str:
    """Return a statement as SQLite executes it."""
    text = statement.sqlite if isinstance(statement, Variants) else statement
    text = re.sub(r"IN TEXTS\((\?\d*)\)", _TEXTS, text)
    text = re.sub(r"IN NUMBERS\((\?\d*)\)", _NUMBERS, text)
    text = re.sub(r"NOW\((\?\d*)\)", r"\1", text)
    return _ROW_LOCK.sub("", text).replace("greatest(", "max(")
