"""The contents of files on disk. A content is complete or absent: it is written under another name and renamed."""

import asyncio
import errno
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

from antiphon.errors import ConfigError, ServerError, StoreFull, StoreUnavailable

logger = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
_WRITE_BYTES = 1024 * 1024
_TEMPORARY = "new-"
# Files without a row are deleted after this time: a request may be about to write the row.
ORPHAN_SECONDS = 24 * 3600.0
MISSING_CONTENT = "The content of the file is missing on the server."
FULL = "The disk of the server is full."


class ContentWriter(Protocol):
    """Writes a new content. Either `commit` or `discard` ends it. `size` is the number of bytes so far."""

    size: int

    async def write(self, data: bytes | memoryview) -> None: ...

    async def commit(self, content_id: str) -> None:
        """Make the content durable under this id."""

    def discard(self) -> None:
        """Delete what was written. Does nothing after `commit`."""


class Contents(Protocol):
    """The contents of files, by id."""

    async def close(self) -> None: ...

    async def check_space(self, size: int, *, min_free_bytes: int) -> None:
        """Raise StoreFull if there is no room for a content of this size."""

    async def start_writing(self) -> ContentWriter: ...

    async def join(self, content_ids: Sequence[str], target_id: str) -> tuple[int, str]:
        """Write several contents one after the other as a new one. Return its size and its MD5."""

    async def delete(self, content_ids: Sequence[str]) -> None:
        """Delete contents. Contents that do not exist are skipped."""

    async def list_old(self) -> list[str]:
        """Return the ids of contents that are at least a day old. Delete old parts of interrupted writes."""

    def read(self, content_id: str) -> AsyncIterator[bytes]:
        """Yield the parts of a content. Raises ServerError if it is missing."""

    async def read_whole(self, content_id: str) -> bytes: ...

    def use_path(self, content_id: str) -> AbstractAsyncContextManager[Path]:
        """Yield a path at which another process can read the content."""


class ContentFolder:
    """A folder with one file for each content, named by its id. Without a path, it is a temporary folder."""

    def __init__(self, path: Path | None) -> None:
        self._temporary = None if path is not None else tempfile.TemporaryDirectory(prefix="antiphon-files-")
        self.path = path if path is not None else Path(self._temporary.name)  # type: ignore[union-attr]
        self._contents = self.path / "contents"

    def create(self) -> None:
        """Create the folder. Only the user of the process can read it."""
        for folder in (self.path, self._contents):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def close(self) -> None:
        """Delete a temporary folder."""
        if self._temporary is not None:
            await asyncio.to_thread(self._temporary.cleanup)

    async def check_space(self, size: int, *, min_free_bytes: int) -> None:
        if shutil.disk_usage(self.path).free - size < min_free_bytes:
            raise StoreFull(FULL)

    def locate(self, content_id: str) -> Path:
        """Return the path of a content. Ids come from rows, never from clients."""
        return self._contents / content_id

    async def start_writing(self) -> "FileWriter":
        return FileWriter(self._contents)

    async def join(self, content_ids: Sequence[str], target_id: str) -> tuple[int, str]:
        return await asyncio.to_thread(self._join, content_ids, target_id)

    def _join(self, content_ids: Sequence[str], target_id: str) -> tuple[int, str]:
        # MD5 is the checksum of the API, not a means of security.
        digest, size = hashlib.md5(usedforsecurity=False), 0
        path = self._contents / f"{_TEMPORARY}{secrets.token_hex(16)}"
        try:
            with path.open("xb") as target:
                for content_id in content_ids:
                    with self.locate(content_id).open("rb") as source:
                        while data := source.read(_WRITE_BYTES):
                            digest.update(data)
                            size += len(data)
                            target.write(data)
                _sync(target.fileno())
            _rename(path, self.locate(target_id))
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            raise describe_os_error(error) from None
        return size, digest.hexdigest()

    async def delete(self, content_ids: Sequence[str]) -> None:
        if content_ids:
            await asyncio.to_thread(self._delete, content_ids)

    def _delete(self, content_ids: Sequence[str]) -> None:
        for content_id in content_ids:
            with suppress(FileNotFoundError):
                self.locate(content_id).unlink()

    async def list_old(self) -> list[str]:
        return await asyncio.to_thread(self._list_old)

    def _list_old(self) -> list[str]:
        found: list[str] = []
        if not self._contents.is_dir():
            return found
        oldest = self._read_clock() - ORPHAN_SECONDS
        for entry in os.scandir(self._contents):
            with suppress(OSError):
                if entry.stat().st_mtime < oldest:
                    if entry.name.startswith(_TEMPORARY):
                        Path(entry.path).unlink()
                    else:
                        found.append(entry.name)
        return found

    def _read_clock(self) -> float:
        """Return the time of the file system: nodes with other clocks may share it."""
        try:
            with tempfile.TemporaryFile(dir=self._contents) as new:
                return os.fstat(new.fileno()).st_mtime
        except OSError:  # the disk is full or read-only
            return time.time()

    async def read(self, content_id: str) -> AsyncIterator[bytes]:
        """Yield the parts of a content. It can be read to the end even if it is deleted meanwhile."""
        try:
            file = await asyncio.to_thread(self.locate(content_id).open, "rb")
        except FileNotFoundError:
            raise ServerError(MISSING_CONTENT) from None
        try:
            while data := await asyncio.to_thread(file.read, READ_BYTES):
                yield data
        finally:
            file.close()

    async def read_whole(self, content_id: str) -> bytes:
        try:
            return await asyncio.to_thread(self.locate(content_id).read_bytes)
        except FileNotFoundError:
            raise ServerError(MISSING_CONTENT) from None

    @asynccontextmanager
    async def use_path(self, content_id: str) -> AsyncIterator[Path]:
        yield self.locate(content_id)


