"""The operations on files."""

from collections.abc import AsyncIterator
from typing import NamedTuple

from antiphon.config.limits import FileLimits
from antiphon.engine.files.storage import FileStorage
from antiphon.engine.respond.ids import random_hex
from antiphon.errors import InvalidRequest, NotFound
from antiphon.protocol.files import File, FileForm
from antiphon.store.base import Order
from antiphon.store.files.content import ContentWriter
from antiphon.store.files.rows import FileRow

_BATCH_SECONDS = 30 * 24 * 3600
# The API does not return the contents of files with these purposes.
_PRIVATE_PURPOSES = frozenset({"assistants", "user_data"})


class FilePage(NamedTuple):
    """A page of a list of files. `has_more`: there are files after it."""

    files: list[File]
    has_more: bool


class Files:
    """The files of a storage."""

    def __init__(self, storage: FileStorage, limits: FileLimits) -> None:
        self._storage = storage
        self._limits = limits

    async def start_upload(self) -> ContentWriter:
        """Return a writer for the content of a new file. Raises StoreFull if the disk is full."""
        await self._storage.open()
        await self._storage.check_space(0)
        return await self._storage.contents.start_writing()

    async def create(self, project: str, writer: ContentWriter, filename: str, form: FileForm) -> File:
        """Store the written content as a new file."""
        database = await self._storage.open()
        seconds = None if form.expires_after is None else form.expires_after.seconds
        row = self.make_row(filename, writer.size, form.purpose, seconds)
        await writer.commit(row.id)
        try:
            await database.save_file(project, row, max_project_bytes=self._limits.max_project_bytes)
        except BaseException:
            await self._storage.contents.delete([row.id])
            raise
        return show_file(row)

    def make_row(self, filename: str, size: int, purpose: str, expires_seconds: int | None) -> FileRow:
        now = int(self._storage.now())
        seconds = expires_seconds or (_BATCH_SECONDS if purpose == "batch" else None)
        expires_at = None if seconds is None else now + seconds
        return FileRow(f"file-{random_hex()}", now, expires_at, filename, size, purpose)

    async def retrieve(self, project: str, file_id: str) -> File:
        return show_file(await self.find(project, file_id))

    async def list_page(
        self, project: str, *, purpose: str | None, after: str | None, limit: int, order: Order
    ) -> FilePage:
        database = await self._storage.open()
        rows, has_more = await database.list_files(project, purpose=purpose, after=after, limit=limit, order=order)
        return FilePage([show_file(row) for row in rows], has_more)

    async def delete(self, project: str, file_id: str) -> None:
        """Delete a file. It is removed from every vector store."""
        database = await self._storage.open()
        if not await database.delete_file(project, file_id):
            raise file_not_found(file_id)
        await self._storage.contents.delete([file_id])

    async def open_content(self, project: str, file_id: str) -> tuple[File, AsyncIterator[bytes]]:
        """Return a file and the parts of its content."""
        row = await self.find(project, file_id)
        if row.purpose in _PRIVATE_PURPOSES:
            raise InvalidRequest(f"Not allowed to download files of purpose: {row.purpose}")
        return show_file(row), self._storage.contents.read(row.id)

    async def open_for_tools(self, project: str, file_id: str, *, param: str) -> tuple[FileRow, AsyncIterator[bytes]]:
        """Return a file of any purpose and the parts of its content. They are not for clients."""
        row = await self.find(project, file_id, param=param)
        return row, self._storage.contents.read(row.id)

    async def find(self, project: str, file_id: str, *, param: str = "id") -> FileRow:
        """Return the row of a file. Raises NotFound with this param if there is none."""
        database = await self._storage.open()
        row = await database.load_file(project, file_id)
        if row is None:
            raise file_not_found(file_id, param=param)
        return row


def show_file(row: FileRow) -> File:
    return File(
        id=row.id,
        bytes=row.bytes,
        created_at=row.created_at,
        filename=row.filename,
        purpose=row.purpose,
        expires_at=row.expires_at,
    )


def file_not_found(file_id: str, *, param: str = "id") -> NotFound:
    error = NotFound(f"No such File object: {file_id}", param=param)
    error.code = None  # as in the API
    return error
