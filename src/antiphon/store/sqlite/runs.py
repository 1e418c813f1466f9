"""The queue of background runs in SQLite. A run and its response are written in one transaction.

The column `home` has the configuration id of the process that enqueued a run.
"""

import heapq
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from antiphon import offload
from antiphon.errors import ServerError
from antiphon.store.base import NO_LIMITS, ClaimedRun, QueueFull, RunKey, StoredResponse
from antiphon.store.claims import Claim, FreeRun
from antiphon.store.limits import START_WINDOW, SUSPECT_INTERRUPTIONS, Admission, RunLimits, choose_in_turns
from antiphon.store.record import DAMAGE, ForeignItem, pack_with_foreign_items
from antiphon.store.sqlite.database import Database
from antiphon.store.sqlite.leases import LiveProcesses
from antiphon.store.sqlite.responses import INSERT, index_items

logger = logging.getLogger(__name__)

ENQUEUE = "INSERT INTO runs (project, response_id, request, model, home, free_since) VALUES (?, ?, ?, ?, ?, ?)"

# The index covers all columns, so no row is read for skipped runs.
WAITING = """
SELECT place, project, attempt, model, home, free_since FROM runs
WHERE owner IS NULL AND NOT cancelled AND project = ? AND place > ? AND (attempt > 0 OR ?)
ORDER BY place
"""

# The projects with waiting runs, and the oldest of these. Each step is one search in the index.
WAITING_PROJECTS = """
WITH RECURSIVE walked (project) AS (
    SELECT min(project) FROM runs WHERE owner IS NULL AND NOT cancelled
    UNION ALL
    SELECT (SELECT min(project) FROM runs WHERE owner IS NULL AND NOT cancelled AND project > walked.project)
    FROM walked WHERE walked.project IS NOT NULL
)
SELECT project, (SELECT min(place) FROM runs WHERE owner IS NULL AND NOT cancelled AND project = walked.project)
FROM walked WHERE project IS NOT NULL
"""

COUNT_WAITING = "SELECT count(*) FROM runs WHERE owner IS NULL AND NOT cancelled"

COUNT_WAITING_OF_PROJECT = f"{COUNT_WAITING} AND project = ?"

# The plus signs make SQLite use the index of owned runs.
ACTIVE = "SELECT project FROM runs WHERE owner > '' AND (+owner = ? OR +leased_until > ?)"

DELETE_OLD_STARTS = "DELETE FROM run_starts WHERE started_at <= ?"

# A start later than now was recorded before the clock was set back.
CORRECT_STARTS = "UPDATE run_starts SET started_at = ? WHERE started_at > ?"

COUNT_STARTS = "SELECT count(*) FROM run_starts WHERE started_at > ?"

INSERT_START = "INSERT INTO run_starts (started_at) VALUES (?)"

LIVE_HOMES = "SELECT home, alive_until FROM homes WHERE home > ''"

# Only if the process has waiting runs: a server without work does not write.
RENEW_HOME = """
INSERT INTO homes (home, alive_until)
SELECT ?, ? WHERE EXISTS (SELECT 1 FROM runs WHERE owner IS NULL AND NOT cancelled AND home = ?)
ON CONFLICT (home) DO UPDATE SET alive_until = excluded.alive_until
"""

OWNERS = "SELECT DISTINCT owner FROM runs WHERE owner > ''"

END_LEASES = "UPDATE runs SET leased_until = ? WHERE owner = ? AND leased_until > ?"

# A run that still has an owner was interrupted once more.
INTERRUPTIONS = "SELECT interruptions + (owner IS NOT NULL) FROM runs WHERE place = ?"

HOLDS_SUSPECT = "SELECT EXISTS (SELECT 1 FROM runs WHERE owner = ? AND interruptions >= ?)"

# Runs of dead processes. Runs that wait in the queue have no lease.
EXPIRED = """
SELECT place, project, attempt, model, home, leased_until FROM runs
WHERE leased_until <= ? AND owner <> ? AND NOT cancelled
"""

