"""The condition of a database: the errors that clients get, and one line in the log for each change."""

import logging
import os
import sqlite3
from pathlib import Path

from antiphon.errors import ServerError, StoreFull, StoreLost, StoreUnavailable
from antiphon.store.sqlite.files import DatabaseFiles

logger = logging.getLogger(__name__)

# Errors of the storage under the database. Others, such as a damaged row, affect single operations.
_STORAGE_ERRORS = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB)

FULL = "The store is full: there is no space left on its disk."
LOST = "The files of the store were deleted or replaced. Nothing can be stored until the server is restarted."
FAILED = "The store cannot be written to. See the server's log."


class StoreHealth:
    """The condition of a database. `failure` is the error of the last write, or None if it succeeded.

    Only the writer thread changes it. A store whose files are lost works again when the same files are back. A full
    disk counts as full until it has `min_free_bytes`, although small writes may succeed before.
    """

    def __init__(self, files: DatabaseFiles, *, min_free_bytes: int) -> None:
        self._files = files
        self._min_free_bytes = min_free_bytes
        self.failure: StoreUnavailable | None = None

    def check_before_write(self) -> None:
        """Raise StoreLost if the files cannot take a commit."""
        is_lost = isinstance(self.failure, StoreLost)
        if not is_lost and not self._files.is_check_due():
            return
        loss = self._files.find_damage()
        if loss is None and is_lost:
            loss = self._files.find_loss()
        if loss is not None:
            raise self.report_loss(loss)

    def check_after_write(self) -> None:
        """Raise StoreLost unless the data that was just committed is in the files at the path."""
        loss = self._files.find_loss()
        if loss is not None:
            raise self.report_loss(loss)
        if self.failure is not None:
            if isinstance(self.failure, StoreFull) and count_free_bytes(self._files.path) < self._min_free_bytes:
                return
            self.failure = None
            logger.warning("the store %s works again", self._files.path)

    def report_loss(self, loss: str) -> StoreLost:
        failure = StoreLost(LOST)
        self._change(failure, f"the store is lost, nothing can be stored: {loss}")
        return failure

    def report_error(self, error: Exception) -> None:
        """Record the failure of a whole batch."""
        loss = self._files.find_loss()
        if loss is not None:
            raise self.report_loss(loss) from None
        failure = describe_error(error)
        if isinstance(failure, StoreUnavailable):
            self._change(failure, f"the store {self._files.path} cannot be written to: {error}")

    def _change(self, failure: StoreUnavailable, message: str) -> None:
        if type(self.failure) is not type(failure):
            logger.error("%s", message)
        self.failure = failure


def describe_error(error: Exception) -> ServerError:
    """Return the error that a client gets for an error of SQLite. Its text has no names of tables and no paths."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(FULL)
    if code in _STORAGE_ERRORS:
        return StoreUnavailable(FAILED)
    failure = ServerError("The store failed.")
    failure.__cause__ = error  # for the log
    return failure


def check_disk(path: Path, *, min_free_bytes: int) -> None:
    """Raise StoreFull or StoreUnavailable if the disk has too little space or cannot be written to."""
    disk = os.statvfs(path.parent)
    if disk.f_flag & os.ST_RDONLY:
        raise StoreUnavailable("The disk of the store is mounted read-only.")
    if _count_free_bytes(disk) < min_free_bytes:
        raise StoreFull(FULL)


def count_free_bytes(path: Path) -> int:
    """Return the free space on the disk of a database."""
    return _count_free_bytes(os.statvfs(path.parent))


def _count_free_bytes(disk: os.statvfs_result) -> int:
    # Some space is reserved for the system administrator.
    return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)
