"""The file system of a sandbox: a folder of the server, within limits.

The methods get normalized, absolute paths, in which "/" is the folder itself, and raise OSError. The code in a sandbox
has no way to make links. A link that is in the folder for another reason does not exist for it.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["file", "dir"]

_MAX_DEPTH = 32


class Status(NamedTuple):
    """The kind, size and time of a file or folder."""

    kind: Kind
    size: int
    mtime_ns: int


class LimitedFolder:
    """A folder on disk. The sizes of its files and the number of its entries are limited.

    A new version of a file is written beside the folder and then takes the place of the old one.
    """

    def __init__(self, folder: Path, *, max_bytes: int, max_entries: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._bytes = self._entries = 0
        self.measure(max_bytes)

    def measure(self, max_bytes: int) -> None:
        """Count the files again, and set a new limit. The server may have changed the files since the last job."""
        self._max_bytes = max_bytes
        self._bytes = self._entries = 0
        for entry in _walk(self._folder):
            self._entries += 1
            if entry.is_file(follow_symlinks=False):
                self._bytes += entry.stat(follow_symlinks=False).st_size

    def stat(self, path: str) -> Status:
        found = self._find(path)
        if stat.S_ISDIR(found.st_mode):
            return Status("dir", 0, max(0, found.st_mtime_ns))
        return Status("file", found.st_size, max(0, found.st_mtime_ns))

    def list(self, path: str) -> list[tuple[str, Kind]]:
        if not stat.S_ISDIR(self._find(path).st_mode):
            raise _make_error(errno.ENOTDIR)
        with os.scandir(self._locate(path)) as entries:
            return sorted(_list_kinds(entries))

    def read(self, path: str) -> bytes:
        self._find_file(path)
        return self._locate(path).read_bytes()

    def read_all(self) -> Iterator[tuple[str, bytes]]:
        """Yield the relative paths and the contents of all files."""
        for entry in _walk(self._folder):
            if entry.is_file(follow_symlinks=False):
                yield os.path.relpath(entry.path, self._folder), Path(entry.path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Replace the content of a file. Create the file if it does not exist."""
        try:
            old_size = self._find_file(path).st_size
            is_new = False
        except FileNotFoundError:
            self._check_new(path)
            old_size, is_new = 0, True
        if self._bytes - old_size + len(data) > self._max_bytes:
            raise _make_error(errno.ENOSPC)
        temporary = self._folder.with_name(f".incomplete-{self._folder.name}")
        try:
            temporary.write_bytes(data)
            temporary.replace(self._locate(path))
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        self._bytes += len(data) - old_size
        self._entries += is_new

    def mkdir(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._find(path)
            raise _make_error(errno.EEXIST)
        self._check_new(path)
        self._locate(path).mkdir(mode=0o700)
        self._entries += 1

    def remove(self, path: str) -> None:
        size = self._find_file(path).st_size
        self._locate(path).unlink()
        self._bytes -= size
        self._entries -= 1

    def rmdir(self, path: str) -> None:
        if path == "/":
            raise _make_error(errno.EBUSY)
        if not stat.S_ISDIR(self._find(path).st_mode):
            raise _make_error(errno.ENOTDIR)
        self._locate(path).rmdir()
        self._entries -= 1

    def rename(self, src: str, dst: str) -> None:
        if "/" in (src, dst):
            raise _make_error(errno.EBUSY)
        self._find(src)
        _check_depth(dst)
        self._find(_get_parent(dst))
        self._locate(src).rename(self._locate(dst))
        self.measure(self._max_bytes)  # a replaced file is gone

    def _check_new(self, path: str) -> None:
        """Raise OSError if an entry cannot be created."""
        _check_depth(path)
        if not stat.S_ISDIR(self._find(_get_parent(path)).st_mode):
            raise _make_error(errno.ENOTDIR)
        if self._entries >= self._max_entries:
            raise _make_error(errno.ENOSPC)

    def _locate(self, path: str) -> Path:
        return self._folder / path.lstrip("/")

    def _find_file(self, path: str) -> os.stat_result:
        found = self._find(path)
        if stat.S_ISDIR(found.st_mode):
            raise _make_error(errno.EISDIR)
        return found

    def _find(self, path: str) -> os.stat_result:
        """Return the status of a file or folder. Links and special files do not exist, nor does anything below them."""
        current = self._folder
        found = current.lstat()
        for name in path.split("/"):
            if not name:
                continue
            if name in (".", ".."):
                raise _make_error(errno.EPERM)
            if not stat.S_ISDIR(found.st_mode):
                raise _make_error(errno.ENOTDIR)
            current /= name
            found = current.lstat()
            if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
                raise _make_error(errno.ENOENT)
        return found


def _make_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _get_parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _check_depth(path: str) -> None:
    if path.count("/") > _MAX_DEPTH:
        raise _make_error(errno.ENAMETOOLONG)


def _list_kinds(entries: Iterable["os.DirEntry[str]"]) -> Iterator[tuple[str, Kind]]:
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield entry.name, "dir"
        elif entry.is_file(follow_symlinks=False):
            yield entry.name, "file"


def _walk(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """Yield all entries below a folder. Links are not followed."""
    pending = [str(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
