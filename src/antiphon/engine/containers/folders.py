"""The folders of the containers on disk. The functions block, so callers use a thread."""

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from antiphon.store.files.content import describe_os_error
from antiphon.tools.hosted.code_interpreter.sandbox import DATA_FOLDER

_ID = re.compile(r"cntr_[A-Za-z0-9]{1,59}")
_NO_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS


class FoundFile(NamedTuple):
    """A file on disk. `path` is relative to the folder `data` of its container."""

    path: str
    bytes: int
    modified_ns: int


class ContainerFolders:
    """One folder for each container, below `root`. Without a root, below a temporary folder that `close` deletes."""

    def __init__(self, root: Path | None) -> None:
        self._is_temporary = root is None
        self._root = root

    def locate(self, container_id: str) -> Path:
        if not _ID.fullmatch(container_id):
            raise ValueError(f"{container_id!r} is not the id of a container")
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="antiphon-containers-"))
        return self._root / container_id

    def create(self, container_id: str) -> None:
        """Create the folder of a container. Raises StoreUnavailable if the disk is full or cannot be written to."""
        folder = self.locate(container_id)
        try:
            for parent in (folder.parent, folder, folder / DATA_FOLDER):
                parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise describe_os_error(error) from None

    def delete(self, container_id: str) -> None:
        shutil.rmtree(self.locate(container_id), ignore_errors=True)

    def close(self) -> None:
        if self._is_temporary and self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def find_time(self, container_id: str, path: str) -> int:
        """Return the time of the last change of a file, in nanoseconds."""
        return (self.locate(container_id) / DATA_FOLDER / path).stat().st_mtime_ns

    def open_file(self, container_id: str, path: str) -> BinaryIO:
        """Open a file for reading. Raises OSError if there is none. Links are not followed, in no part of the path."""
        with self._open_parent(container_id, path) as (folder, name):
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _NO_LINKS, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.ENOENT, "not a file", path)
        return os.fdopen(descriptor, "rb")

    def list_existing(self, container_id: str, paths: Iterable[str]) -> set[str]:
        """Return the paths at which there are files."""
        return {path for path in paths if self._is_file(container_id, path)}

    def _is_file(self, container_id: str, path: str) -> bool:
        try:
            with self._open_parent(container_id, path) as (folder, name):
                return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def delete_file(self, container_id: str, path: str) -> None:
        """Delete a file, unless a part of its path is a link or missing."""
        # Opening a link as a folder fails with ENOTDIR or ELOOP.
        with suppress(OSError), self._open_parent(container_id, path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def move_file(self, source: Path, container_id: str, path: str) -> FoundFile:
        """Move a file into a container. Links in its path, which code may have made, are replaced by folders."""
        with self._open_parent(container_id, path, creates=True) as (folder, name):
            os.replace(source, name, dst_dir_fd=folder)
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return FoundFile(path, status.st_size, status.st_mtime_ns)

    @contextmanager
    def _open_parent(self, container_id: str, path: str, *, creates: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of a file without following links. Yield its descriptor and the name of the file."""
        *parents, name = path.split("/")
        folder = os.open(self.locate(container_id) / DATA_FOLDER, _FOLDER)
        try:
            for parent in parents:
                if creates:
                    _make_folder(parent, folder)
                below = os.open(parent, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = below
            yield folder, name
        finally:
            os.close(folder)

    def scan(self, container_id: str, *, limit: int) -> list[FoundFile]:
        """Return the files of a container, up to `limit`. Links and special files are skipped.

        There are none if the container has been deleted meanwhile.
        """
        folder = self.locate(container_id) / DATA_FOLDER
        found: list[FoundFile] = []
        with suppress(FileNotFoundError):
            for path, status in _walk(folder):
                if len(found) == limit:
                    break
                found.append(FoundFile(path, status.st_size, status.st_mtime_ns))
        return found


def _make_folder(name: str, parent: int) -> None:
    """Create a folder unless it exists. Anything else of this name is deleted before."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            return
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    os.mkdir(name, 0o700, dir_fd=parent)


def _walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    pending = [(str(folder), "")]
    while pending:
        current, prefix = pending.pop()
        with os.scandir(current) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    pending.append((entry.path, f"{prefix}{entry.name}/"))
                elif stat.S_ISREG(status.st_mode):
                    yield prefix + entry.name, status
