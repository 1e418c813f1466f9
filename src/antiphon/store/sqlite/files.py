"""The files of an open database, and the detection of their loss.

SQLite keeps using the files that it opened, even if they are deleted, moved or replaced. Its commits then succeed, but
nothing of them is found at the path after a restart. So the writer compares the files at the path with the files that
it opened. A check costs a few microseconds, and a commit more than 100.

Never open the database file or its `-shm` file here: closing them would release SQLite's locks on them.
"""

import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Interval of the checks that need not follow every commit.
CHECK_SECONDS = 0.05

_OPEN_FILES = Path("/proc/self/fd")
# The number of frames in the write-ahead log, in the header of the `-shm` file.
_FRAME_COUNT = struct.Struct("=I")
_FRAME_COUNT_OFFSET = 16
_WAL_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
# Number of checks until a log counts as too short: a checkpoint by another process may just have truncated it.
_SIZE_CHECKS = 3


class FileId(NamedTuple):
    device: int
    inode: int


class DatabaseFiles:
    """The database file, its write-ahead log and its `-shm` file, as they were when `record` was called.

    `wal_size` is the size of the write-ahead log at the last check. `is_damaged`: the content of a file was cut off, so
    that SQLite must not copy the log into the database any more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        # SQLite resolves symbolic links, and puts the other files beside the target.
        target = path.resolve()
        self._wal_path, self._shm_path = (target.with_name(f"{target.name}-{kind}") for kind in ("wal", "shm"))
        self._database = self._wal = self._shm = FileId(0, 0)
        # Text, because a path object is converted at every call.
        self._database_name, self._wal_name = str(self.path), str(self._wal_path)
        self._shm_name = str(self._shm_path)
        self._wal_file = self._shm_file = -1
        self._frame_bytes = 0
        self._next_check = 0.0
        self.wal_size = 0
        self.is_damaged = False

    def identify(self) -> FileId:
        """Return the identity of the file that is at the path now."""
        return _identify(self.path.stat())

    def record(self, database: FileId, *, page_size: int) -> None:
        """Remember the open files. `database` is the file that was at the path before it was opened.

        Raises OSError if the path has another file now.
        """
        if self.identify() != database:
            raise OSError(f"{self.path} was replaced while it was opened")
        self._database = database
        self._wal, self._shm = _identify(self._wal_path.stat()), _identify(self._shm_path.stat())
        self._frame_bytes = _FRAME_HEADER_BYTES + page_size
        # SQLite does not lock the log, so it may be opened and closed. All connections of a process share the other
        # file, which is open as long as any of them.
        self._wal_file = os.open(self._wal_path, os.O_RDONLY | os.O_CLOEXEC)
        self._shm_file = next(_find_open_files(self._shm_path), -1)

    def close(self) -> None:
        wal_file, self._wal_file = self._wal_file, -1
        if wal_file >= 0:
            os.close(wal_file)

    @property
    def can_be_closed(self) -> bool:
        """True if SQLite may close the files.

        It then copies the log into the database, and deletes the log by its name. Neither must happen if the log was
        cut off, or if the name belongs to the log of another process that has opened a new file.
        """
        return not self.is_damaged and all(
            _find_id(path) in (None, opened)
            for path, opened in ((self._wal_path, self._wal), (self._shm_path, self._shm))
        )

    def is_check_due(self) -> bool:
        """Return True if `find_damage` should be called before a commit: once in `CHECK_SECONDS`."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + CHECK_SECONDS
        return True

    def find_damage(self) -> str | None:
        """Return a message if the log was truncated, or if the `-shm` file is not the one that was opened."""
        is_short = self._is_too_short() and all(self._is_too_short() for _ in range(_SIZE_CHECKS - 1))
        if self.is_damaged or is_short or self._has_hole():
            self.is_damaged = True
            return f"{self._wal_path} was truncated"
        return self._find_shm_loss()

    def find_loss(self) -> str | None:
        """Return a message if a file at the path is not the one that was opened. Check this after a commit."""
        try:
            database, wal = os.stat(self._database_name), os.stat(self._wal_name)
        except FileNotFoundError as error:
            return f"{error.filename} was deleted or moved"
        except OSError as error:
            return f"{error.filename} cannot be read: {error.strerror}"
        if (database.st_dev, database.st_ino) != self._database:
            return f"{self.path} was replaced by another file"
        if (wal.st_dev, wal.st_ino) != self._wal:
            return f"{self._wal_path} was replaced by another file"
        if database.st_size == 0:
            self.is_damaged = True
            return f"{self.path} was truncated"
        self.wal_size = wal.st_size
        return None

    def _find_shm_loss(self) -> str | None:
        try:
            if _identify(os.stat(self._shm_name)) != self._shm:
                return f"{self._shm_path} was replaced by another file"
        except OSError:
            return f"{self._shm_path} was deleted or moved"
        return None

    def _is_too_short(self) -> bool:
        """Return True if the write-ahead log is shorter than SQLite expects. Only Linux has a way to find out."""
        if self._shm_file < 0:
            return False
        count = os.pread(self._shm_file, _FRAME_COUNT.size, _FRAME_COUNT_OFFSET)
        frames: int = _FRAME_COUNT.unpack(count)[0] if len(count) == _FRAME_COUNT.size else 0
        if not frames:
            return False
        # Read after the count: the log only grows, unless a checkpoint sets the count to 0 and truncates it.
        return os.fstat(self._wal_file).st_size < _WAL_HEADER_BYTES + frames * self._frame_bytes

    def _has_hole(self) -> bool:
        """Return True if the log was truncated before its last commit, which then left a hole."""
        if not hasattr(os, "SEEK_HOLE"):
            return False
        end = os.fstat(self._wal_file).st_size
        return end > 0 and os.lseek(self._wal_file, 0, os.SEEK_HOLE) < end


def _identify(found: os.stat_result) -> FileId:
    return FileId(found.st_dev, found.st_ino)


def _find_id(path: Path) -> FileId | None:
    try:
        return _identify(path.stat())
    except OSError:
        return None


def _find_open_files(path: Path) -> Iterator[int]:
    """Yield the descriptors with which this process has a file open. Only Linux has a list of them."""
    if not _OPEN_FILES.is_dir():
        return
    for link in _OPEN_FILES.iterdir():
        with suppress(OSError):  # closed meanwhile
            if link.readlink() == path:
                yield int(link.name)
