"""Claims of background runs in PostgreSQL.

An advisory lock lets one process claim at a time, so that the limits count exactly. A claim locks only the runs that it
takes, and skips a run whose owner is just writing.

Times are those of the database's clock. A caller's times are converted by their distance from the present.
"""

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from antiphon.store.base import NO_LIMITS, ClaimedRun
from antiphon.store.claims import MAX_DELAY_SECONDS, Claim, FreeRun
from antiphon.store.limits import (
    START_WINDOW,
    SUSPECT_INTERRUPTIONS,
    Admission,
    RunLimits,
    SuspectFilter,
    choose_in_turns,
)
from antiphon.store.postgres.steps import PostgresSteps
from antiphon.store.sql_runs import SqlRuns

if TYPE_CHECKING:
    from asyncpg import Connection

logger = logging.getLogger(__name__)

# Number of waiting runs of a project that a claim reads first for each free slot, and the factor by which it grows if
# all of them are left to others.
RUNS_PER_SLOT = 1
RUNS_GROWTH = 8

# The present: a parameter in tests, else the clock of the database.
_NOW = "coalesce({}::float8, extract(epoch FROM clock_timestamp())::float8)"

# Claims of other processes wait until the end of the transaction. The clock is read after the wait, so that a new lease
# does not include it.
LOCK = f"""
SELECT pg_advisory_xact_lock(hashtextextended('antiphon claims ' || current_schema(), 0)), {_NOW.format("$1")}
"""

# True if there may be a run to claim. Most checks of an idle process end here.
HAS_RUNS = f"""
SELECT EXISTS (SELECT 1 FROM runs WHERE owner IS NULL AND NOT cancelled)
    OR EXISTS (SELECT 1 FROM runs WHERE owner IS NOT NULL AND owner <> $1 AND leased_until <= {_NOW.format("$2")})
    OR EXISTS (SELECT 1 FROM runs WHERE cancelled)
"""

# The projects with waiting runs. Each step is one search in the index.
_PROJECTS = """
WITH RECURSIVE walked (project) AS (
    SELECT min(project) FROM runs WHERE owner IS NULL AND NOT cancelled
    UNION ALL
    SELECT (SELECT min(project) FROM runs WHERE owner IS NULL AND NOT cancelled AND project > walked.project)
    FROM walked WHERE walked.project IS NOT NULL
)
"""

WAITING = f"""
{_PROJECTS}
SELECT waiting.* FROM walked CROSS JOIN LATERAL (
    SELECT position, project, attempt, model, configuration_id, free_since FROM runs
    WHERE owner IS NULL AND NOT cancelled AND project = walked.project AND (attempt > 0 OR $2::boolean)
        AND NOT (free_since > $3 AND free_since <= $3 + {MAX_DELAY_SECONDS}) -- as claims.is_delayed
    ORDER BY position LIMIT $1
) AS waiting WHERE walked.project IS NOT NULL
ORDER BY position
"""

# Runs of owners whose lease has expired.
EXPIRED = """
SELECT position, project, attempt, model, configuration_id, leased_until FROM runs
WHERE owner IS NOT NULL AND owner <> $2 AND leased_until <= $1 AND NOT cancelled ORDER BY position
"""

CANCELLED = """
SELECT position FROM runs
WHERE cancelled AND (owner IS NULL OR (leased_until <= $1 AND owner <> $2)) ORDER BY position
"""

ACTIVE = "SELECT project FROM runs WHERE owner > '' AND (owner = $1 OR leased_until > $2)"

# A run that still has an owner was interrupted once more.
INTERRUPTIONS = """
SELECT position, interruptions + (owner IS NOT NULL)::integer FROM runs WHERE position = ANY ($1::bigint[])
"""

HELD_SUSPECTS = "SELECT interruptions FROM runs WHERE owner = $1 AND interruptions >= $2"

DELETE_OLD_STARTS = "DELETE FROM run_starts WHERE started_at <= $1"

# A start later than now was recorded before the clock was set back.
CORRECT_STARTS = "UPDATE run_starts SET started_at = $1 WHERE started_at > $1"

COUNT_STARTS = "SELECT count(*) FROM run_starts WHERE started_at > $1"

INSERT_START = "INSERT INTO run_starts (started_at) VALUES ($1)"

