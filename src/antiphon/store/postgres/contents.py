"""The contents of files in PostgreSQL, in pieces. No content is in memory as a whole."""

import asyncio
import hashlib
import secrets
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from antiphon.errors import ServerError
from antiphon.store.escaped_text import escape_all
from antiphon.store.files.content import MISSING_CONTENT, ORPHAN_SECONDS, describe_os_error
from antiphon.store.postgres.pool import PostgresPool
from antiphon.store.postgres.writer import GroupedStatement, GroupWriter

# A larger piece is no faster, and each download and upload has one in memory.
PIECE_BYTES = 512 * 1024

_BEGIN = GroupedStatement(
    """
INSERT INTO contents (created_at) VALUES (extract(epoch FROM clock_timestamp())) RETURNING number
"""
)
_ADD_PIECE = "INSERT INTO content_pieces (content, piece, data) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING"
_COMMIT = GroupedStatement("UPDATE contents SET id = $2 WHERE number = $1 RETURNING number")
_DISCARD = GroupedStatement(
    "WITH gone AS (DELETE FROM contents WHERE number = $1 AND id IS NULL RETURNING 1) SELECT count(*) FROM gone"
)
_DELETE = GroupedStatement(
    "WITH gone AS (DELETE FROM contents WHERE id = ANY($1::text[]) RETURNING 1) SELECT count(*) FROM gone"
)
_FIND = "SELECT number FROM contents WHERE id = $1"
_READ_PIECE = "SELECT data FROM content_pieces WHERE content = $1 AND piece = $2"
_COUNT_PIECES = "SELECT count(*) FROM content_pieces WHERE content = $1"
_COPY = """
INSERT INTO content_pieces (content, piece, data)
SELECT $1, piece + $3, data FROM content_pieces WHERE content = $2
"""
_AGE = "created_at < extract(epoch FROM clock_timestamp()) - $1"
# A part of them at a time: the next sweep finds the others.
_OLD = f"""
SELECT id FROM contents WHERE id IS NOT NULL AND {_AGE}
    AND NOT EXISTS (SELECT 1 FROM files WHERE files.id = contents.id)
    AND NOT EXISTS (SELECT 1 FROM upload_parts WHERE upload_parts.id = contents.id)
    AND NOT EXISTS (SELECT 1 FROM container_files WHERE content = contents.id)
LIMIT 1000
"""
_DELETE_UNFINISHED = GroupedStatement(
    f"WITH gone AS (DELETE FROM contents WHERE id IS NULL AND {_AGE} RETURNING 1) SELECT count(*) FROM gone"
)


