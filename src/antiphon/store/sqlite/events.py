"""The event log in SQLite: one row for each batch, found by the number of its last event."""

import sqlite3
from collections.abc import Sequence

from antiphon.errors import ServerError
from antiphon.store.record import Batch, pack_events, unpack_events
from antiphon.store.sqlite.database import Database
from antiphon.store.sqlite.leases import is_held

STORED = "SELECT 1 FROM responses WHERE project = ? AND id = ?"

REACHED = "SELECT 1 FROM events WHERE project = ? AND response_id = ? AND last >= ? LIMIT 1"

APPEND = "INSERT INTO events (project, response_id, last, lines) VALUES (?, ?, ?, ?)"

# The cast: a damaged row may hold something else than bytes.
READ = "SELECT last, CAST(lines AS BLOB) FROM events WHERE project = ? AND response_id = ? AND last > ? ORDER BY last"

UNWATCHED = "SELECT 1 FROM runs WHERE project = ? AND response_id = ? AND owner = ? AND NOT watched"

DROP = "DELETE FROM events WHERE project = ? AND response_id = ?"


class EventLog(Database):
    async def append_events(
        self, project: str, response_id: str, first: int, payloads: Sequence[bytes], *, owner: str | None = None
    ) -> bool:
        batch = pack_events(first, payloads)
        appended: bool = await self._writer.submit(_append, (project, response_id, batch, owner))
        return appended

    async def read_events(self, project: str, response_id: str, after: int) -> list[tuple[int, bytes]]:
        rows = await self._reader.submit(READ, (project, response_id, after))
        return [event for last, lines in rows for event in unpack_events(last, lines, after)]

    async def drop_events(self, project: str, response_id: str, *, owner: str | None = None) -> bool:
        dropped: bool = await self._writer.submit(_drop, (project, response_id, owner))
        return dropped


def append_batch(connection: sqlite3.Connection, project: str, response_id: str, batch: Batch) -> None:
    """Keep a batch behind those that are there."""
    if connection.execute(REACHED, (project, response_id, batch.first)).fetchone() is not None:
        raise ServerError(f"The event log of {response_id} already reaches number {batch.first}.")
    connection.execute(APPEND, (project, response_id, batch.last, batch.lines))


def _append(
    connection: sqlite3.Connection, project: str, response_id: str, batch: Batch | None, owner: str | None
) -> bool:
    if owner is None:
        welcome = connection.execute(STORED, (project, response_id)).fetchone() is not None
    else:
        welcome = is_held(connection, project, response_id, owner)
    if welcome and batch is not None:
        append_batch(connection, project, response_id, batch)
    return welcome


def _drop(connection: sqlite3.Connection, project: str, response_id: str, owner: str | None) -> bool:
    if owner is not None and connection.execute(UNWATCHED, (project, response_id, owner)).fetchone() is None:
        return False
    connection.execute(DROP, (project, response_id))
    return True