ALIVE_UNTIL = "SELECT configuration_id, alive_until FROM configurations"

# Another process may have renewed a lease, or released a run, since the runs were chosen.
LOCK_CHOSEN = """
SELECT position FROM runs
WHERE position = ANY ($1::bigint[]) AND (owner IS NULL OR (owner <> $2 AND leased_until <= $3))
FOR NO KEY UPDATE SKIP LOCKED
"""

# A run that still has an owner was not released.
TAKE = """
UPDATE runs SET
    attempt = attempt + 1,
    interruptions = interruptions + (owner IS NOT NULL)::integer,
    free_since = coalesce(leased_until, free_since),
    owner = $2,
    leased_until = $3,
    lease = $4,
    locked_owner = CASE WHEN $6 THEN $2 END
WHERE position = ANY ($1::bigint[])
RETURNING position, project, response_id, request, attempt, watched, cancelled, interruptions, model,
    configuration_id = $5, greatest(free_since, coalesce((
        SELECT alive_until FROM configurations
        WHERE configurations.configuration_id = runs.configuration_id AND runs.configuration_id <> $5
    ), 0))
"""

RECORD_LOCK = "UPDATE runs SET locked_owner = CASE WHEN ?2 THEN ?1 END WHERE owner = ?1"


class PostgresRunQueue(PostgresSteps, SqlRuns):
    async def claim(
        self,
        owner: str,
        *,
        as_of: float,
        lease: float,
        limit: int,
        wait_by_model: Mapping[str, float] | None = None,
        limits: RunLimits = NO_LIMITS,
    ) -> list[ClaimedRun]:
        await self._check_owners(owner, lease)
        waited = max(0.0, self._now() - as_of)
        ((has_runs,),) = await self._reader.submit(HAS_RUNS, (owner, as_of if self._clock else None))
        if not has_runs:
            return []
        async with self._reader.transact() as connection:
            now: float
            _, now = await connection.fetchrow(LOCK, self._read_clock())
            began = as_of if self._clock else now - max(waited, self._health.measure_outage(lease))
            claim = Claim(owner, self.configuration_id, began, lease, limit, wait_by_model or {}, limits)
            claimed = await _claim(connection, claim, now, is_locked=self._owner_locks.is_recorded(owner))
        return [self._convert_time(run, now) for run in claimed]

    async def release(self, owner: str) -> None:
        await super().release(owner)
        self._notifications.release_lock(owner)

    async def _check_owners(self, owner: str, lease: float) -> None:
        """Record whether this owner holds its lock, and end the leases of owners whose process has ended."""
        locks = self._owner_locks
        check = await locks.check(
            owner,
            self._notifications,
            self._reader,
            clock=self._read_clock(),
            after_outage=self._health.measure_outage(lease) > 0,
        )
        if check is None:
            return
        if check.is_locked != locks.is_recorded(owner):
            await self._change(RECORD_LOCK, (owner, check.is_locked), is_idempotent=True)
            locks.record(owner, is_locked=check.is_locked)
        for ended in check.ended:
            logger.warning("a process that shares the database has ended. Its background responses are taken over")
            await self.end_leases(ended)

    def _convert_time(self, run: ClaimedRun, now: float) -> ClaimedRun:
        """Express the time `free_since` by the clock of this process. `now` is the time of the database."""
        if self._clock is not None:
            return run
        return run._replace(free_since=self._now() - (now - run.free_since))


async def _claim(connection: "Connection[Any]", claim: Claim, now: float, *, is_locked: bool) -> list[ClaimedRun]:
    chosen = await _choose(connection, claim, now) if claim.slots > 0 else []
    cancelled = [position for (position,) in await connection.fetch(CANCELLED, claim.as_of, claim.owner)]
    positions = [*cancelled, *(run.position for run in chosen)]
    if not positions:
        return []
    locked = {row[0] for row in await connection.fetch(LOCK_CHOSEN, positions, claim.owner, claim.as_of)}
    if claim.limits.starts_per_minute is not None:
        starts = [(now,) for run in chosen if run.attempt == 0 and run.position in locked]
        await connection.executemany(INSERT_START, starts)
    parameters = claim.owner, now + claim.lease, claim.lease, claim.configuration_id, is_locked
    rows = await connection.fetch(TAKE, sorted(locked), *parameters)
    return [ClaimedRun(*taken) for _, *taken in sorted(rows, key=lambda row: row[0])]


