"""Usage, projects and the counts of rate limits in PostgreSQL. The age of counts is by the clock of the database."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from antiphon.store.postgres.database import PostgresDatabase
from antiphon.store.sql_usage import SqlUsage, Statement, read_counts
from antiphon.store.usage import MINUTE, LimitCounts

if TYPE_CHECKING:
    from asyncpg import Connection

# The present: a parameter in tests, else the clock of the database.
_NOW = "coalesce({}::float8, extract(epoch FROM clock_timestamp())::float8)"

REPORT = f"""
INSERT INTO limit_counts (subject, node, requests, tokens, concurrent, updated_at)
VALUES ($1, $2, $3, $4, $5, {_NOW.format("$6")})
ON CONFLICT (subject, node) DO UPDATE SET
    requests = excluded.requests, tokens = excluded.tokens, concurrent = excluded.concurrent,
    updated_at = excluded.updated_at
"""

# Rows that another process is just deleting are skipped.
DELETE_OLD = f"""
DELETE FROM limit_counts WHERE (subject, node) IN (
    SELECT subject, node FROM limit_counts WHERE updated_at < {_NOW.format("$1")} - {5 * MINUTE} FOR UPDATE SKIP LOCKED
)
"""

LIST = f"""
SELECT subject, requests, tokens, concurrent, {_NOW.format("$1")} - updated_at FROM limit_counts WHERE node <> $2
"""

# Other processes wait until the end of the transaction, and then see its changes.
LOCK_ROLL_UP = "SELECT pg_advisory_xact_lock(hashtextextended('antiphon usage ' || current_schema(), 0))"

MEASURE = """
SELECT coalesce((
    SELECT sum(octet_length(input) + octet_length(output) + octet_length(body)) FROM responses WHERE project = $1
), 0) + coalesce((SELECT sum(octet_length(lines)) FROM events WHERE project = $1), 0)
    + coalesce((SELECT sum(octet_length(content)) FROM items WHERE project = $1), 0)
"""


class PostgresUsage(PostgresDatabase, SqlUsage):
    _roll_up_lock = ((LOCK_ROLL_UP, [()]),)

    async def report_limit_counts(self, node: str, counts: Sequence[LimitCounts]) -> None:
        now = self._read_present()
        rows = [(each.subject, node, each.requests, each.tokens, each.concurrent, now) for each in counts]
        await self._execute_all([(DELETE_OLD, [(now,)]), (REPORT, rows)])

    async def list_limit_counts(self, node: str) -> list[LimitCounts]:
        return read_counts(await self._reader.submit(LIST, (self._read_present(), node)))

    async def measure_stored_bytes(self, project: str) -> int:
        ((size,),) = await self._reader.submit(MEASURE, (project,))
        return int(size)

    def _read_present(self) -> float | None:
        return None if self._clock is None else float(self._clock())

    async def _execute_all(self, statements: Sequence[Statement]) -> None:
        await self._writer.submit(_execute_all, (statements,))

    async def _select(self, statement: str, parameters: Sequence[object]) -> Sequence[Sequence[Any]]:
        return await self._reader.submit(statement, parameters)


async def _execute_all(connection: "Connection[Any]", statements: Sequence[Statement]) -> None:
    for text, rows in statements:
        await connection.executemany(text, rows)
