"""The location of the files of a server, and the opening of their database and contents."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from antiphon.store.limits import StoreLimits

if TYPE_CHECKING:
    from antiphon.store.files.content import ContentFolder, Contents
    from antiphon.store.files.database import FileDatabase

DATABASE_NAME = "files.db"


@runtime_checkable
class SharedFileStore(Protocol):
    """A store whose database has the files, too, of all machines that use it."""

    async def has_files(self) -> bool:
        """Return True if any project has a file or a vector store."""


class FileLocation(NamedTuple):
    """The location of files.

    With `url`, it is a PostgreSQL database, which also has the contents unless a `folder` is given for them. Without
    it, the database and the contents are in the folder. Without a folder either, they are in a temporary one.
    """

    folder: Path | None = None
    url: str | None = None

    def exists(self) -> bool:
        """Return True if an earlier process, or one on another machine, may have stored files here."""
        return self.url is not None or (self.folder is not None and (self.folder / DATABASE_NAME).exists())

    async def open(self, *, now: Callable[[], float] | None, limits: StoreLimits) -> "tuple[FileDatabase, Contents]":
        if self.url is not None:
            return await self._open_postgres(self.url, now=now, limits=limits)
        from antiphon.store.files.sqlite import SqliteFileDatabase

        folder = await asyncio.to_thread(_open_folder, self.folder)
        database = SqliteFileDatabase(folder.path / DATABASE_NAME, now=now or time.time, limits=limits)
        await database.open()
        return database, folder

    async def _open_postgres(
        self, url: str, *, now: Callable[[], float] | None, limits: StoreLimits
    ) -> "tuple[FileDatabase, Contents]":
        from antiphon.store.postgres.files import PostgresFileDatabase

        # First the folder: if it cannot be opened, no connections remain.
        folder = None if self.folder is None else await asyncio.to_thread(_open_folder, self.folder)
        database = PostgresFileDatabase(url, now=now, limits=limits)
        await database.open()
        return database, folder or database.contents


TEMPORARY = FileLocation()


def _open_folder(path: Path | None) -> "ContentFolder":
    from antiphon.store.files.content import ContentFolder

    folder = ContentFolder(path)
    folder.create()
    return folder