# The plus signs make SQLite use the index of cancelled runs, which are few.
CANCELLED = "SELECT place FROM runs WHERE cancelled = 1 AND (+owner IS NULL OR (+leased_until <= ? AND owner <> ?))"

# A run that still has an owner was not released.
TAKE = """
UPDATE runs SET
    attempt = attempt + 1,
    interruptions = interruptions + (owner IS NOT NULL),
    free_since = coalesce(leased_until, free_since),
    owner = ?,
    leased_until = ?,
    lease = ?
WHERE place = ?
"""

TAKEN = """
SELECT project, response_id, request, attempt, watched, cancelled, interruptions, model, home = ?,
    max(free_since, coalesce((SELECT alive_until FROM homes WHERE homes.home = runs.home AND homes.home <> ?), 0))
FROM runs WHERE place = ?
"""

RENEW = "UPDATE runs SET leased_until = ?, lease = ? WHERE owner = ?"

# The first condition lets SQLite use the index of leased runs.
SHORTEN_LEASES = "UPDATE runs SET leased_until = ? + lease WHERE leased_until > ? AND leased_until > ? + lease"

OWNED_RUNS = "SELECT project, response_id, cancelled FROM runs WHERE owner = ?"

RELEASE = "UPDATE runs SET owner = NULL, leased_until = NULL, free_since = ? WHERE owner = ?"

PUT_BACK = f"{RELEASE} AND project = ? AND response_id = ?"

# Clear the owner but keep the expiry.
CLEAR_OWNER = "UPDATE runs SET owner = '' WHERE project = ? AND response_id = ? AND owner = ?"

WATCHED = "SELECT watched FROM runs WHERE project = ? AND response_id = ?"

WATCH = "UPDATE runs SET watched = 1 WHERE project = ? AND response_id = ?"

CANCEL = "UPDATE runs SET cancelled = 1 WHERE project = ? AND response_id = ?"


class SqliteRunQueue(Database):
    async def enqueue(
        self, project: str, stored: StoredResponse, request: bytes, *, limits: RunLimits = NO_LIMITS
    ) -> None:
        run = project, stored.response.id, request, stored.response.model, self.configuration_id, self._now()
        record, foreign = await offload.run(pack_with_foreign_items, stored)
        await self._writer.submit(_enqueue, ((project, *record), run, foreign, limits))

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

    async def renew(self, owner: str, *, lease: float) -> dict[RunKey, bool]:
        runs: dict[RunKey, bool] = await self._writer.submit(_renew, (owner, self.configuration_id, self._now, lease))
        return runs

    async def release(self, owner: str) -> None:
        await self._writer.submit(RELEASE, (self._now(), owner))
        self._processes.unregister(owner)

    async def return_run(self, owner: str, project: str, response_id: str, *, free_since: float) -> None:
        await self._writer.submit(PUT_BACK, (free_since, owner, project, response_id))

    async def stop_renewing(self, owner: str, project: str, response_id: str) -> None:
        await self._writer.submit(CLEAR_OWNER, (project, response_id, owner))

    async def mark_watched(self, project: str, response_id: str) -> bool:
        # Most readers follow a run that is already watched, and need not wait for a commit.
        rows = await self._reader.submit(WATCHED, (project, response_id))
        if not rows:
            return False
        (watched,) = rows[0]
        if watched:
            return True
        marked: int = await self._writer.submit(WATCH, (project, response_id))
        return marked > 0

    async def request_cancel(self, project: str, response_id: str) -> bool:
        marked: int = await self._writer.submit(CANCEL, (project, response_id))
        return marked > 0

    async def count_waiting(self) -> int:
        ((waiting,),) = await self._reader.submit(COUNT_WAITING, ())
        return int(waiting)


