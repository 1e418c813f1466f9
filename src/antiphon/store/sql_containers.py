"""Containers and their files in a table, shared by the SQL stores."""

from collections.abc import Sequence
from typing import Any, Literal

from antiphon.errors import InvalidRequest
from antiphon.store.containers import ContainerFileRow, ContainerLimitReached, ContainerLimits, ContainerRow
from antiphon.store.sql_steps import Clock, Lock, SqlStep, StepDatabase, Steps, limit_time

_COLUMNS = "id, name, created_at, last_active_at, idle_seconds, memory_limit, interpreter, is_purged"
_FILE_COLUMNS = "id, container_id, path, bytes, source, created_at, modified_ns, origin, content"

CREATE = f"INSERT INTO containers (project, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
COUNT_LIVE = "SELECT count(*) FROM containers WHERE project = ? AND is_purged = 0 AND last_active_at + idle_seconds > ?"
LOAD = f"SELECT {_COLUMNS} FROM containers WHERE project = ? AND id = ?"
TOUCH = """
UPDATE containers SET last_active_at = CASE WHEN last_active_at > ? THEN last_active_at ELSE ? END
WHERE project = ? AND id = ? AND is_purged = 0 AND last_active_at + idle_seconds > ?
"""
LIST_ASCENDING = f"""
SELECT {_COLUMNS} FROM containers WHERE project = ? AND id > ? AND (CAST(? AS text) IS NULL OR name = ?)
ORDER BY id LIMIT ?
"""
LIST_DESCENDING = f"""
SELECT {_COLUMNS} FROM containers WHERE project = ? AND id < ? AND (CAST(? AS text) IS NULL OR name = ?)
ORDER BY id DESC LIMIT ?
"""
DELETE = "DELETE FROM containers WHERE project = ? AND id = ? RETURNING id"
DELETE_FILES = "DELETE FROM container_files WHERE project = ? AND container_id = ?"
LIST_EXPIRED = """
SELECT project, id FROM containers WHERE is_purged = 0 AND last_active_at <= ? AND last_active_at + idle_seconds <= ?
    AND (runner IS NULL OR running_until <= ?)
LIMIT ?
"""
LIST_INTERRUPTED = """
SELECT project, id FROM containers WHERE is_purged = 0 AND runner IS NOT NULL AND running_until <= ? LIMIT ?
"""
PURGE = "UPDATE containers SET is_purged = 1 WHERE project = ? AND id = ?"
DELETE_PURGED = "DELETE FROM containers WHERE is_purged = 1 AND last_active_at < ?"

COUNT_FILES = """
SELECT count(*), CAST(coalesce(sum(bytes), 0) AS bigint) FROM container_files
WHERE project = ? AND container_id = ? AND path <> ?
"""
SUM_OTHERS = """
SELECT CAST(coalesce(sum(bytes), 0) AS bigint) FROM container_files
WHERE project = ? AND NOT (container_id = ? AND path = ?)
"""
SUM_BYTES = "SELECT CAST(coalesce(sum(bytes), 0) AS bigint) FROM container_files WHERE project = ?"
REPLACE_FILE = "DELETE FROM container_files WHERE project = ? AND container_id = ? AND path = ?"
SAVE_FILE = f"INSERT INTO container_files (project, {_FILE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
DELETE_FILE = "DELETE FROM container_files WHERE project = ? AND container_id = ? AND id = ?"
LOAD_FILE = f"SELECT {_FILE_COLUMNS} FROM container_files WHERE project = ? AND container_id = ? AND id = ?"
LOAD_FILES = f"SELECT {_FILE_COLUMNS} FROM container_files WHERE project = ? AND container_id = ? ORDER BY id"
LIST_FILES_ASCENDING = f"""
SELECT {_FILE_COLUMNS} FROM container_files WHERE project = ? AND container_id = ? AND id > ? ORDER BY id LIMIT ?
"""
LIST_FILES_DESCENDING = f"""
SELECT {_FILE_COLUMNS} FROM container_files WHERE project = ? AND container_id = ? AND id < ? ORDER BY id DESC LIMIT ?
"""
HOLD = """
UPDATE containers SET runner = ?, running_until = ?
WHERE project = ? AND id = ? AND (runner IS NULL OR runner = ? OR running_until <= ?) RETURNING id
"""
FINISH_RUN = """
UPDATE containers SET runner = NULL, running_until = 0, interpreter = coalesce(?, interpreter)
WHERE project = ? AND id = ? AND runner = ? RETURNING id
"""
# Ids before the first and after the last one.
_FIRST, _LAST = "", "~"


