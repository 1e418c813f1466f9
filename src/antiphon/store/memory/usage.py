"""Usage, projects and the counts of rate limits in memory. Only one process uses the store."""

from collections.abc import Sequence

from antiphon.store.memory.tables import MemoryTables
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


class MemoryUsage(MemoryTables):
    async def add_usage(self, rows: Sequence[UsageRow], *, write_id: str) -> None:
        claim = "", f"usage:{write_id}"
        if claim in self._tables.effect_claims:
            return
        totals = total_by_month(rows)  # invalid rows raise an error before anything is added
        self._tables.effect_claims[claim] = int(self._now()) + WRITE_ID_SECONDS
        for row in rows:
            _add(self._tables.usage, row)
        months = self._tables.usage_months
        for month, project, key_id, tokens, cost in totals:
            spent = months.get((month, project, key_id), (0, 0.0))
            months[month, project, key_id] = spent[0] + tokens, spent[1] + cost

    async def list_usage(self, start: int, end: int, *, width: int) -> list[UsageRow]:
        found: dict[tuple[int, str, str, str], UsageRow] = {}
        for row in self._tables.usage.values():
            if start <= row.started_at < end:
                _add(found, row._replace(started_at=row.started_at - row.started_at % width))
        return sorted(found.values())

    async def read_spending(self, month: int) -> list[Spending]:
        totals = sorted(self._tables.usage_months.items())
        return [Spending(project, key_id, *spent) for (each, project, key_id), spent in totals if each == month]

    async def roll_up_usage(self, now: int) -> None:
        joined = (now - ROLL_UP_SECONDS) // HOUR * HOUR
        old = (now - RETENTION_SECONDS) // HOUR * HOUR
        rows, self._tables.usage = self._tables.usage, {}
        for row in rows.values():
            if row.started_at >= old:
                is_joined = row.started_at < joined
                started_at = row.started_at - row.started_at % HOUR if is_joined else row.started_at
                _add(self._tables.usage, row._replace(started_at=started_at))
        for key in [key for key in self._tables.usage_months if key[0] < old]:
            del self._tables.usage_months[key]

    async def report_limit_counts(self, node: str, counts: Sequence[LimitCounts]) -> None:
        now = self._now()
        reports = self._tables.limit_counts
        for key in [key for key, (_, updated_at) in reports.items() if updated_at < now - 5 * MINUTE]:
            del reports[key]
        reports.update({(each.subject, node): (each, now) for each in counts})

    async def list_limit_counts(self, node: str) -> list[LimitCounts]:
        now = self._now()
        return [
            counts._replace(age=max(0.0, now - updated_at))
            for (_, reporter), (counts, updated_at) in self._tables.limit_counts.items()
            if reporter != node and now - updated_at < MINUTE
        ]

    async def measure_stored_bytes(self, project: str) -> int:
        tables = self._tables
        responses = [record for (owner, _), record in tables.responses.items() if owner == project]
        events = [batch for (owner, _), batches in tables.events.items() if owner == project for batch in batches]
        rows = [row for (owner, _), row in tables.conversations.items() if owner == project]
        return (
            sum(len(record.input) + len(record.output) + len(record.body) for record in responses)
            + sum(len(batch.lines) for batch in events)
            + sum(len(item.content) for row in rows for item in row.items.values())
        )

    async def save_project(self, project: StoredProject) -> None:
        earlier = self._tables.projects.get(project.id, project)
        archived_at = project.archived_at if earlier.archived_at is None else earlier.archived_at
        self._tables.projects[project.id] = project._replace(created_at=earlier.created_at, archived_at=archived_at)

    async def list_projects(self) -> list[StoredProject]:
        return [project for _, project in sorted(self._tables.projects.items())]

    async def archive_project(self, project: StoredProject) -> None:
        await self.save_project(project)
        for key in [key for key in self._tables.api_keys.values() if key.project == project.id]:
            if key.revoked_at is None:
                self._tables.api_keys[key.id] = key._replace(revoked_at=project.archived_at)


def _add(rows: dict[tuple[int, str, str, str], UsageRow], row: UsageRow) -> None:
    """Add usage to that of the same period, project, key and model."""
    earlier = rows.get(row[:4])
    sums = row[4:] if earlier is None else [a + b for a, b in zip(earlier[4:], row[4:], strict=True)]
    rows[row[:4]] = UsageRow(*row[:4], *sums)
