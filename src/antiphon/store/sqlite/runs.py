"""Claims of background runs in SQLite."""

import heapq
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from antiphon.errors import ServerError
from antiphon.store.base import NO_LIMITS, ClaimedRun
from antiphon.store.claims import Claim, FreeRun
from antiphon.store.limits import (
    START_WINDOW,
    SUSPECT_INTERRUPTIONS,
    Admission,
    RunLimits,
    SuspectFilter,
    choose_in_turns,
)
from antiphon.store.record import DAMAGE
from antiphon.store.sql_runs import SqlRuns
from antiphon.store.sqlite.leases import LiveProcesses
from antiphon.store.sqlite.steps import SqliteSteps

logger = logging.getLogger(__name__)

# The index covers all columns, so no row is read for skipped runs.
WAITING = """
SELECT position, project, attempt, model, configuration_id, free_since FROM runs
WHERE owner IS NULL AND NOT cancelled AND project = ? AND position > ? AND (attempt > 0 OR ?)
ORDER BY position
"""

# The projects with waiting runs, and the oldest of these. Each step is one search in the index.
WAITING_PROJECTS = """
WITH RECURSIVE walked (project) AS (
    SELECT min(project) FROM runs WHERE owner IS NULL AND NOT cancelled
    UNION ALL
    SELECT (SELECT min(project) FROM runs WHERE owner IS NULL AND NOT cancelled AND project > walked.project)
    FROM walked WHERE walked.project IS NOT NULL
)
SELECT project, (SELECT min(position) FROM runs WHERE owner IS NULL AND NOT cancelled AND project = walked.project)
FROM walked WHERE project IS NOT NULL
"""

# The plus signs make SQLite use the index of owned runs.
ACTIVE = "SELECT project FROM runs WHERE owner > '' AND (+owner = ? OR +leased_until > ?)"

DELETE_OLD_STARTS = "DELETE FROM run_starts WHERE started_at <= ?"

# A start later than now was recorded before the clock was set back.
CORRECT_STARTS = "UPDATE run_starts SET started_at = ? WHERE started_at > ?"

COUNT_STARTS = "SELECT count(*) FROM run_starts WHERE started_at > ?"

INSERT_START = "INSERT INTO run_starts (started_at) VALUES (?)"

ALIVE_UNTIL = "SELECT configuration_id, alive_until FROM configurations WHERE configuration_id > ''"

OWNERS = "SELECT DISTINCT owner FROM runs WHERE owner > ''"

END_LEASES = "UPDATE runs SET leased_until = ? WHERE owner = ? AND leased_until > ?"

# A run that still has an owner was interrupted once more.
INTERRUPTIONS = "SELECT interruptions + (owner IS NOT NULL) FROM runs WHERE position = ?"

HELD_SUSPECTS = "SELECT interruptions FROM runs WHERE owner = ? AND interruptions >= ?"

# Runs of dead processes. Runs that wait in the queue have no lease.
EXPIRED = """
SELECT position, project, attempt, model, configuration_id, leased_until FROM runs
WHERE leased_until <= ? AND owner <> ? AND NOT cancelled
"""

# The plus signs make SQLite use the index of cancelled runs, which are few.
CANCELLED = "SELECT position FROM runs WHERE cancelled = 1 AND (+owner IS NULL OR (+leased_until <= ? AND owner <> ?))"

# A run that still has an owner was not released.
TAKE = """
UPDATE runs SET
    attempt = attempt + 1,
    interruptions = interruptions + (owner IS NOT NULL),
    free_since = coalesce(leased_until, free_since),
    owner = ?,
    leased_until = ?,
    lease = ?
WHERE position = ?
"""

TAKEN = """
SELECT project, response_id, request, attempt, watched, cancelled, interruptions, model, configuration_id = ?,
    max(free_since, coalesce((
        SELECT alive_until FROM configurations
        WHERE configurations.configuration_id = runs.configuration_id AND runs.configuration_id <> ?
    ), 0))
FROM runs WHERE position = ?
"""


class SqliteRunQueue(SqliteSteps, SqlRuns):
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
        claim = Claim(owner, self.configuration_id, as_of, lease, limit, wait_by_model or {}, limits)
        parameters = claim, self._processes, self._now
        try:
            claimed: list[ClaimedRun] = await self._writer.submit(_claim, parameters)
        except ServerError as error:
            # A damaged row must not block the whole queue.
            if not isinstance(error.__cause__, DAMAGE) or not await self._writer.submit(_repair, ()):
                raise
            claimed = await self._writer.submit(_claim, parameters)
        return claimed

    async def release(self, owner: str) -> None:
        await super().release(owner)
        self._processes.unregister(owner)


def _repair(connection: sqlite3.Connection) -> int:
    """Convert the values of damaged runs to the types of their columns. Return how many there were."""
    types = {
        "INTEGER": ("attempt", "watched", "cancelled", "interruptions"),
        "REAL": ("leased_until", "lease", "free_since"),
        "TEXT": ("project", "response_id", "owner", "model", "configuration_id"),
        "BLOB": ("request",),
    }
    columns = [(column, kind) for kind, columns in types.items() for column in columns]
    changes = ", ".join(f"{column} = CAST({column} AS {kind})" for column, kind in columns)
    damaged = " OR ".join(f"typeof({column}) NOT IN ('null', lower('{kind}'))" for column, kind in columns)
    repaired = connection.execute(f"UPDATE OR IGNORE runs SET {changes} WHERE {damaged}").rowcount
    if repaired:
        logger.error("%d damaged runs in the queue were repaired", repaired)
    return repaired


