"""The queue of background runs in SQLite. It lies with the responses, so both are written in one transaction."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from antiphon.store.base import ClaimedRun, RunKey, StoredResponse
from antiphon.store.record import find_foreign, pack
from antiphon.store.sqlite.database import Database
from antiphon.store.sqlite.references import note_items
from antiphon.store.sqlite.responses import INSERT

ENQUEUE = "INSERT INTO runs (project, response_id, request) VALUES (?, ?, ?)"

WAITING = "SELECT place FROM runs WHERE owner IS NULL AND NOT cancelled ORDER BY place LIMIT ?"

# As many as dead processes have left behind; never the queue itself.
ABANDONED = "SELECT place FROM runs WHERE leased_until <= ? AND owner <> ? AND NOT cancelled"

# The plus keeps SQLite from looking through the whole queue for them: there are few.
UNWANTED = "SELECT place FROM runs WHERE cancelled = 1 AND (+owner IS NULL OR (+leased_until <= ? AND owner <> ?))"

TAKE = "UPDATE runs SET owner = ?, leased_until = ?, attempt = attempt + 1 WHERE place = ?"

TAKEN = "SELECT project, response_id, request, attempt, watched, cancelled FROM runs WHERE place = ?"

RENEW = "UPDATE runs SET leased_until = ? WHERE owner = ?"

HOLDINGS = "SELECT project, response_id, cancelled FROM runs WHERE owner = ?"

RELEASE = "UPDATE runs SET owner = NULL, leased_until = NULL WHERE owner = ?"

# Nobody's name, under the lease that is left.
ABANDON = "UPDATE runs SET owner = '' WHERE project = ? AND response_id = ? AND owner = ?"

WATCHED = "SELECT watched FROM runs WHERE project = ? AND response_id = ?"

WATCH = "UPDATE runs SET watched = 1 WHERE project = ? AND response_id = ?"

CANCEL = "UPDATE runs SET cancelled = 1 WHERE project = ? AND response_id = ?"


class RunQueue(Database):
    async def enqueue(self, project: str, stored: StoredResponse, request: bytes) -> None:
        await self._writer.submit(_enqueue, ((project, *pack(stored)), request, find_foreign(stored)))

    async def claim(self, owner: str, *, now: float, lease: float, limit: int) -> list[ClaimedRun]:
        claimed: list[ClaimedRun] = await self._writer.submit(_claim, (owner, now, lease, limit))
        return claimed

    async def renew(self, owner: str, *, now: float, lease: float) -> dict[RunKey, bool]:
        held: dict[RunKey, bool] = await self._writer.submit(_renew, (owner, now + lease))
        return held

    async def release(self, owner: str) -> None:
        await self._writer.submit(RELEASE, (owner,))

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


def _enqueue(connection: sqlite3.Connection, row: Sequence[Any], request: bytes, foreign: list[str]) -> None:
    project, response_id, *_ = row
    connection.execute(INSERT, row)
    connection.execute(ENQUEUE, (project, response_id, request))
    note_items(connection, project, response_id, foreign)


def _claim(connection: sqlite3.Connection, owner: str, now: float, lease: float, limit: int) -> list[ClaimedRun]:
    places = [place for (place,) in connection.execute(WAITING, (limit,))]
    places += [place for (place,) in connection.execute(ABANDONED, (now, owner))]
    unwanted = [place for (place,) in connection.execute(UNWANTED, (now, owner))]
    claimed = []
    for place in sorted(unwanted + sorted(places)[:limit]):
        connection.execute(TAKE, (owner, now + lease, place))
        project, response_id, request, attempt, watched, cancelled = connection.execute(TAKEN, (place,)).fetchone()
        claimed.append(ClaimedRun(project, response_id, request, attempt, bool(watched), bool(cancelled)))
    return claimed


def _renew(connection: sqlite3.Connection, owner: str, until: float) -> dict[RunKey, bool]:
    connection.execute(RENEW, (until, owner))
    return {RunKey(*key): bool(cancelled) for *key, cancelled in connection.execute(HOLDINGS, (owner,))}
