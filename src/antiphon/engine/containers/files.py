"""The files of containers: only on the disk of this machine, or in the store too, for several machines."""

import asyncio
import os
import secrets
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from antiphon.engine.containers.folders import ContainerFolders, FoundFile
from antiphon.engine.respond.ids import new_token, random_hex
from antiphon.errors import InvalidRequest
from antiphon.store.containers import ContainerFileRow, ContainerStore
from antiphon.store.files.content import READ_BYTES, Contents, ContentWriter, FileWriter, describe_os_error
from antiphon.tools.hosted.code_interpreter.sandbox import DATA_FOLDER

_MAX_NAME_BYTES = 200

SaveRow = Callable[[ContainerFileRow], Awaitable[None]]


class FileChanges(NamedTuple):
    """The files that code has written, and the ids of those that it has deleted."""

    saved: list[ContainerFileRow]
    deleted: list[str]


class ContainerFiles:
    """The contents of the files of all containers. `root` is a folder with one folder for each container."""

    def __init__(self, root: Path | None, *, max_files: int) -> None:
        self.folders = ContainerFolders(root)
        self._max_files = max_files

    async def create(self, container_id: str) -> None:
        await asyncio.to_thread(self.folders.create, container_id)

    async def delete(self, container_id: str) -> None:
        await asyncio.to_thread(self.folders.delete, container_id)

    async def close(self) -> None:
        await asyncio.to_thread(self.folders.close)

    async def _find_missing(self, container_id: str, paths: Iterable[str], found: Sequence[FoundFile]) -> set[str]:
        """Return the paths at which there is no file any more. `found` may not have all files."""
        missing = {*paths} - {file.path for file in found}
        if len(found) < self._max_files:
            return missing
        return missing - await asyncio.to_thread(self.folders.list_existing, container_id, missing)

    @abstractmethod
    async def start_writing(self, container_id: str) -> ContentWriter:
        """Return a writer for the content of a new file."""

    @abstractmethod
    async def add(self, project: str, row: ContainerFileRow, writer: ContentWriter, save: SaveRow) -> ContainerFileRow:
        """Add a file with the written content. `save` saves its row, or raises an error."""

    @abstractmethod
    async def open(self, row: ContainerFileRow) -> tuple[int, AsyncIterator[bytes]]:
        """Return the size of a file and the parts of its content. Raises OSError if it is missing."""

    @abstractmethod
    async def forget(self, row: ContainerFileRow) -> None:
        """Delete the content of a file whose row was deleted."""

    @abstractmethod
    async def prepare(self, project: str, container_id: str, rows: Sequence[ContainerFileRow]) -> None:
        """Copy the files to the disk of this machine, before code runs."""

    @abstractmethod
    async def collect(self, container_id: str, rows: Sequence[ContainerFileRow]) -> FileChanges:
        """Return the changes that code has made on the disk. `rows` are the rows as they are now."""

    def list_copies(self) -> list[tuple[str, str]]:
        """Return the projects and ids of the containers that this machine has copies of, if others use them too."""
        return []


