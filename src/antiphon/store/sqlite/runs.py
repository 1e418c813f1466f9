"""The queue of background runs in SQLite. It lies with the responses, so both are written in one transaction."""

import heapq
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from antiphon.store.base import NO_LIMITS, ClaimedRun, RunKey, StoredResponse
from antiphon.store.limits import START_WINDOW, Admission, RunLimits
from antiphon.store.record import Foreign, find_foreign, pack
from antiphon.store.sqlite.database import Database
from antiphon.store.sqlite.leases import Owners
from antiphon.store.sqlite.references import note_items
from antiphon.store.sqlite.responses import INSERT

ENQUEUE = "INSERT INTO runs (project, response_id, request, model, home, free_since) VALUES (?, ?, ?, ?, ?, ?)"

# The index covers all columns, so skipped runs cost no row.
WAITING = """
SELECT place, project, attempt, model, home, free_since FROM runs
WHERE owner IS NULL AND NOT cancelled AND place > ? AND (attempt > 0 OR ?)
    AND project NOT IN (SELECT value FROM json_each(?))
ORDER BY place
"""

# The plus signs keep SQLite on the index of owned runs.
ACTIVE = "SELECT project FROM runs WHERE owner > '' AND (+owner = ? OR +leased_until > ?)"

FORGET_STARTS = "DELETE FROM run_starts WHERE started_at <= ?"

# A start later than now was recorded before the clock was set back.
CORRECT_STARTS = "UPDATE run_starts SET started_at = ? WHERE started_at > ?"

COUNT_STARTS = "SELECT count(*) FROM run_starts WHERE started_at > ?"

NOTE_START = "INSERT INTO run_starts (started_at) VALUES (?)"

HOMES = "SELECT home, alive_until FROM homes WHERE home > ''"

# Only for those who have something waiting: a server without work does not write.
STAY = """
INSERT INTO homes (home, alive_until)
SELECT ?, ? WHERE EXISTS (SELECT 1 FROM runs WHERE owner IS NULL AND NOT cancelled AND home = ?)
ON CONFLICT (home) DO UPDATE SET alive_until = excluded.alive_until
"""

OWNERS = "SELECT DISTINCT owner FROM runs WHERE owner > ''"

END_LEASES = "UPDATE runs SET leased_until = ? WHERE owner = ? AND leased_until > ?"

# As many as dead processes have left behind; never the queue itself.
ABANDONED = """
SELECT place, project, attempt, model, home, leased_until FROM runs
WHERE leased_until <= ? AND owner <> ? AND NOT cancelled
"""

# The plus keeps SQLite from looking through the whole queue for them: there are few.
UNWANTED = "SELECT place FROM runs WHERE cancelled = 1 AND (+owner IS NULL OR (+leased_until <= ? AND owner <> ?))"

# A run that still has an owner was not given back.
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

# The first condition is for the index: only those that are leased.
SHORTEN = "UPDATE runs SET leased_until = ? + lease WHERE leased_until > ? AND leased_until > ? + lease"

HOLDINGS = "SELECT project, response_id, cancelled FROM runs WHERE owner = ?"

RELEASE = "UPDATE runs SET owner = NULL, leased_until = NULL, free_since = ? WHERE owner = ?"

PUT_BACK = f"{RELEASE} AND project = ? AND response_id = ?"

# Nobody's name, under the lease that is left.
ABANDON = "UPDATE runs SET owner = '' WHERE project = ? AND response_id = ? AND owner = ?"

WATCHED = "SELECT watched FROM runs WHERE project = ? AND response_id = ?"

WATCH = "UPDATE runs SET watched = 1 WHERE project = ? AND response_id = ?"

CANCEL = "UPDATE runs SET cancelled = 1 WHERE project = ? AND response_id = ?"


class RunQueue(Database):
    async def enqueue(self, project: str, stored: StoredResponse, request: bytes) -> None:
        run = project, stored.response.id, request, stored.response.model, self.home, self._now()
        await self._writer.submit(_enqueue, ((project, *pack(stored)), run, find_foreign(stored)))

    async def claim(
        self,
        owner: str,
        *,
        as_of: float,
        lease: float,
        limit: int,
        patience: Mapping[str, float] | None = None,
        limits: RunLimits = NO_LIMITS,
    ) -> list[ClaimedRun]:
        claim = _Claim(owner, self.home, as_of, lease, limit, patience or {}, limits)
        claimed: list[ClaimedRun] = await self._writer.submit(_claim, (claim, self._owners, self._now))
        return claimed

    async def renew(self, owner: str, *, lease: float) -> dict[RunKey, bool]:
        held: dict[RunKey, bool] = await self._writer.submit(_renew, (owner, self.home, self._now, lease))
        return held

    async def release(self, owner: str) -> None:
        await self._writer.submit(RELEASE, (self._now(), owner))
        self._owners.leave(owner)

    async def put_back(self, owner: str, project: str, response_id: str, *, free_since: float) -> None:
        await self._writer.submit(PUT_BACK, (free_since, owner, project, response_id))

    async def abandon(self, owner: str, project: str, response_id: str) -> None:
        await self._writer.submit(ABANDON, (project, response_id, owner))

    async def watch(self, project: str, response_id: str) -> bool:
        # Most readers come to a run that is watched already, and need not wait for a commit.
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