def _claim(
    connection: sqlite3.Connection, claim: Claim, processes: LiveProcesses, clock: Callable[[], float]
) -> list[ClaimedRun]:
    _expire_leases(connection, claim.owner, processes, claim.as_of)
    # Read the clock inside the transaction: a new lease must not include the time spent waiting for the write lock.
    now = clock()
    chosen = _choose(connection, claim, now)
    cancelled = [position for (position,) in connection.execute(CANCELLED, (claim.as_of, claim.owner))]
    if claim.limits.starts_per_minute is not None:
        connection.executemany(INSERT_START, [(now,) for run in chosen if run.attempt == 0])
    positions = sorted([*cancelled, *(run.position for run in chosen)])
    return [_take(connection, position, claim, now + claim.lease) for position in positions]


def _choose(connection: sqlite3.Connection, claim: Claim, now: float) -> list[FreeRun]:
    """Return the runs that this claim takes within its limits."""
    if claim.slots <= 0:
        return []
    expired = sorted(FreeRun(*row) for row in connection.execute(EXPIRED, (claim.as_of, claim.owner)))
    oldest: dict[str, int] = dict(connection.execute(WAITING_PROJECTS).fetchall())
    for run in expired:
        oldest[run.project] = min(run.position, oldest.get(run.project, run.position))
    active: Counter[str] = Counter()
    if claim.limits.counts_active or len(oldest) > 1:
        active.update(project for (project,) in connection.execute(ACTIVE, (claim.owner, claim.as_of)))
    admission = _open_admission(connection, claim, active, now)
    if admission.room <= 0 or not oldest:
        return []
    alive_until: dict[str, float] = dict(connection.execute(ALIVE_UNTIL).fetchall())
    admit = _open_suspect_filter(connection, claim.owner)

    def list_runs(project: str) -> Iterator[FreeRun]:
        mine = [run for run in expired if run.project == project]
        for run in heapq.merge(mine, _list_waiting(connection, project, admission)):
            if not claim.skips(run, alive_until, now) and admit(run):
                yield run

    waiting = {project: (position, list_runs(project)) for project, position in oldest.items()}
    return choose_in_turns(waiting, admission, active)


def _open_suspect_filter(connection: sqlite3.Connection, owner: str) -> Callable[[FreeRun], bool]:
    """Return a function that admits the runs whose process has not died too often, and a group of the others."""
    suspects: SuspectFilter | None = None

    def admit(run: FreeRun) -> bool:
        nonlocal suspects
        if run.attempt < SUSPECT_INTERRUPTIONS:  # each interruption was an attempt
            return True
        if suspects is None:
            held = connection.execute(HELD_SUSPECTS, (owner, SUSPECT_INTERRUPTIONS))
            suspects = SuspectFilter([interruptions for (interruptions,) in held])
        (interruptions,) = connection.execute(INTERRUPTIONS, (run.position,)).fetchone()
        return suspects.admit(interruptions)

    return admit


def _open_admission(connection: sqlite3.Connection, claim: Claim, active: Mapping[str, int], now: float) -> Admission:
    starts = 0
    if claim.limits.starts_per_minute is not None:
        connection.execute(DELETE_OLD_STARTS, (now - START_WINDOW,))
        connection.execute(CORRECT_STARTS, (now, now))
        (starts,) = connection.execute(COUNT_STARTS, (now - START_WINDOW,)).fetchone()
    return Admission(claim.limits, slots=claim.slots, active=active, starts=starts)


def _list_waiting(connection: sqlite3.Connection, project: str, admission: Admission) -> Iterator[FreeRun]:
    """Yield the waiting runs of a project, oldest first, without those that may not start.

    When no more runs may start, the query is repeated from the last run on: SQLite skips excluded runs faster than
    Python.
    """
    position, is_exhausted = 0, False
    while not is_exhausted:
        allows_starts = admission.allows_starts
        is_exhausted = True
        for row in connection.execute(WAITING, (project, position, allows_starts)):
            run = FreeRun(*row)
            yield run
            if admission.allows_starts != allows_starts:
                position, is_exhausted = run.position, False
                break


def _expire_leases(connection: sqlite3.Connection, owner: str, processes: LiveProcesses, as_of: float) -> None:
    """Expire the leases of dead processes, and register this owner as alive."""
    for (other,) in connection.execute(OWNERS).fetchall():
        if other != owner and processes.is_dead(other):
            connection.execute(END_LEASES, (as_of, other, as_of))
    processes.register(owner)  # last, because it deletes the lock files of dead processes


def _take(connection: sqlite3.Connection, position: int, claim: Claim, leased_until: float) -> ClaimedRun:
    connection.execute(TAKE, (claim.owner, leased_until, claim.lease, position))
    taken = ClaimedRun(
        *connection.execute(TAKEN, (claim.configuration_id, claim.configuration_id, position)).fetchone()
    )
    return taken._replace(
        watched=bool(taken.watched), cancelled=bool(taken.cancelled), same_configuration=bool(taken.same_configuration)
    )
