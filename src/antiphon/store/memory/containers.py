"""Containers and their files in the memory store."""

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from antiphon.errors import InvalidRequest
from antiphon.store.containers import ContainerFileRow, ContainerLimitReached, ContainerLimits, ContainerRow
from antiphon.store.memory.tables import Key, MemoryTables

Row = TypeVar("Row", ContainerRow, ContainerFileRow)


class MemoryContainers(MemoryTables):
    is_shared = False

    async def create_container(self, project: str, row: ContainerRow, *, limits: ContainerLimits) -> None:
        now = self._now()
        live = (not other.has_expired(now) for (owner, _), other in self._tables.containers.items() if owner == project)
        if sum(live) >= limits.containers:
            raise ContainerLimitReached("containers")
        self._tables.containers[project, row.id] = row

    async def load_container(self, project: str, container_id: str) -> ContainerRow | None:
        return self._tables.containers.get((project, container_id))

    async def touch_container(self, project: str, container_id: str) -> ContainerRow | None:
        row = self._tables.containers.get((project, container_id))
        now = int(self._now())
        if row is not None and not row.has_expired(now):
            row = msgspec.structs.replace(row, last_active_at=max(now, row.last_active_at))
            self._tables.containers[project, container_id] = row
        return row

    async def list_containers(
        self, project: str, *, after: str | None, limit: int, order: Literal["asc", "desc"], name: str | None
    ) -> tuple[list[ContainerRow], bool]:
        own = (row for (owner, _), row in self._tables.containers.items() if owner == project)
        rows = sorted(own, key=lambda row: row.id)
        following = _list_following(rows, after, order)
        named = [row for row in following if name is None or row.name == name]
        return named[:limit], len(named) > limit

    async def delete_container(self, project: str, container_id: str) -> bool:
        self._tables.container_files.pop((project, container_id), None)
        self._tables.container_runs.pop((project, container_id), None)
        return self._tables.containers.pop((project, container_id), None) is not None

    async def list_expired_containers(self, *, limit: int) -> list[tuple[str, str]]:
        now = int(self._now())
        rows = self._tables.containers.items()
        expired = [key for key, row in rows if not row.is_purged and row.has_expired(now)]
        runs = self._tables.container_runs
        return [key for key in expired if key not in runs or runs[key][1] <= self._now()][:limit]

    async def list_interrupted_runs(self, *, seconds: float, limit: int) -> list[tuple[str, str]]:
        before, rows = self._now() - seconds, self._tables.containers
        runs = self._tables.container_runs.items()
        return [key for key, (_, until) in runs if until <= before and not rows[key].is_purged][:limit]

    async def purge_container(self, project: str, container_id: str) -> None:
        self._tables.container_files.pop((project, container_id), None)
        self._replace((project, container_id), is_purged=True)

    async def delete_purged_containers(self, before: int) -> int:
        rows = self._tables.containers.items()
        old = [key for key, row in rows if row.is_purged and row.last_active_at < before]
        for key in old:
            del self._tables.containers[key]
            self._tables.container_runs.pop(key, None)
        return len(old)

    async def add_container_file(self, project: str, row: ContainerFileRow, *, limits: ContainerLimits) -> None:
        key = (project, row.container_id)
        others = [file for file in self._tables.container_files.get(key, {}).values() if file.path != row.path]
        if len(others) >= limits.container_files:
            raise ContainerLimitReached("container_files")
        own_bytes = sum(file.bytes for file in others) + row.bytes
        if own_bytes > limits.container_bytes:
            raise ContainerLimitReached("container_bytes")
        replaced = self._tables.container_files.get(key, {}).get(row.path)
        total = await self.sum_container_bytes(project) - (0 if replaced is None else replaced.bytes)
        if total + row.bytes > limits.project_bytes:
            raise ContainerLimitReached("project_bytes")
        self._save_file(key, row)

    async def update_container_files(
        self, project: str, container_id: str, *, saved: Sequence[ContainerFileRow], deleted: Sequence[str]
    ) -> None:
        key = (project, container_id)
        files = self._tables.container_files.get(key, {})
        for path in [path for path, file in files.items() if file.id in deleted]:
            del files[path]
        for row in saved:
            self._save_file(key, row)

    async def load_container_file(self, project: str, container_id: str, file_id: str) -> ContainerFileRow | None:
        files = self._tables.container_files.get((project, container_id), {})
        return next((file for file in files.values() if file.id == file_id), None)

    async def list_container_files(
        self, project: str, container_id: str, *, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> tuple[list[ContainerFileRow], bool]:
        rows = _list_following(await self.load_container_files(project, container_id), after, order)
        return rows[:limit], len(rows) > limit

    async def load_container_files(self, project: str, container_id: str) -> list[ContainerFileRow]:
        files = self._tables.container_files.get((project, container_id), {})
        return sorted(files.values(), key=lambda row: row.id)

    async def sum_container_bytes(self, project: str) -> int:
        tables = self._tables.container_files.items()
        return sum(file.bytes for key, files in tables if key[0] == project for file in files.values())

    async def hold_container(self, project: str, container_id: str, owner: str, *, lease: float) -> bool:
        holder = self._tables.container_runs.get((project, container_id))
        if (project, container_id) not in self._tables.containers:
            return False
        if holder is not None and holder[0] != owner and holder[1] > self._now():
            return False
        self._tables.container_runs[project, container_id] = (owner, self._now() + lease)
        return True

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
        key = (project, container_id)
        if self._tables.container_runs.get(key, ("",))[0] != owner or key not in self._tables.containers:
            return False
        del self._tables.container_runs[key]
        if interpreter is not None:
            self._replace(key, interpreter=interpreter)
        await self.update_container_files(project, container_id, saved=saved, deleted=deleted)
        await self.touch_container(project, container_id)
        return True

    def _save_file(self, key: Key, row: ContainerFileRow) -> None:
        """Save a file. It replaces one of the same path."""
        self._tables.container_files.setdefault(key, {})[row.path] = row

    def _replace(self, key: Key, **fields: object) -> None:
        row = self._tables.containers.get(key)
        if row is not None:
            self._tables.containers[key] = msgspec.structs.replace(row, **fields)


def _list_following(rows: list[Row], after: str | None, order: Literal["asc", "desc"]) -> list[Row]:
    ordered = rows if order == "asc" else rows[::-1]
    if after is None:
        return ordered
    index = next((index for index, row in enumerate(ordered) if row.id == after), None)
    if index is None:
        raise InvalidRequest(f"There is no object with the id '{after}'.", param="after", code="invalid_value")
    return ordered[index + 1 :]