def _repair(connection: sqlite3.Connection) -> int:
    """Convert the values of damaged runs to the types of their columns. Return how many there were."""
    types = {
        "INTEGER": ("attempt", "watched", "cancelled", "interruptions"),
        "REAL": ("leased_until", "lease", "free_since"),
        "TEXT": ("project", "response_id", "owner", "model", "home"),
        "BLOB": ("request",),
    }
    columns = [(column, kind) for kind, columns in types.items() for column in columns]
    changes = ", ".join(f"{column} = CAST({column} AS {kind})" for column, kind in columns)
    damaged = " OR ".join(f"typeof({column}) NOT IN ('null', lower('{kind}'))" for column, kind in columns)
    repaired = connection.execute(f"UPDATE OR IGNORE runs SET {changes} WHERE {damaged}").rowcount
    if repaired:
        logger.error("%d damaged runs in the queue were repaired", repaired)
    return repaired


def _enqueue(
    connection: sqlite3.Connection,
    row: Sequence[Any],
    run: Sequence[object],
    foreign: list[ForeignItem],
    limits: RunLimits,
) -> None:
    project, response_id, *_ = row
    if limits.counts_waiting:
        _check_waiting(connection, project, limits)
    connection.execute(INSERT.one_row, row)
    connection.execute(ENQUEUE, run)
    index_items(connection, project, response_id, foreign)


def _check_waiting(connection: sqlite3.Connection, project: str, limits: RunLimits) -> None:
    """Raise QueueFull if the project or the whole queue has as many waiting runs as allowed."""
    own, total = limits.queued_per_project, limits.queued
    if own is not None:
        (waiting,) = connection.execute(COUNT_WAITING_OF_PROJECT, (project,)).fetchone()
        if waiting >= own:
            raise QueueFull(waiting, is_project=True)
    if total is not None:
        (waiting,) = connection.execute(COUNT_WAITING).fetchone()
        if waiting >= total:
            raise QueueFull(waiting, is_project=False)


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
    alive_until: dict[str, float] = dict(connection.execute(LIVE_HOMES).fetchall())
    suspects = _SuspectFilter(connection, claim.owner)

    def list_runs(project: str) -> Iterator[FreeRun]:
        mine = [run for run in expired if run.project == project]
        for run in heapq.merge(mine, _list_waiting(connection, project, admission)):
            if not claim.is_left_to_others(run, alive_until) and suspects.admit(run):
                yield run

    waiting = {project: (position, list_runs(project)) for project, position in oldest.items()}
    return choose_in_turns(waiting, admission, active)


class _SuspectFilter:
    """Admits one suspect run, unless the owner holds one already."""

    def __init__(self, connection: sqlite3.Connection, owner: str) -> None:
        self._connection = connection
        self._owner = owner
        self._is_taken: bool | None = None

    def admit(self, run: FreeRun) -> bool:
        if run.attempt < SUSPECT_INTERRUPTIONS:  # each interruption was an attempt
            return True
        (interruptions,) = self._connection.execute(INTERRUPTIONS, (run.position,)).fetchone()
        if interruptions < SUSPECT_INTERRUPTIONS:
            return True
        if self._is_taken is None:
            (held,) = self._connection.execute(HOLDS_SUSPECT, (self._owner, SUSPECT_INTERRUPTIONS)).fetchone()
            self._is_taken = bool(held)
        is_admitted = not self._is_taken
        self._is_taken = True
        return is_admitted


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


def _renew(
    connection: sqlite3.Connection, owner: str, configuration_id: str, clock: Callable[[], float], lease: float
) -> dict[RunKey, bool]:
    now = clock()
    connection.execute(RENEW_HOME, (configuration_id, now + lease, configuration_id))
    connection.execute(RENEW, (now + lease, lease, owner))
    connection.execute(SHORTEN_LEASES, (now, now, now))
    return {RunKey(*key): bool(cancelled) for *key, cancelled in connection.execute(OWNED_RUNS, (owner,))}
