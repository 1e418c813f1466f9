"""Usage, projects and the counts of rate limits in a store."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

MINUTE, HOUR, DAY = 60, 3600, 86400

ROLL_UP_SECONDS = 2 * DAY
"""Age from which usage is stored by hours instead of minutes."""

RETENTION_SECONDS = 400 * DAY
"""Age from which usage is deleted."""

WRITE_ID_SECONDS = DAY
"""Minimum time for which a repetition of a write of usage is recognised."""

STALE_SECONDS = 10.0
"""Time after which the responses in progress of a process that reports nothing do not count any more."""


class UsageRow(NamedTuple):
    """The usage of a period that starts at `started_at`. `key_id` is empty if the request had no key."""

    started_at: int
    project: str
    key_id: str
    model: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: float


class Spending(NamedTuple):
    """The tokens and the cost of a key in a month."""

    project: str
    key_id: str
    tokens: int
    cost: float


class LimitCounts(NamedTuple):
    """The counts of a process for a subject of limits: those of the last minute, and the responses in progress.

    `age` is the number of seconds since they were reported.
    """

    subject: str
    requests: int
    tokens: int
    concurrent: int
    age: float = 0.0


class StoredProject(NamedTuple):
    """A project of the admin API. Its `id` is the name by which keys and data refer to it."""

    id: str
    name: str
    created_at: int
    archived_at: int | None = None


class UsageStore(Protocol):
    """The usage of all projects, and the counts that several processes share."""

    async def add_usage(self, rows: Sequence[UsageRow], *, write_id: str) -> None:
        """Add usage to that of the same period, project, key and model, and to the totals of its month.

        A write that raised Unavailable may have been stored. Its repetition with the same rows and `write_id` adds them
        only if they were not.
        """

    async def list_usage(self, start: int, end: int, *, width: int) -> list[UsageRow]:
        """Return the usage from `start` until before `end`, in periods of `width` seconds, in order."""

    async def read_spending(self, month: int) -> list[Spending]:
        """Return the totals of a month. `month` is its first second (`find_month`)."""

    async def roll_up_usage(self, now: int) -> None:
        """Join old usage to hours, and delete very old usage."""

    async def report_limit_counts(self, node: str, counts: Sequence[LimitCounts]) -> None:
        """Replace the counts of a process for these subjects. Delete counts that are older than some minutes."""

    async def list_limit_counts(self, node: str) -> list[LimitCounts]:
        """Return the counts of the last minute that all other processes reported."""

    async def measure_stored_bytes(self, project: str) -> int:
        """Return the size of the responses, events and conversation items of a project, as they are stored."""


class ProjectStore(Protocol):
    """The projects of the admin API. Projects that only have keys or data are not among them."""

    async def save_project(self, project: StoredProject) -> None:
        """Save a project, or replace its name. An archived project stays archived."""

    async def list_projects(self) -> list[StoredProject]:
        """Return all projects by id."""

    async def archive_project(self, project: StoredProject) -> None:
        """Save a project as archived, and revoke all its keys, in one transaction."""


def find_month(now: float) -> int:
    """Return the first second of the calendar month in UTC."""
    moment = datetime.fromtimestamp(now, UTC)
    return int(datetime(moment.year, moment.month, 1, tzinfo=UTC).timestamp())


def find_next_month(now: float) -> int:
    """Return the first second of the next calendar month in UTC."""
    return find_month(find_month(now) + 32 * DAY)


def total_by_month(rows: Sequence[UsageRow]) -> list[tuple[int, str, str, int, float]]:
    """Return the month, the project, the key, the tokens and the cost of usage: one row per key and month, in order."""
    totals: dict[tuple[int, str, str], tuple[int, float]] = {}
    for row in rows:
        key = find_month(row.started_at), row.project, row.key_id
        tokens, cost = totals.get(key, (0, 0.0))
        totals[key] = tokens + row.input_tokens + row.output_tokens, cost + row.cost
    return sorted((*key, *total) for key, total in totals.items())