class _Candidate(NamedTuple):
    place: int
    project: str
    attempt: int
    model: str
    home: str
    free_since: float


class _Claim(NamedTuple):
    """The arguments of one claim."""

    owner: str
    home: str
    as_of: float
    lease: float
    slots: int
    patience: Mapping[str, float]
    limits: RunLimits

    def is_left_to_others(self, run: _Candidate, homes: Mapping[str, float]) -> bool:
        """Return True while other processes should take this run.

        As long as processes of its home live, a run waits for them, however long their queue is.
        """
        waited = self.as_of - max(run.free_since, homes.get(run.home, run.free_since))
        return run.home != self.home and waited < self.patience.get(run.model, -math.inf)


def _enqueue(connection: sqlite3.Connection, row: Sequence[Any], run: Sequence[object], foreign: list[Foreign]) -> None:
    project, response_id, *_ = row
    connection.execute(INSERT, row)
    connection.execute(ENQUEUE, run)
    note_items(connection, project, response_id, foreign)


def _claim(
    connection: sqlite3.Connection, claim: _Claim, owners: Owners, clock: Callable[[], float]
) -> list[ClaimedRun]:
    _bury(connection, claim.owner, owners, claim.as_of)
    # Only now that nobody else writes: a lease must not have run out while we waited for our turn.
    now = clock()
    chosen = _choose(connection, claim, now)
    unwanted = [place for (place,) in connection.execute(UNWANTED, (claim.as_of, claim.owner))]
    if claim.limits.starts_per_minute is not None:
        connection.executemany(NOTE_START, [(now,) for run in chosen if run.attempt == 0])
    places = sorted([*unwanted, *(run.place for run in chosen)])
    return [_take(connection, place, claim.owner, claim.home, now + claim.lease, claim.lease) for place in places]


def _choose(connection: sqlite3.Connection, claim: _Claim, now: float) -> list[_Candidate]:
    """Return the runs that this claim takes within its limits, oldest first."""
    admission = _open_admission(connection, claim, now)
    if admission.room <= 0:
        return []
    homes: dict[str, float] = dict(connection.execute(HOMES).fetchall())
    abandoned = sorted(_Candidate(*row) for row in connection.execute(ABANDONED, (claim.as_of, claim.owner)))
    chosen: list[_Candidate] = []
    for run in heapq.merge(abandoned, _list_waiting(connection, admission)):
        if claim.is_left_to_others(run, homes) or not admission.admit(run.project, attempt=run.attempt):
            continue
        chosen.append(run)
        if admission.room <= 0:
            break
    return chosen


def _open_admission(connection: sqlite3.Connection, claim: _Claim, now: float) -> Admission:
    active: Counter[str] = Counter()
    if claim.limits.counts_active:
        active.update(project for (project,) in connection.execute(ACTIVE, (claim.owner, claim.as_of)))
    starts = 0
    if claim.limits.starts_per_minute is not None:
        connection.execute(FORGET_STARTS, (now - START_WINDOW,))
        connection.execute(CORRECT_STARTS, (now, now))
        (starts,) = connection.execute(COUNT_STARTS, (now - START_WINDOW,)).fetchone()
    return Admission(claim.limits, slots=claim.slots, active=active, starts=starts)


def _list_waiting(connection: sqlite3.Connection, admission: Admission) -> Iterator[_Candidate]:
    """Yield the waiting runs, oldest first, without those that the limits exclude.

    The query begins again behind the last run when a limit is reached: SQLite skips excluded runs faster than Python.
    """
    place = 0
    while admission.room > 0:
        excluded = len(admission.full_projects), admission.allows_starts
        full = json.dumps([*admission.full_projects])
        for row in connection.execute(WAITING, (place, admission.allows_starts, full)):
            run = _Candidate(*row)
            yield run
            if excluded != (len(admission.full_projects), admission.allows_starts):
                place = run.place
                break
        else:
            return


def _bury(connection: sqlite3.Connection, owner: str, owners: Owners, as_of: float) -> None:
    """Expire the leases of dead processes, and hold our own lock."""
    for (other,) in connection.execute(OWNERS).fetchall():
        if other != owner and owners.is_dead(other):
            connection.execute(END_LEASES, (as_of, other, as_of))
    owners.enter(owner)  # after that: it clears away what the dead have left


def _take(connection: sqlite3.Connection, place: int, owner: str, home: str, until: float, lease: float) -> ClaimedRun:
    connection.execute(TAKE, (owner, until, lease, place))
    taken = ClaimedRun(*connection.execute(TAKEN, (home, home, place)).fetchone())
    return taken._replace(watched=bool(taken.watched), cancelled=bool(taken.cancelled), ours=bool(taken.ours))


def _renew(
    connection: sqlite3.Connection, owner: str, home: str, clock: Callable[[], float], lease: float
) -> dict[RunKey, bool]:
    now = clock()
    connection.execute(STAY, (home, now + lease, home))
    connection.execute(RENEW, (now + lease, lease, owner))
    connection.execute(SHORTEN, (now, now, now))
    return {RunKey(*key): bool(cancelled) for *key, cancelled in connection.execute(HOLDINGS, (owner,))}
