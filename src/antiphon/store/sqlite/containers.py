"""Containers and their files in the SQLite store."""

import sqlite3
from collections.abc import Sequence
from typing import Any, Literal

from antiphon.errors import InvalidRequest
from antiphon.store.containers import ContainerFileRow, ContainerLimitReached, ContainerLimits, ContainerRow
from antiphon.store.sqlite.database import Database

_COLUMNS = "id, name, created_at, last_active_at, idle_seconds, memory_limit, interpreter, is_purged"
_FILE_COLUMNS = "id, container_id, path, bytes, source, created_at, modified_ns, origin"

CREATE = f"INSERT INTO containers (project, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
COUNT_LIVE = "SELECT count(*) FROM containers WHERE project = ? AND NOT is_purged AND last_active_at + idle_seconds > ?"
LOAD = f"SELECT {_COLUMNS} FROM containers WHERE project = ? AND id = ?"
TOUCH = """
UPDATE containers SET last_active_at = max(last_active_at, ?)
WHERE project = ? AND id = ? AND NOT is_purged AND last_active_at + idle_seconds > ?
"""
SET_INTERPRETER = "UPDATE containers SET interpreter = ? WHERE project = ? AND id = ?"
LIST_ASCENDING = f"""
SELECT {_COLUMNS} FROM containers WHERE project = ? AND id > ? AND (? IS NULL OR name = ?) ORDER BY id LIMIT ?
"""
LIST_DESCENDING = f"""
SELECT {_COLUMNS} FROM containers WHERE project = ? AND id < ? AND (? IS NULL OR name = ?) ORDER BY id DESC LIMIT ?
"""
DELETE = "DELETE FROM containers WHERE project = ? AND id = ?"
DELETE_FILES = "DELETE FROM container_files WHERE project = ? AND container_id = ?"
LIST_EXPIRED = """
SELECT project, id FROM containers WHERE is_purged = 0 AND last_active_at <= ? AND last_active_at + idle_seconds <= ?
LIMIT ?
"""
PURGE = "UPDATE containers SET is_purged = 1 WHERE project = ? AND id = ?"
DELETE_PURGED = "DELETE FROM containers WHERE is_purged = 1 AND last_active_at < ?"

COUNT_FILES = """
SELECT count(*), coalesce(sum(bytes), 0) FROM container_files WHERE project = ? AND container_id = ? AND path <> ?
"""
SUM_OTHERS = """
SELECT coalesce(sum(bytes), 0) FROM container_files WHERE project = ? AND NOT (container_id = ? AND path = ?)
"""
SUM_BYTES = "SELECT coalesce(sum(bytes), 0) FROM container_files WHERE project = ?"
REPLACE_FILE = "DELETE FROM container_files WHERE project = ? AND container_id = ? AND path = ?"
SAVE_FILE = f"INSERT INTO container_files (project, {_FILE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
DELETE_FILE = "DELETE FROM container_files WHERE project = ? AND container_id = ? AND id = ?"
LOAD_FILE = f"SELECT {_FILE_COLUMNS} FROM container_files WHERE project = ? AND container_id = ? AND id = ?"
LOAD_FILES = f"SELECT {_FILE_COLUMNS} FROM container_files WHERE project = ? AND container_id = ? ORDER BY id"
LIST_FILES_ASCENDING = f"""
SELECT {_FILE_COLUMNS} FROM container_files WHERE project = ? AND container_id = ? AND id > ? ORDER BY id LIMIT ?
"""
LIST_FILES_DESCENDING = f"""
SELECT {_FILE_COLUMNS} FROM container_files WHERE project = ? AND container_id = ? AND id < ? ORDER BY id DESC LIMIT ?
"""
# Ids before the first and after the last one.
_FIRST, _LAST = "", "~"


