"""The queue of background runs in SQLite. It lies with the responses, so both are written in one transaction."""

import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from antiphon.store.base import ClaimedRun, ListedRun, RunKey, StoredResponse
from antiphon.store.record import Foreign, find_foreign, pack
from antiphon.store.sqlite.database import Database
from antiphon.store.sqlite.owners import Owners
from antiphon.store.sqlite.references import note_items
from antiphon.store.sqlite.responses import INSERT

ENQUEUE = "INSERT INTO runs (project, response_id, request, model, home, free_since) VALUES (?, ?, ?, ?, ?, ?)"

WAITING = "SELECT place, model, home, free_since FROM runs WHERE owner IS NULL AND NOT cancelled ORDER BY place"

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
ABANDONED = "SELECT place, model, home, leased_until FROM runs WHERE leased_until <= ? AND owner <> ? AND NOT cancelled"

# The plus keeps SQLite from looking through the whole queue for them: there are few.
UNWANTED = "SELECT place FROM runs WHERE cancelled = 1 AND (+owner IS NULL OR (+leased_until <= ? AND owner <> ?))"

FREE = """
SELECT place FROM runs
WHERE project = ? AND response_id = ? AND (owner IS NULL OR (leased_until <= ? AND owner <> ?))
"""

RUNS = """
SELECT project, response_id, owner IS NULL OR (leased_until <= ? AND owner <> ?), nullif(owner, ''), home = ?, model,
    max(
        coalesce(leased_until, free_since),
        coalesce((SELECT alive_until FROM homes WHERE homes.home = runs.home AND homes.home <> ?), 0)
    )
FROM runs ORDER BY place
"""

# Whoever still had an owner was not given back.
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
        self, owner: str, *, as_of: float, lease: float, limit: int, patience: Mapping[str, float] | None = None
    ) -> list[ClaimedRun]:
        free = _Free(as_of, self.home, patience or {})
        parameters = owner, self._owners, free, self._now, lease, limit
        claimed: list[ClaimedRun] = await self._writer.submit(_claim, parameters)
        return claimed

    async def claim_one(self, owner: str, key: RunKey, *, as_of: float, lease: float) -> ClaimedRun | None:
        parameters = owner, self._owners, key, self.home, as_of, self._now, lease
        claimed: ClaimedRun | None = await self._writer.submit(_claim_one, parameters)
        return claimed

    async def list_runs(self, owner: str, *, as_of: float) -> list[ListedRun]:
        runs: list[ListedRun] = await self._writer.submit(_list_runs, (owner, self._owners, self.home, as_of))
        return runs

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


class _Free(NamedTuple):
    """Which runs a process may take: those that it need not leave to others."""

    as_of: float
    home: str
    patience: Mapping[str, float]

    def choose(self, rows: Iterable[tuple[int, str, str, float]], homes: Mapping[str, float]) -> Iterator[int]:
        """The places of those it may take, of rows of a place, a model, a home, and when it became free.

        As long as processes of its home live, a run waits for them, however long their queue is.
        """
        for place, model, home, since in rows:
            waited = self.as_of - max(since, homes.get(home, since))
            if home == self.home or waited >= self.patience.get(model, -math.inf):
                yield place


def _enqueue(connection: sqlite3.Connection, row: Sequence[Any], run: Sequence[object], foreign: list[Foreign]) -> None:
    project, response_id, *_ = row
    connection.execute(INSERT, row)
    connection.execute(ENQUEUE, run)
    note_items(connection, project, response_id, foreign)


def _claim(
    connection: sqlite3.Connection,
    owner: str,
    owners: Owners,
    free: _Free,
    clock: Callable[[], float],
    lease: float,
    limit: int,
) -> list[ClaimedRun]:
    _bury(connection, owner, owners, free.as_of)
    homes: dict[str, float] = dict(connection.execute(HOMES).fetchall())
    places = list(islice(free.choose(connection.execute(WAITING), homes), limit))
    places += free.choose(connection.execute(ABANDONED, (free.as_of, owner)), homes)
    unwanted = [place for (place,) in connection.execute(UNWANTED, (free.as_of, owner))]
    # Only now that nobody else writes: a lease must not have run out while we waited for our turn.
    until = clock() + lease
    return [
        _take(connection, place, owner, free.home, until, lease) for place in sorted(unwanted + sorted(places)[:limit])
    ]


def _claim_one(
    connection: sqlite3.Connection,
    owner: str,
    owners: Owners,
    key: RunKey,
    home: str,
    as_of: float,
    clock: Callable[[], float],
    lease: float,
) -> ClaimedRun | None:
    _bury(connection, owner, owners, as_of)
    row = connection.execute(FREE, (*key, as_of, owner)).fetchone()
    return None if row is None else _take(connection, row[0], owner, home, clock() + lease, lease)


def _list_runs(connection: sqlite3.Connection, owner: str, owners: Owners, home: str, as_of: float) -> list[ListedRun]:
    _bury(connection, owner, owners, as_of)
    rows = connection.execute(RUNS, (as_of, owner, home, home))
    return [
        ListedRun(RunKey(project, response_id), bool(free), holder, bool(ours), model, since)
        for project, response_id, free, holder, ours, model, since in rows
    ]


def _bury(connection: sqlite3.Connection, owner: str, owners: Owners, as_of: float) -> None:
    """Let the leases of the dead end, and hold our own lock."""
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