class PostgresContents:
    """Contents by id. A content is complete or absent: its id is set when all pieces are written."""

    def __init__(self, writer: GroupWriter, pool: PostgresPool) -> None:
        self._writer = writer
        self._pool = pool

    async def close(self) -> None:
        """Do nothing: the database closes the connections."""

    async def check_space(self, size: int, *, min_free_bytes: int) -> None:
        """Do nothing: only the database knows its disk, and refuses the pieces when it is full."""

    async def start_writing(self) -> "PostgresContentWriter":
        return PostgresContentWriter(self._writer, self._pool, await self._writer.submit(_BEGIN, ()))

    async def join(self, content_ids: Sequence[str], target_id: str) -> tuple[int, str]:
        """Write several contents one after the other as a new one. Return its size and its MD5."""
        # MD5 is the checksum of the API, not a means of security.
        digest, size = hashlib.md5(usedforsecurity=False), 0
        number = await self._writer.submit(_BEGIN, ())
        try:
            pieces = 0
            for content_id in content_ids:
                source = await self._find(content_id)
                index = 0
                while (data := await self._read_piece(source, index)) is not None:
                    await asyncio.to_thread(digest.update, data)
                    size += len(data)
                    index += 1
                async with self._pool.transact() as connection:  # the database copies the pieces
                    await connection.execute(_COPY, number, source, pieces)
                pieces += index
            await self._writer.submit(_COMMIT, (number, target_id))
        except BaseException:
            self._writer.submit(_DISCARD, (number,)).add_done_callback(_ignore_failure)
            raise
        return size, digest.hexdigest()

    async def delete(self, content_ids: Sequence[str]) -> None:
        """Delete contents. Contents that do not exist are skipped."""
        if content_ids:
            await self._writer.submit(_DELETE, (escape_all(content_ids),))

    async def list_old(self) -> list[str]:
        """Return the ids of unused contents that are at least a day old. Delete old parts of interrupted writes."""
        await self._writer.submit(_DELETE_UNFINISHED, (ORPHAN_SECONDS,))
        return [content_id for (content_id,) in await self._pool.submit(_OLD, (ORPHAN_SECONDS,))]

    async def read(self, content_id: str) -> AsyncIterator[bytes]:
        """Yield the parts of a content. Raises ServerError if it is deleted meanwhile."""
        number = await self._find(content_id)
        ((count,),) = await self._pool.submit(_COUNT_PIECES, (number,))
        for index in range(count):
            data = await self._read_piece(number, index)
            if data is None:
                raise ServerError("The file was deleted while it was read.")
            yield data

    async def read_whole(self, content_id: str) -> bytes:
        return b"".join([data async for data in self.read(content_id)])

    @asynccontextmanager
    async def use_path(self, content_id: str) -> AsyncIterator[Path]:
        """Yield the path of a copy, which is deleted at the end."""
        path = Path(tempfile.gettempdir()) / f"antiphon-{secrets.token_hex(16)}"
        try:
            await self.copy_to(content_id, path)
            yield path
        finally:
            with suppress(FileNotFoundError):
                await asyncio.to_thread(path.unlink)

    async def copy_to(self, content_id: str, path: Path) -> None:
        """Write a content to a new file that only the user of the process can read."""
        try:
            file = await asyncio.to_thread(_create_file, path)
            try:
                async for data in self.read(content_id):
                    await asyncio.to_thread(_write_all, file, data)
            finally:
                await asyncio.to_thread(file.close)
        except OSError as error:
            raise describe_os_error(error) from None

    async def _find(self, content_id: str) -> int:
        rows = await self._pool.submit(_FIND, (content_id,))
        if not rows:
            raise ServerError(MISSING_CONTENT)
        number: int = rows[0][0]
        return number

    async def _read_piece(self, number: int, index: int) -> bytes | None:
        rows = await self._pool.submit(_READ_PIECE, (number, index))
        return rows[0][0] if rows else None


class PostgresContentWriter:
    """Writes a new content, piece by piece. Either `commit` or `discard` ends it."""

    def __init__(self, writer: GroupWriter, pool: PostgresPool, number: int) -> None:
        self._writer = writer
        self._pool = pool
        self._number = number
        self._buffer = bytearray()
        self._pieces = 0
        self._is_committed = False
        self.size = 0

    async def write(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        self._buffer += data
        while len(self._buffer) >= PIECE_BYTES:
            piece = bytes(self._buffer[:PIECE_BYTES])
            del self._buffer[:PIECE_BYTES]
            await self._add_piece(piece)

    async def commit(self, content_id: str) -> None:
        """Make the content durable under this id."""
        if self._buffer:
            await self._add_piece(bytes(self._buffer))
            self._buffer.clear()
        await self._writer.submit(_COMMIT, (self._number, content_id))
        self._is_committed = True

    def discard(self) -> None:
        """Delete what was written. Does nothing after `commit`. If it fails, a sweep deletes the pieces."""
        if not self._is_committed:
            with suppress(Exception):  # the store may be closed
                self._writer.submit(_DISCARD, (self._number,)).add_done_callback(_ignore_failure)

    async def _add_piece(self, data: bytes) -> None:
        # Not with the writer: a large piece must not delay the commits of others.
        async with self._pool.transact() as connection:
            await connection.execute(_ADD_PIECE, self._number, self._pieces, data)
        self._pieces += 1


def _write_all(file: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _create_file(path: Path) -> Any:
    path.touch(mode=0o600, exist_ok=False)
    return path.open("wb", buffering=0)


def _ignore_failure(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()