class SqliteContainers(Database):
    async def create_container(self, project: str, row: ContainerRow, *, limits: ContainerLimits) -> None:
        await self._writer.submit(_create, (project, row, limits.containers, self._now()))

    async def load_container(self, project: str, container_id: str) -> ContainerRow | None:
        return _first(await self._reader.submit(LOAD, (project, container_id)))

    async def touch_container(self, project: str, container_id: str) -> ContainerRow | None:
        row: ContainerRow | None = await self._writer.submit(_touch, (project, container_id, int(self._now())))
        return row

    async def set_interpreter(self, project: str, container_id: str, interpreter: str) -> None:
        await self._writer.submit(SET_INTERPRETER, (interpreter, project, container_id))

    async def list_containers(
        self, project: str, *, after: str | None, limit: int, order: Literal["asc", "desc"], name: str | None
    ) -> tuple[list[ContainerRow], bool]:
        if after is not None and not await self._reader.submit(LOAD, (project, after)):
            raise _no_such_id(after)
        statement, bound = (LIST_ASCENDING, _FIRST) if order == "asc" else (LIST_DESCENDING, _LAST)
        rows = await self._reader.submit(statement, (project, after or bound, name, name, limit + 1))
        return [_make_row(row) for row in rows[:limit]], len(rows) > limit

    async def delete_container(self, project: str, container_id: str) -> bool:
        deleted: bool = await self._writer.submit(_delete, (project, container_id))
        return deleted

    async def list_expired_containers(self, *, limit: int) -> list[tuple[str, str]]:
        rows = await self._reader.submit(LIST_EXPIRED, (int(self._now()), int(self._now()), limit))
        return [(project, container_id) for project, container_id in rows]

    async def purge_container(self, project: str, container_id: str) -> None:
        await self._writer.submit(_purge, (project, container_id))

    async def delete_purged_containers(self, before: int) -> int:
        deleted: int = await self._writer.submit(DELETE_PURGED, (before,))
        return deleted

    async def add_container_file(self, project: str, row: ContainerFileRow, *, limits: ContainerLimits) -> None:
        await self._writer.submit(_add_file, (project, row, limits))

    async def update_container_files(
        self, project: str, container_id: str, *, saved: Sequence[ContainerFileRow], deleted: Sequence[str]
    ) -> None:
        await self._writer.submit(_update_files, (project, container_id, saved, deleted))

    async def load_container_file(self, project: str, container_id: str, file_id: str) -> ContainerFileRow | None:
        rows = await self._reader.submit(LOAD_FILE, (project, container_id, file_id))
        return _make_file_row(rows[0]) if rows else None

    async def list_container_files(
        self, project: str, container_id: str, *, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> tuple[list[ContainerFileRow], bool]:
        if after is not None and not await self._reader.submit(LOAD_FILE, (project, container_id, after)):
            raise _no_such_id(after)
        statement, bound = (LIST_FILES_ASCENDING, _FIRST) if order == "asc" else (LIST_FILES_DESCENDING, _LAST)
        rows = await self._reader.submit(statement, (project, container_id, after or bound, limit + 1))
        return [_make_file_row(row) for row in rows[:limit]], len(rows) > limit

    async def load_container_files(self, project: str, container_id: str) -> list[ContainerFileRow]:
        return [_make_file_row(row) for row in await self._reader.submit(LOAD_FILES, (project, container_id))]

    async def sum_container_bytes(self, project: str) -> int:
        rows = await self._reader.submit(SUM_BYTES, (project,))
        return int(rows[0][0])


def _create(connection: sqlite3.Connection, project: str, row: ContainerRow, limit: int, now: float) -> None:
    (live,) = connection.execute(COUNT_LIVE, (project, now)).fetchone()
    if live >= limit:
        raise ContainerLimitReached("containers")
    values = (row.id, row.name, row.created_at, row.last_active_at, row.idle_seconds, row.memory_limit)
    connection.execute(CREATE, (project, *values, row.interpreter, row.is_purged))


def _touch(connection: sqlite3.Connection, project: str, container_id: str, now: int) -> ContainerRow | None:
    connection.execute(TOUCH, (now, project, container_id, now))
    return _first(connection.execute(LOAD, (project, container_id)).fetchall())


def _delete(connection: sqlite3.Connection, project: str, container_id: str) -> bool:
    connection.execute(DELETE_FILES, (project, container_id))
    return connection.execute(DELETE, (project, container_id)).rowcount > 0


def _purge(connection: sqlite3.Connection, project: str, container_id: str) -> None:
    connection.execute(DELETE_FILES, (project, container_id))
    connection.execute(PURGE, (project, container_id))


def _add_file(connection: sqlite3.Connection, project: str, row: ContainerFileRow, limits: ContainerLimits) -> None:
    count, size = connection.execute(COUNT_FILES, (project, row.container_id, row.path)).fetchone()
    if count >= limits.container_files:
        raise ContainerLimitReached("container_files")
    if size + row.bytes > limits.container_bytes:
        raise ContainerLimitReached("container_bytes")
    (total,) = connection.execute(SUM_OTHERS, (project, row.container_id, row.path)).fetchone()
    if total + row.bytes > limits.project_bytes:
        raise ContainerLimitReached("project_bytes")
    _save_file(connection, project, row)


def _update_files(
    connection: sqlite3.Connection,
    project: str,
    container_id: str,
    saved: Sequence[ContainerFileRow],
    deleted: Sequence[str],
) -> None:
    connection.executemany(DELETE_FILE, [(project, container_id, file_id) for file_id in deleted])
    for row in saved:
        _save_file(connection, project, row)


def _save_file(connection: sqlite3.Connection, project: str, row: ContainerFileRow) -> None:
    connection.execute(REPLACE_FILE, (project, row.container_id, row.path))
    connection.execute(SAVE_FILE, (project, *(getattr(row, name) for name in ContainerFileRow.__struct_fields__)))


def _first(rows: Sequence[Sequence[Any]]) -> ContainerRow | None:
    return _make_row(rows[0]) if rows else None


def _make_row(values: Sequence[Any]) -> ContainerRow:
    *fields, is_purged = values
    return ContainerRow(**dict(zip(ContainerRow.__struct_fields__, fields, strict=False)), is_purged=bool(is_purged))


def _make_file_row(values: Sequence[Any]) -> ContainerFileRow:
    return ContainerFileRow(**dict(zip(ContainerFileRow.__struct_fields__, values, strict=True)))


def _no_such_id(after: str) -> InvalidRequest:
    return InvalidRequest(f"There is no object with the id '{after}'.", param="after", code="invalid_value")