class LocalContainerFiles(ContainerFiles):
    """Files on disk only. They are compared with their rows by time and size."""

    def __init__(self, store: ContainerStore, root: Path | None, *, max_files: int) -> None:
        super().__init__(root, max_files=max_files)
        self._store = store

    async def start_writing(self, container_id: str) -> ContentWriter:
        return await asyncio.to_thread(FileWriter, self.folders.locate(container_id))

    async def add(self, project: str, row: ContainerFileRow, writer: ContentWriter, save: SaveRow) -> ContainerFileRow:
        await save(row)
        try:
            await writer.commit(f"{DATA_FOLDER}/{row.path}")
        except BaseException:
            await self._store.update_container_files(project, row.container_id, saved=[], deleted=[row.id])
            raise
        modified_ns = await asyncio.to_thread(self.folders.find_time, row.container_id, row.path)
        row = msgspec.structs.replace(row, modified_ns=modified_ns)
        await self._store.update_container_files(project, row.container_id, saved=[row], deleted=[])
        return row

    async def open(self, row: ContainerFileRow) -> tuple[int, AsyncIterator[bytes]]:
        content = await asyncio.to_thread(self.folders.open_file, row.container_id, row.path)
        size = os.fstat(content.fileno()).st_size  # code may have changed the file since it was listed
        return size, read_parts(content, size)

    async def forget(self, row: ContainerFileRow) -> None:
        await asyncio.to_thread(self.folders.delete_file, row.container_id, row.path)

    async def prepare(self, project: str, container_id: str, rows: Sequence[ContainerFileRow]) -> None:
        pass

    async def collect(self, container_id: str, rows: Sequence[ContainerFileRow]) -> FileChanges:
        found = await asyncio.to_thread(self.folders.scan, container_id, limit=self._max_files)
        known = {row.path: row for row in rows}
        saved = [_make_row(container_id, file, known.get(file.path)) for file in found if _has_changed(file, known)]
        missing = await self._find_missing(container_id, known, found)
        # A file without a time is being written.
        deleted = [row.id for path, row in known.items() if path in missing and row.modified_ns]
        return FileChanges(saved, deleted)


class SharedContainerFiles(ContainerFiles):
    """Files whose contents are in the store, with a copy on the disk of each machine that runs code with them.

    The copies are in a temporary folder: a machine that starts again gets them from the store.
    """

    def __init__(self, open_contents: Callable[[], Awaitable[Contents]], *, max_files: int) -> None:
        super().__init__(None, max_files=max_files)
        self._open_contents = open_contents
        # By container and path: the content and the file that is its copy.
        self._copies: dict[str, dict[str, tuple[str | None, FoundFile]]] = {}
        self._projects: dict[str, str] = {}

    async def start_writing(self, container_id: str) -> ContentWriter:
        return await (await self._open_contents()).start_writing()

    async def add(self, project: str, row: ContainerFileRow, writer: ContentWriter, save: SaveRow) -> ContainerFileRow:
        row = msgspec.structs.replace(row, content=_make_content_id(row.id), modified_ns=time.time_ns())
        await writer.commit(row.content or "")
        try:
            await save(row)
        except BaseException:
            await (await self._open_contents()).delete([row.content or ""])
            raise
        return row

    async def open(self, row: ContainerFileRow) -> tuple[int, AsyncIterator[bytes]]:
        return row.bytes, (await self._open_contents()).read(row.content or "")

    async def forget(self, row: ContainerFileRow) -> None:
        """Do nothing: the store deletes the content with the row, and `prepare` deletes copies."""

    async def delete(self, container_id: str) -> None:
        self._copies.pop(container_id, None)
        self._projects.pop(container_id, None)
        await super().delete(container_id)

    async def prepare(self, project: str, container_id: str, rows: Sequence[ContainerFileRow]) -> None:
        await self.create(container_id)
        self._projects[container_id] = project
        copies = self._copies.setdefault(container_id, {})
        expected = {row.path: row for row in rows}
        found = await asyncio.to_thread(self.folders.scan, container_id, limit=10 * self._max_files)
        on_disk = {file.path: file for file in found}
        for path in on_disk.keys() - expected.keys():
            await asyncio.to_thread(self.folders.delete_file, container_id, path)
            copies.pop(path, None)
        contents = await self._open_contents()
        for path, row in expected.items():
            if copies.get(path) != (row.content, on_disk.get(path)):
                copies[path] = row.content, await self._copy(contents, row)

    async def _copy(self, contents: Contents, row: ContainerFileRow) -> FoundFile:
        """Write a file to the disk under another name, and rename it."""
        temporary = self.folders.locate(row.container_id) / f"new-{secrets.token_hex(16)}"
        try:
            await asyncio.to_thread(temporary.touch, mode=0o600, exist_ok=False)
            async for part in contents.read(row.content or ""):
                await asyncio.to_thread(_append, temporary, part)
            return await asyncio.to_thread(self.folders.move_file, temporary, row.container_id, row.path)
        except OSError as error:
            raise describe_os_error(error) from None
        finally:
            with suppress(FileNotFoundError):
                await asyncio.to_thread(temporary.unlink)

    async def collect(self, container_id: str, rows: Sequence[ContainerFileRow]) -> FileChanges:
        found = await asyncio.to_thread(self.folders.scan, container_id, limit=self._max_files)
        copies = self._copies.setdefault(container_id, {})
        known = {row.path: row for row in rows}
        changes = FileChanges([], [])
        for file in found:
            if file.path in copies and copies[file.path][1] == file:
                continue
            row = _make_row(container_id, file, known.get(file.path))
            content, size = await self._upload(row)
            changes.saved.append(msgspec.structs.replace(row, content=content, bytes=size))
            copies[file.path] = content, file
        for path in await self._find_missing(container_id, copies, found):
            former, _ = copies.pop(path)
            # The row of a file that was replaced meanwhile stays.
            if path in known and known[path].content == former:
                changes.deleted.append(known[path].id)
        return changes

    async def _upload(self, row: ContainerFileRow) -> tuple[str, int]:
        """Store the content of a file. Return its id and size."""
        source = await asyncio.to_thread(self.folders.open_file, row.container_id, row.path)
        content_id = _make_content_id(row.id)
        writer = await (await self._open_contents()).start_writing()
        try:
            async for part in read_parts(source, row.bytes):
                await writer.write(part)
            await writer.commit(content_id)
        except BaseException:
            writer.discard()
            raise
        return content_id, writer.size

    def list_copies(self) -> list[tuple[str, str]]:
        return [(project, container_id) for container_id, project in self._projects.items()]