class SqlContainers(StepDatabase):
    """Base of the classes that store containers by SQL."""

    is_shared = False

    async def create_container(self, project: str, row: ContainerRow, *, limits: ContainerLimits) -> None:
        await self._write(_create, project, row, limits.containers, int(self._now()))

    async def load_container(self, project: str, container_id: str) -> ContainerRow | None:
        return _first(await self._fetch(LOAD, (project, container_id)))

    async def touch_container(self, project: str, container_id: str) -> ContainerRow | None:
        return await self._write(_touch, project, container_id, int(self._now()))

    async def list_containers(
        self, project: str, *, after: str | None, limit: int, order: Literal["asc", "desc"], name: str | None
    ) -> tuple[list[ContainerRow], bool]:
        if after is not None and not await self._fetch(LOAD, (project, after)):
            raise _no_such_id(after)
        statement, bound = (LIST_ASCENDING, _FIRST) if order == "asc" else (LIST_DESCENDING, _LAST)
        rows = await self._fetch(statement, (project, after or bound, name, name, limit + 1))
        return [_make_row(row) for row in rows[:limit]], len(rows) > limit

    async def delete_container(self, project: str, container_id: str) -> bool:
        return await self._write(_delete, project, container_id)

    async def list_expired_containers(self, *, limit: int) -> list[tuple[str, str]]:
        return await self._read(_list_expired, self._now(), limit)

    async def list_interrupted_runs(self, *, seconds: float, limit: int) -> list[tuple[str, str]]:
        return await self._read(_list_interrupted, seconds, limit)

    async def purge_container(self, project: str, container_id: str) -> None:
        await self._write(_purge, project, container_id)

    async def delete_purged_containers(self, before: int) -> int:
        return await self._change(DELETE_PURGED, (await self._limit_time(before),))

    async def add_container_file(self, project: str, row: ContainerFileRow, *, limits: ContainerLimits) -> None:
        await self._write(_add_file, project, row, limits)

    async def update_container_files(
        self, project: str, container_id: str, *, saved: Sequence[ContainerFileRow], deleted: Sequence[str]
    ) -> None:
        await self._write(_update_files, project, container_id, saved, deleted)

    async def load_container_file(self, project: str, container_id: str, file_id: str) -> ContainerFileRow | None:
        rows = await self._fetch(LOAD_FILE, (project, container_id, file_id))
        return _make_file_row(rows[0]) if rows else None

    async def list_container_files(
        self, project: str, container_id: str, *, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> tuple[list[ContainerFileRow], bool]:
        if after is not None and not await self._fetch(LOAD_FILE, (project, container_id, after)):
            raise _no_such_id(after)
        statement, bound = (LIST_FILES_ASCENDING, _FIRST) if order == "asc" else (LIST_FILES_DESCENDING, _LAST)
        rows = await self._fetch(statement, (project, container_id, after or bound, limit + 1))
        return [_make_file_row(row) for row in rows[:limit]], len(rows) > limit

    async def load_container_files(self, project: str, container_id: str) -> list[ContainerFileRow]:
        return [_make_file_row(row) for row in await self._fetch(LOAD_FILES, (project, container_id))]

    async def sum_container_bytes(self, project: str) -> int:
        rows = await self._fetch(SUM_BYTES, (project,))
        return int(rows[0][0])

    async def hold_container(self, project: str, container_id: str, owner: str, *, lease: float) -> bool:
        return await self._write(_hold, project, container_id, owner, lease)

    async def finish_run(
        self,
        project: str,
        container_id: str,
        owner: str,
        *,
        interpreter: str | None,
        saved: Sequence[ContainerFileRow],
        deleted: Sequence[str],
    ) -> bool:
        return await self._write(
            _finish_run, project, container_id, owner, interpreter, saved, deleted, int(self._now())
        )


def _create(project: str, row: ContainerRow, limit: int, now: int) -> Steps[None]:
    yield _lock(project)
    ((live,),) = yield SqlStep(COUNT_LIVE, (project, now))
    if live >= limit:
        raise ContainerLimitReached("containers")
    values = (row.id, row.name, row.created_at, row.last_active_at, row.idle_seconds, row.memory_limit)
    yield SqlStep(CREATE, (project, *values, row.interpreter, int(row.is_purged)))


def _lock(project: str) -> Lock:
    return Lock(f"containers of {project}")


def _touch(project: str, container_id: str, now: int) -> Steps[ContainerRow | None]:
    yield SqlStep(TOUCH, (now, now, project, container_id, now))
    return _first((yield SqlStep(LOAD, (project, container_id))))


def _delete(project: str, container_id: str) -> Steps[bool]:
    # The row first: it is locked, so a run that ends meanwhile adds no files.
    deleted = yield SqlStep(DELETE, (project, container_id))
    yield SqlStep(DELETE_FILES, (project, container_id))
    return bool(deleted)


def _purge(project: str, container_id: str) -> Steps[None]:
    yield SqlStep(PURGE, (project, container_id))
    yield SqlStep(DELETE_FILES, (project, container_id))


def _list_expired(now: float, limit: int) -> Steps[list[tuple[str, str]]]:
    ((present,),) = yield Clock()
    before = limit_time(now, present - now)
    rows = yield SqlStep(LIST_EXPIRED, (before, before, present, limit))
    return [(project, container_id) for project, container_id in rows]


def _list_interrupted(seconds: float, limit: int) -> Steps[list[tuple[str, str]]]:
    ((now,),) = yield Clock()
    rows = yield SqlStep(LIST_INTERRUPTED, (now - seconds, limit))
    return [(project, container_id) for project, container_id in rows]


def _add_file(project: str, row: ContainerFileRow, limits: ContainerLimits) -> Steps[None]:
    yield _lock(project)
    ((count, size),) = yield SqlStep(COUNT_FILES, (project, row.container_id, row.path))
    if count >= limits.container_files:
        raise ContainerLimitReached("container_files")
    if size + row.bytes > limits.container_bytes:
        raise ContainerLimitReached("container_bytes")
    ((total,),) = yield SqlStep(SUM_OTHERS, (project, row.container_id, row.path))
    if total + row.bytes > limits.project_bytes:
        raise ContainerLimitReached("project_bytes")
    yield from _save_file(project, row)


def _update_files(
    project: str, container_id: str, saved: Sequence[ContainerFileRow], deleted: Sequence[str]
) -> Steps[None]:
    for file_id in deleted:
        yield SqlStep(DELETE_FILE, (project, container_id, file_id))
    for row in saved:
        yield from _save_file(project, row)


def _save_file(project: str, row: ContainerFileRow) -> Steps[None]:
    yield SqlStep(REPLACE_FILE, (project, row.container_id, row.path))
    yield SqlStep(SAVE_FILE, (project, *(getattr(row, name) for name in ContainerFileRow.__struct_fields__)))


def _hold(project: str, container_id: str, owner: str, lease: float) -> Steps[bool]:
    ((now,),) = yield Clock()
    return bool((yield SqlStep(HOLD, (owner, now + lease, project, container_id, owner, now))))


def _finish_run(
    project: str,
    container_id: str,
    owner: str,
    interpreter: str | None,
    saved: Sequence[ContainerFileRow],
    deleted: Sequence[str],
    now: int,
) -> Steps[bool]:
    if not (yield SqlStep(FINISH_RUN, (interpreter, project, container_id, owner))):
        return False
    yield from _update_files(project, container_id, saved, deleted)
    yield SqlStep(TOUCH, (now, now, project, container_id, now))
    return True


def _first(rows: Sequence[Sequence[Any]]) -> ContainerRow | None:
    return _make_row(rows[0]) if rows else None


def _make_row(values: Sequence[Any]) -> ContainerRow:
    *fields, is_purged = values
    return ContainerRow(**dict(zip(ContainerRow.__struct_fields__, fields, strict=False)), is_purged=bool(is_purged))


def _make_file_row(values: Sequence[Any]) -> ContainerFileRow:
    return ContainerFileRow(**dict(zip(ContainerFileRow.__struct_fields__, values, strict=True)))


def _no_such_id(after: str) -> InvalidRequest:
    return InvalidRequest(f"There is no object with the id '{after}'.", param="after", code="invalid_value")
