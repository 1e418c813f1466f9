"""Usage, projects and the counts of rate limits in tables, shared by the SQL stores."""

from collections.abc import Sequence

from antiphon.store.sql_hosted_steps import CLAIM
from antiphon.store.sql_steps import Batch, Clock, Lock, SqlStep, StepDatabase, Steps
from antiphon.store.usage import (
    HOUR,
    MINUTE,
    RETENTION_SECONDS,
    ROLL_UP_SECONDS,
    WRITE_ID_SECONDS,
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

CLAIM_WRITE = f"{CLAIM} RETURNING key"

ADD = f"INSERT INTO usage ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) {_ADD}"

ADD_TO_MONTH = """
INSERT INTO usage_months (month, project, key_id, tokens, cost) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (month, project, key_id) DO UPDATE SET
    tokens = usage_months.tokens + excluded.tokens, cost = usage_months.cost + excluded.cost
"""

LIST = f"""
SELECT started_at - started_at % ? AS period, project, key_id, model, {_SUMS} FROM usage
WHERE started_at >= ? AND started_at < ?
GROUP BY period, project, key_id, model ORDER BY period, project, key_id, model
"""

SPENDING = "SELECT project, key_id, tokens, cost FROM usage_months WHERE month = ? ORDER BY project, key_id"

# The condition on `started_at` after WHERE also tells SQLite that ON belongs to the INSERT.
JOIN_HOURS = f"""
INSERT INTO usage ({_COLUMNS})
SELECT started_at - started_at % {HOUR} AS period, project, key_id, model, {_SUMS} FROM usage
WHERE started_at < ? AND started_at % {HOUR} <> 0
GROUP BY period, project, key_id, model {_ADD}
"""

DELETE_JOINED = f"DELETE FROM usage WHERE started_at < ? AND started_at % {HOUR} <> 0"

DELETE_OLD = "DELETE FROM usage WHERE started_at < ?"

DELETE_OLD_MONTHS = "DELETE FROM usage_months WHERE month < ?"

SAVE_PROJECT = """
INSERT INTO projects (id, name, created_at, archived_at) VALUES (?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    name = excluded.name, archived_at = coalesce(projects.archived_at, excluded.archived_at)
"""

LIST_PROJECTS = "SELECT id, name, created_at, archived_at FROM projects ORDER BY id"

REVOKE_KEYS = "UPDATE api_keys SET revoked_at = ? WHERE project = ? AND revoked_at IS NULL"

REPORT_COUNTS = """
INSERT INTO limit_counts (subject, node, requests, tokens, concurrent, updated_at) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (subject, node) DO UPDATE SET
    requests = excluded.requests, tokens = excluded.tokens, concurrent = excluded.concurrent,
    updated_at = excluded.updated_at
"""

# Rows that another process is just deleting are skipped.
DELETE_OLD_COUNTS = """
DELETE FROM limit_counts WHERE (subject, node) IN (
    SELECT subject, node FROM limit_counts WHERE updated_at < ? FOR UPDATE SKIP LOCKED
)
"""

LIST_COUNTS = """
SELECT subject, requests, tokens, concurrent, ? - updated_at FROM limit_counts WHERE node <> ? AND updated_at > ?
"""

MEASURE = """
SELECT coalesce((SELECT sum(length(input) + length(output) + length(body)) FROM responses WHERE project = ?), 0)
    + coalesce((SELECT sum(length(lines)) FROM events WHERE project = ?), 0)
    + coalesce((SELECT sum(length(content)) FROM items WHERE project = ?), 0)
"""


class SqlUsage(StepDatabase):
    """Base of the classes that store usage and projects by SQL. The age of counts is by the clock of the database."""

    async def add_usage(self, rows: Sequence[UsageRow], *, write_id: str) -> None:
        await self._write(_add, rows, write_id)

    async def list_usage(self, start: int, end: int, *, width: int) -> list[UsageRow]:
        rows = await self._fetch(LIST, (width, start, end))
        # PostgreSQL returns sums of integers as decimals.
        return [UsageRow._make((*row[:4], *map(int, row[4:8]), row[8])) for row in rows]

    async def read_spending(self, month: int) -> list[Spending]:
        return [Spending(*row) for row in await self._fetch(SPENDING, (month,))]

    async def roll_up_usage(self, now: int) -> None:
        now = await self._limit_time(now)
        # Whole hours: an hour must not be joined in two parts while its minutes are still listed.
        joined = (now - ROLL_UP_SECONDS) // HOUR * HOUR
        old = (now - RETENTION_SECONDS) // HOUR * HOUR
        await self._write(_roll_up, joined, old)

    async def report_limit_counts(self, node: str, counts: Sequence[LimitCounts]) -> None:
        await self._write(_report_counts, node, counts)

    async def list_limit_counts(self, node: str) -> list[LimitCounts]:
        return await self._read(_list_counts, node)

    async def measure_stored_bytes(self, project: str) -> int:
        ((size,),) = await self._fetch(MEASURE, (project, project, project))
        return int(size)

    async def save_project(self, project: StoredProject) -> None:
        await self._change(SAVE_PROJECT, project)

    async def list_projects(self) -> list[StoredProject]:
        return [StoredProject(*row) for row in await self._fetch(LIST_PROJECTS, ())]

    async def archive_project(self, project: StoredProject) -> None:
        await self._write(_archive, project)


def _add(rows: Sequence[UsageRow], write_id: str) -> Steps[None]:
    ((now,),) = yield Clock()
    if not (yield SqlStep(CLAIM_WRITE, ("", f"usage:{write_id}", int(now) + WRITE_ID_SECONDS))):
        return  # this write was stored, but the answer was lost
    # In one order in all processes: they could otherwise wait for each other.
    yield Batch(ADD, sorted(rows))
    yield Batch(ADD_TO_MONTH, total_by_month(rows))


def _roll_up(joined: int, old: int) -> Steps[None]:
    yield Lock("usage")  # two processes must not add the same rows
    yield SqlStep(JOIN_HOURS, (joined,))
    yield SqlStep(DELETE_JOINED, (joined,))
    yield SqlStep(DELETE_OLD, (old,))
    yield SqlStep(DELETE_OLD_MONTHS, (old,))


def _report_counts(node: str, counts: Sequence[LimitCounts]) -> Steps[None]:
    ((now,),) = yield Clock()
    yield SqlStep(DELETE_OLD_COUNTS, (now - 5 * MINUTE,))
    rows = [(each.subject, node, each.requests, each.tokens, each.concurrent, now) for each in counts]
    yield Batch(REPORT_COUNTS, rows)


def _list_counts(node: str) -> Steps[list[LimitCounts]]:
    ((now,),) = yield Clock()
    # Every process reads each second. Rows of old reports stay as long as no process has counts to report.
    rows = yield SqlStep(LIST_COUNTS, (now, node, now - MINUTE))
    # A clock that was set back gives no negative age.
    return [LimitCounts._make((*row[:4], max(0.0, row[4]))) for row in rows]


def _archive(project: StoredProject) -> Steps[None]:
    yield SqlStep(SAVE_PROJECT, project)
    yield SqlStep(REVOKE_KEYS, (project.archived_at, project.id))
