"""The storage of files: their contents, and the database of files and vector stores."""

import asyncio
import errno
import logging
import sqlite3
import time
from collections.abc import Callable

from antiphon.errors import ConfigError, StoreFull, StoreUnavailable, Unavailable
from antiphon.store.files.content import FULL, Contents
from antiphon.store.files.database import FileDatabase
from antiphon.store.files.location import FileLocation
from antiphon.store.limits import DEFAULT_LIMITS, StoreLimits

logger = logging.getLogger(__name__)


class FileStorage:
    """The files of a server. Their location is opened at the first use, because most servers have no files."""

    def __init__(
        self,
        location: FileLocation,
        *,
        limits: StoreLimits = DEFAULT_LIMITS,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._location = location
        self._limits = limits
        self._clock = now
        self.now = now or time.time
        self._opening = asyncio.Lock()
        self._contents: Contents | None = None
        self._database: FileDatabase | None = None
        self._is_closed = False
        self._logged_failure = ""

    def exists(self) -> bool:
        """Return True if an earlier process, or another one, may have stored files."""
        return self._location.exists()

    @property
    def is_shared(self) -> bool:
        """True if several machines can use the files."""
        return self._location.url is not None

    @property
    def is_open(self) -> bool:
        return self._database is not None

    async def open(self) -> FileDatabase:
        """Return the database. The first call opens it. Raises StoreUnavailable if that is not possible now."""
        if self._database is not None:
            return self._database
        async with self._opening:
            if self._database is None:
                if self._is_closed:
                    raise Unavailable("The server is shutting down.")
                self._database, self._contents = await self._open()
        return self._database

    async def _open(self) -> tuple[FileDatabase, Contents]:
        try:
            opened = await self._location.open(now=self._clock, limits=self._limits)
        except (ConfigError, OSError) as error:
            # The text of the error is for the log only, because it has paths. An OSError is one of the folder.
            part = "folder" if isinstance(error, OSError) else "database"
            if str(error) != self._logged_failure:
                self._logged_failure = str(error)
                logger.error("the %s of files cannot be opened: %s", part, error)
            raise self._describe_failure(error, part) from None
        self._logged_failure = ""
        return opened

    def _describe_failure(self, error: ConfigError | OSError, part: str) -> StoreUnavailable:
        """Return the error that a client gets."""
        if self.is_shared and part == "database":  # that of the store, which the server could open at its start
            return StoreUnavailable("The database of the store cannot be reached.", retry_after=1.0)
        if _is_disk_full(error) or _is_disk_full(error.__cause__):
            return StoreFull(FULL)
        return StoreUnavailable(f"The {part} of files cannot be opened. See the server's log.")

    @property
    def contents(self) -> Contents:
        """The contents. `open` must have been called."""
        assert self._contents is not None, "the storage of files is not open"
        return self._contents

    async def check_space(self, size: int) -> None:
        """Raise StoreFull if there is no room for a content of this size."""
        await self.contents.check_space(size, min_free_bytes=self._limits.min_free_bytes)

    async def close(self) -> None:
        async with self._opening:
            self._is_closed = True
            database, self._database = self._database, None
            if database is not None:
                await database.close()
                await self.contents.close()


def _is_disk_full(error: BaseException | None) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