async def read_parts(content: BinaryIO, size: int) -> AsyncIterator[bytes]:
    """Yield the first `size` bytes of a file, and close it."""
    try:
        while size > 0 and (part := await asyncio.to_thread(content.read, min(size, READ_BYTES))):
            size -= len(part)
            yield part
    finally:
        content.close()


def choose_path(filename: str, taken: set[str]) -> str:
    """Return the name under which an uploaded file is saved: its own, with a random prefix if that is taken.

    Raises InvalidRequest for a name that no file can have.
    """
    name = filename.replace("\\", "/").rpartition("/")[2]
    if (
        not name
        or name in (".", "..")
        or not name.isprintable()
        or len(name.encode(errors="replace")) > _MAX_NAME_BYTES
    ):
        raise InvalidRequest(
            f"'file': the file needs a name of printable characters, at most {_MAX_NAME_BYTES} bytes long.",
            param="file",
            code="invalid_value",
        )
    return f"{random_hex()[:8]}-{name}" if name in taken else name


def make_file_id() -> str:
    return f"cfile_{new_token()}"


def _make_content_id(file_id: str) -> str:
    return f"{file_id}-{secrets.token_hex(8)}"


def _append(path: Path, part: bytes) -> None:
    with path.open("ab") as file:
        file.write(part)


def _make_row(container_id: str, file: FoundFile, known: ContainerFileRow | None) -> ContainerFileRow:
    """Return the row of a file that code has written. A changed file keeps its id and its source."""
    return ContainerFileRow(
        id=make_file_id() if known is None else known.id,
        container_id=container_id,
        path=file.path,
        bytes=file.bytes,
        source="assistant" if known is None else known.source,
        created_at=file.modified_ns // 1_000_000_000 if known is None else known.created_at,
        modified_ns=file.modified_ns,
    )


def _has_changed(file: FoundFile, rows: dict[str, ContainerFileRow]) -> bool:
    known = rows.get(file.path)
    return known is None or (
        known.modified_ns != 0 and (known.bytes, known.modified_ns) != (file.bytes, file.modified_ns)
    )
