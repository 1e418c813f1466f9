"""Usage, projects and the counts of rate limits in SQLite."""

import functools
import re
import sqlite3
from collections.abc import Sequence
from typing import Any

from antiphon.store.sql_usage import SqlUsage, Statement, read_counts
from antiphon.store.sqlite.database import Database
from antiphon.store.usage import MINUTE, LimitCounts

REPORT = """
INSERT INTO limit_counts (subject, node, requests, tokens, concurrent, updated_at) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (subject, node) DO UPDATE SET
    requests = excluded.requests, tokens = excluded.tokens, concurrent = excluded.concurrent,
    updated_at = excluded.updated_at
"""

DELETE_OLD = "DELETE FROM limit_counts WHERE updated_at < ?"

LIST = "SELECT subject, requests, tokens, concurrent, ? - updated_at FROM limit_counts WHERE node <> ?"

MEASURE = """
SELECT coalesce((
    SELECT sum(length(input) + length(output) + length(body)) FROM responses WHERE project = ?1
), 0) + coalesce((SELECT sum(length(lines)) FROM events WHERE project = ?1), 0)
    + coalesce((SELECT sum(length(content)) FROM items WHERE project = ?1), 0)
"""


class SqliteUsage(Database, SqlUsage):
    async def report_limit_counts(self, node: str, counts: Sequence[LimitCounts]) -> None:
        now = self._now()
        rows = [(each.subject, node, each.requests, each.tokens, each.concurrent, now) for each in counts]
        await self._execute_all([(DELETE_OLD, [(now - 5 * MINUTE,)]), (REPORT, rows)])

    async def list_limit_counts(self, node: str) -> list[LimitCounts]:
        return read_counts(await self._reader.submit(LIST, (self._now(), node)))

    async def measure_stored_bytes(self, project: str) -> int:
        ((size,),) = await self._reader.submit(MEASURE, (project,))
        return int(size)

    async def _execute_all(self, statements: Sequence[Statement]) -> None:
        await self._writer.submit(_execute_all, (statements,))

    async def _select(self, statement: str, parameters: Sequence[object]) -> Sequence[Sequence[Any]]:
        rows: Sequence[Sequence[Any]] = await self._reader.submit(_translate(statement), parameters)
        return rows


def _execute_all(connection: sqlite3.Connection, statements: Sequence[Statement]) -> None:
    for text, rows in statements:
        connection.executemany(_translate(text), rows)


@functools.cache
def _translate(statement: str) -> str:
    """Return a statement with the numbered parameters of SQLite, `?1`."""
    return re.sub(r"\$(\d)", r"?\1", statement)
