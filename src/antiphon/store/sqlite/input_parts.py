"""Reading of a part of a large value in SQLite."""

import sqlite3
from typing import Any

from antiphon.store.sqlite.database import Database

LOCATE = "SELECT rowid FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"


class SqliteInputParts(Database):
    """The part of the store that reads a part of an input without the rest. SQL would read all of it first."""

    async def _read_input_part(self, project: str, response_id: str, start: int, size: int) -> list[Any]:
        rows: list[Any] = await self._reader.submit(_read_part, (project, response_id, int(self._now()), start, size))
        return rows


def _read_part(
    connection: sqlite3.Connection, project: str, response_id: str, now: int, start: int, size: int
) -> list[tuple[bytes]]:
    row = connection.execute(LOCATE, (project, response_id, now)).fetchone()
    if row is None:
        return []
    with connection.blobopen("responses", "input", row[0], readonly=True) as blob:
        blob.seek(start)
        return [(blob.read(size),)]
