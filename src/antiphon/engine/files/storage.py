"""The storage of files: their contents on disk, and the database of files and vector stores."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from antiphon.errors import StoreFull, Unavailable
from antiphon.store.files.content import ContentFolder
from antiphon.store.files.database import FileDatabase, locate_database
from antiphon.store.limits import DEFAULT_LIMITS, StoreLimits


class FileStorage:
    """The folder of files. It is opened at the first use, because most servers have no files.

    Without a folder, files are in a temporary one, which is deleted at the end.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        limits: StoreLimits = DEFAULT_LIMITS,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self.now = now
        self._opening = asyncio.Lock()
        self._contents: ContentFolder | None = None
        self._database: FileDatabase | None = None
        self._is_closed = False

    def exists(self) -> bool:
        """Return True if an earlier process has stored files in the folder."""
        return self._folder is not None and locate_database(self._folder).exists()

    @property
    def is_open(self) -> bool:
        return self._database is not None

    async def open(self) -> FileDatabase:
        """Return the database. The first call opens it."""
        if self._database is not None:
            return self._database
        async with self._opening:
            if self._database is None:
                if self._is_closed:
                    raise Unavailable("The server is shutting down.")
                contents = await asyncio.to_thread(_open_folder, self._folder)
                database = FileDatabase(locate_database(contents.path), now=self.now, limits=self._limits)
                await database.open()
                self._contents, self._database = contents, database
        return self._database

    @property
    def contents(self) -> ContentFolder:
        """The contents. `open` must have been called."""
        assert self._contents is not None, "the storage of files is not open"
        return self._contents

    def check_space(self, size: int) -> None:
        """Raise StoreFull if the disk has no room for a content of this size."""
        if self.contents.count_free_bytes() - size < self._limits.min_free_bytes:
            raise StoreFull("The disk of the server is full.")

    async def close(self) -> None:
        async with self._opening:
            self._is_closed = True
            database, self._database = self._database, None
            if database is not None:
                await database.close()
                await asyncio.to_thread(self.contents.close)


def _open_folder(path: Path | None) -> ContentFolder:
    folder = ContentFolder(path)
    folder.create()
    return folder
