"""The event log in SQLite. A row has one batch of events; its key is the number of the last event."""

import sqlite3
from collections.abc import Sequence

from antiphon.errors import ServerError
from antiphon.store.record import EventBatch, pack_events, unpack_events
from antiphon.store.sqlite.database import Database
from antiphon.store.sqlite.leases import is_owned

STORED = "SELECT 1 FROM responses WHERE project = ? AND id = ?"

REACHED = "SELECT 1 FROM events WHERE project = ? AND response_id = ? AND last >= ? LIMIT 1"

APPEND = "INSERT INTO events (project, response_id, last, lines) VALUES (?, ?, ?, ?)"

# The cast is for damaged rows, which may contain a value of another type.
READ = "SELECT last, CAST(lines AS BLOB) FROM events WHERE project = ? AND response_id = ? AND last > ? ORDER BY last"

UNWATCHED = "SELECT 1 FROM runs WHERE project = ? AND response_id = ? AND owner = ? AND NOT watched"

DROP = "DELETE FROM events WHERE project = ? AND response_id = ?"


class SqliteEventLog(Database):
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


def append_batch(connection: sqlite3.Connection, project: str, response_id: str, batch: EventBatch) -> None:
    """Append a batch. Raises ServerError if the log already reaches its first number."""
    if connection.execute(REACHED, (project, response_id, batch.first)).fetchone() is not None:
        raise ServerError(f"The event log of {response_id} already reaches number {batch.first}.")
    connection.execute(APPEND, (project, response_id, batch.last, batch.lines))


def _append(
    connection: sqlite3.Connection, project: str, response_id: str, batch: EventBatch | None, owner: str | None
) -> bool:
    if owner is None:
        is_allowed = connection.execute(STORED, (project, response_id)).fetchone() is not None
    else:
        is_allowed = is_owned(connection, project, response_id, owner)
    if is_allowed and batch is not None:
        append_batch(connection, project, response_id, batch)
    return is_allowed


def _drop(connection: sqlite3.Connection, project: str, response_id: str, owner: str | None) -> bool:
    if owner is not None and connection.execute(UNWATCHED, (project, response_id, owner)).fetchone() is None:
        return False
    connection.execute(DROP, (project, response_id))
    return True
