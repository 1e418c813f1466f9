"""Reading of the event log in SQLite."""

import sqlite3

from antiphon.store.event_batches import take_events
from antiphon.store.record import DAMAGE, report_damage
from antiphon.store.sqlite.database import Database

# The cast is for damaged rows, which may contain a value of another type.
READ = "SELECT last, CAST(lines AS BLOB) FROM events WHERE project = ? AND response_id = ? AND last > ? ORDER BY last"


class SqliteEventLog(Database):
    async def read_events(
        self, project: str, response_id: str, after: int, *, max_bytes: int | None = None
    ) -> list[tuple[int, bytes]]:
        events: list[tuple[int, bytes]] = await self._reader.submit(_read, (project, response_id, after, max_bytes))
        return events


def _read(
    connection: sqlite3.Connection, project: str, response_id: str, after: int, max_bytes: int | None
) -> list[tuple[int, bytes]]:
    try:
        # No row is read after the last one that fits.
        return take_events(connection.execute(READ, (project, response_id, after)), after, max_bytes)
    except DAMAGE as error:
        raise report_damage(f"events of response {response_id}", error) from None