class FileWriter:
    """Writes a new content to a file, in threads. Either `commit` or `discard` ends it.

    Errors of the disk are StoreFull or StoreUnavailable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / f"{_TEMPORARY}{secrets.token_hex(16)}"
        try:
            self._file = self._path.open("xb", buffering=0)
        except OSError as error:
            raise describe_os_error(error) from None
        self._buffer = bytearray()
        self.size = 0

    async def write(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        self._buffer += data
        if len(self._buffer) >= _WRITE_BYTES:
            await asyncio.to_thread(self._flush)

    async def commit(self, content_id: str) -> None:
        """Make the content durable under this id."""
        try:
            await asyncio.to_thread(self._commit, content_id)
        except StoreUnavailable:
            self.discard()
            raise

    def discard(self) -> None:
        """Delete what was written. Does nothing after `commit`."""
        self._file.close()
        with suppress(OSError):
            self._path.unlink()

    def _flush(self) -> None:
        data, self._buffer = self._buffer, bytearray()
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise describe_os_error(error) from None

    def _commit(self, content_id: str) -> None:
        self._flush()
        try:
            _sync(self._file.fileno())
            self._file.close()
            _rename(self._path, self._folder / content_id)
        except OSError as error:
            raise describe_os_error(error) from None


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def describe_os_error(error: OSError) -> StoreUnavailable:
    """Return the error that a client gets if a file cannot be written. Its text has no paths: the log has them."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(FULL)
    logger.error("a file cannot be written: %s", error)
    return StoreUnavailable(f"The file cannot be stored: {error.strerror}.")


def read_pieces(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the numbered pieces of a file for an export. An empty file has one. A missing file has none."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        number, data = 0, file.read(_WRITE_BYTES // 2)
        while data or not number:
            yield number, data
            number, data = number + 1, file.read(_WRITE_BYTES // 2)


def append_piece(path: Path, data: bytes) -> None:
    """Add a piece to a file of an import. Only the user of the process can read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("ab") as file:
        path.chmod(0o600)
        file.write(data)


def locate_below(folder: Path, *names: str) -> Path:
    """Return the path of a file of an import. Raises ConfigError if it would be in another folder."""
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\x00" in name:
            raise ConfigError(f"{name!r} is not the name of a file.")
    return folder.joinpath(*names)