async def _choose(connection: "Connection[Any]", claim: Claim, now: float) -> list[FreeRun]:
    """Return the runs that this claim takes within its limits."""
    expired = [FreeRun(*row) for row in await connection.fetch(EXPIRED, claim.as_of, claim.owner)]
    starts = await _count_starts(connection, now) if claim.limits.starts_per_minute is not None else 0
    active = await _count_active(connection, claim) if claim.limits.counts_active else None
    alive_until: dict[str, float] | None = None
    count = claim.slots * RUNS_PER_SLOT
    while True:
        admission = Admission(claim.limits, slots=claim.slots, active=active or {}, starts=starts)
        if admission.room <= 0:
            return []
        waiting = await _list_waiting(connection, count, admission, max(now, claim.as_of))
        runs = [*heapq.merge(expired, waiting)]
        if alive_until is None and any(run.configuration_id != claim.configuration_id for run in runs):
            alive_until = dict(await connection.fetch(ALIVE_UNTIL))
        free = [run for run in runs if not claim.skips(run, alive_until or {}, now)]
        if active is None and len({run.project for run in free}) > 1:
            active = await _count_active(connection, claim)
        admit = await _open_suspect_filter(connection, claim, free)
        chosen = _choose_from(free, admission, active or {}, admit)
        if admission.room <= 0 or not _may_have_more(waiting, count, admission):
            return chosen
        count *= RUNS_GROWTH


async def _count_active(connection: "Connection[Any]", claim: Claim) -> Counter[str]:
    """Return the number of runs in progress by project."""
    return Counter(project for (project,) in await connection.fetch(ACTIVE, claim.owner, claim.as_of))


async def _list_waiting(connection: "Connection[Any]", count: int, admission: Admission, now: float) -> list[FreeRun]:
    """Return up to `count` waiting runs of each project, oldest first, and as many that were started before."""
    rows = []
    if admission.allows_starts:
        rows = await connection.fetch(WAITING, count, True, now)
    if admission.starts_left is not None:
        rows += await connection.fetch(WAITING, count, False, now)
    return sorted({FreeRun(*row) for row in rows})


def _may_have_more(waiting: Sequence[FreeRun], count: int, admission: Admission) -> bool:
    """Return True if a project may have further runs that the limits allow, behind those that were left to others."""
    allowed = [run for run in waiting if admission.allows_starts or run.attempt > 0]
    read = Counter(run.project for run in allowed)
    return any(number >= count for project, number in read.items() if project not in admission.full_projects)


def _choose_from(
    free: Sequence[FreeRun], admission: Admission, active: Mapping[str, int], admit: Callable[[FreeRun], bool]
) -> list[FreeRun]:
    by_project: dict[str, list[FreeRun]] = {}
    for run in free:
        by_project.setdefault(run.project, []).append(run)
    waiting = {project: (runs[0].position, filter(admit, runs)) for project, runs in by_project.items()}
    return choose_in_turns(waiting, admission, active)


async def _open_suspect_filter(
    connection: "Connection[Any]", claim: Claim, free: Sequence[FreeRun]
) -> Callable[[FreeRun], bool]:
    """Return a function that admits the runs whose process has not died too often, and a group of the others."""
    positions = [run.position for run in free if run.attempt >= SUSPECT_INTERRUPTIONS]
    if not positions:  # each interruption was an attempt
        return lambda _: True
    interruptions: dict[int, int] = dict(await connection.fetch(INTERRUPTIONS, positions))
    held = await connection.fetch(HELD_SUSPECTS, claim.owner, SUSPECT_INTERRUPTIONS)
    suspects = SuspectFilter([row[0] for row in held])
    return lambda run: suspects.admit(interruptions.get(run.position, 0))


async def _count_starts(connection: "Connection[Any]", now: float) -> int:
    await connection.execute(DELETE_OLD_STARTS, now - START_WINDOW)
    await connection.execute(CORRECT_STARTS, now)
    starts: int = await connection.fetchval(COUNT_STARTS, now - START_WINDOW)
    return starts
