"""Usage, projects and the counts of rate limits in tables, shared by the SQL stores.

The statements have the parameters of PostgreSQL, `$1`. The SQLite store translates them.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from antiphon.store.sql_work import SqlDatabase
from antiphon.store.usage import (
    HOUR,
    MINUTE,
    RETENTION_SECONDS,
    ROLL_UP_SECONDS,
    LimitCounts,
    Spending,
    StoredProject,
    UsageRow,
    total_by_month,
)

_COLUMNS = "started_at, project, key_id, model, requests, input_tokens, cached_tokens, output_tokens, cost"
_SUMS = "sum(requests), sum(input_tokens), sum(cached_tokens), sum(output_tokens), sum(cost)"
_ADD = """ON CONFLICT (started_at, project, key_id, model) DO UPDATE SET
    requests = usage.requests + excluded.requests,
    input_tokens = usage.input_tokens + excluded.input_tokens,
    cached_tokens = usage.cached_tokens + excluded.cached_tokens,
    output_tokens = usage.output_tokens + excluded.output_tokens,
    cost = usage.cost + excluded.cost"""

ADD = f"INSERT INTO usage ({_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) {_ADD}"

ADD_TO_MONTH = """
INSERT INTO usage_months (month, project, key_id, tokens, cost) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (month, project, key_id) DO UPDATE SET
    tokens = usage_months.tokens + excluded.tokens, cost = usage_months.cost + excluded.cost
"""

LIST = f"""
SELECT started_at - started_at % $3 AS period, project, key_id, model, {_SUMS} FROM usage
WHERE started_at >= $1 AND started_at < $2
GROUP BY period, project, key_id, model ORDER BY period, project, key_id, model
"""

SPENDING = "SELECT project, key_id, tokens, cost FROM usage_months WHERE month = $1 ORDER BY project, key_id"

# The condition on `started_at` after WHERE also tells SQLite that ON belongs to the INSERT.
JOIN_HOURS = f"""
INSERT INTO usage ({_COLUMNS})
SELECT started_at - started_at % {HOUR} AS period, project, key_id, model, {_SUMS} FROM usage
WHERE started_at < $1 AND started_at % {HOUR} <> 0
GROUP BY period, project, key_id, model {_ADD}
"""

DELETE_JOINED = f"DELETE FROM usage WHERE started_at < $1 AND started_at % {HOUR} <> 0"

DELETE_OLD = "DELETE FROM usage WHERE started_at < $1"

DELETE_OLD_MONTHS = "DELETE FROM usage_months WHERE month < $1"

SAVE_PROJECT = """
INSERT INTO projects (id, name, created_at, archived_at) VALUES ($1, $2, $3, $4)
ON CONFLICT (id) DO UPDATE SET name = excluded.name, archived_at = excluded.archived_at
"""

LIST_PROJECTS = "SELECT id, name, created_at, archived_at FROM projects ORDER BY id"

REVOKE_KEYS = "UPDATE api_keys SET revoked_at = $1 WHERE project = $2 AND revoked_at IS NULL"

# A statement and the parameters of its executions.
Statement = tuple[str, Sequence[Sequence[object]]]


class SqlUsage(SqlDatabase):
    """Base of the classes that store usage and projects by SQL.

    `_roll_up_lock` is executed before old usage is joined, so that two processes do not add the same rows.
    """

    _roll_up_lock: Sequence[Statement] = ()

    @abstractmethod
    async def _execute_all(self, statements: Sequence[Statement]) -> None:
        """Execute statements in one transaction."""

    @abstractmethod
    async def _select(self, statement: str, parameters: Sequence[object]) -> Sequence[Sequence[Any]]:
        """Return the rows of a statement."""

    async def add_usage(self, rows: Sequence[UsageRow]) -> None:
        # In one order in all processes: they could otherwise wait for each other.
        await self._execute_all([(ADD, sorted(rows)), (ADD_TO_MONTH, total_by_month(rows))])

    async def list_usage(self, start: int, end: int, *, width: int) -> list[UsageRow]:
        rows = await self._select(LIST, (start, end, width))
        # PostgreSQL returns sums of integers as decimals.
        return [UsageRow._make((*row[:4], *map(int, row[4:8]), row[8])) for row in rows]

    async def read_spending(self, month: int) -> list[Spending]:
        return [Spending(*row) for row in await self._select(SPENDING, (month,))]

    async def roll_up_usage(self, now: int) -> None:
        # Whole hours: an hour must not be joined in two parts while its minutes are still listed.
        joined = ((now - ROLL_UP_SECONDS) // HOUR * HOUR,)
        old = ((now - RETENTION_SECONDS) // HOUR * HOUR,)
        await self._execute_all(
            [
                *self._roll_up_lock,
                (JOIN_HOURS, [joined]),
                (DELETE_JOINED, [joined]),
                (DELETE_OLD, [old]),
                (DELETE_OLD_MONTHS, [old]),
            ]
        )

    async def save_project(self, project: StoredProject) -> None:
        await self._execute_all([(SAVE_PROJECT, [project])])

    async def list_projects(self) -> list[StoredProject]:
        return [StoredProject(*row) for row in await self._select(LIST_PROJECTS, ())]

    async def archive_project(self, project: StoredProject) -> None:
        await self._execute_all([(SAVE_PROJECT, [project]), (REVOKE_KEYS, [(project.archived_at, project.id)])])


def read_counts(rows: Sequence[Sequence[Any]]) -> list[LimitCounts]:
    """Return counts from rows with their age in seconds. A clock that was set back gives no negative age."""
    return [LimitCounts._make((*row[:4], max(0.0, row[4]))) for row in rows if row[4] < MINUTE]
