"""The event log in SQLite. A row has one batch of events; its key is the number of the last event."""

import sqlite3
from collections.abc import Sequence

from antiphon.errors import ServerError
from antiphon.store.record import DAMAGE, EventBatch, pack_events, report_damage, take_events
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
        batches = pack_events(first, payloads)
        appended: bool = await self._writer.submit(_append, (project, response_id, batches, owner))
        return appended

    async def read_events(
        self, project: str, response_id: str, after: int, *, max_bytes: int | None = None
    ) -> list[tuple[int, bytes]]:
        events: list[tuple[int, bytes]] = await self._reader.submit(_read, (project, response_id, after, max_bytes))
        return events

    async def drop_events(self, project: str, response_id: str, *, owner: str | None = None) -> bool:
        dropped: bool = await self._writer.submit(_drop, (project, response_id, owner))
        return dropped


def append_batches(
    connection: sqlite3.Connection, project: str, response_id: str, batches: Sequence[EventBatch]
) -> None:
    """Append consecutive batches. Raises ServerError if the log already reaches their first number."""
    if not batches:
        return
    first = batches[0].first
    if connection.execute(REACHED, (project, response_id, first)).fetchone() is not None:
        raise ServerError(f"The event log of {response_id} already reaches number {first}.")
    for batch in batches:
        connection.execute(APPEND, (project, response_id, batch.last, batch.lines))


def _read(
    connection: sqlite3.Connection, project: str, response_id: str, after: int, max_bytes: int | None
) -> list[tuple[int, bytes]]:
    try:
        return take_events(connection.execute(READ, (project, response_id, after)), after, max_bytes)
    except DAMAGE as error:
        raise report_damage(f"events of response {response_id}", error) from None


def _append(
    connection: sqlite3.Connection, project: str, response_id: str, batches: list[EventBatch], owner: str | None
) -> bool:
    if owner is None:
        is_allowed = connection.execute(STORED, (project, response_id)).fetchone() is not None
    else:
        is_allowed = is_owned(connection, project, response_id, owner)
    if is_allowed:
        append_batches(connection, project, response_id, batches)
    return is_allowed


def _drop(connection: sqlite3.Connection, project: str, response_id: str, owner: str | None) -> bool:
    if owner is not None and connection.execute(UNWATCHED, (project, response_id, owner)).fetchone() is None:
        return False
    connection.execute(DROP, (project, response_id))
    return True
