"""The default store: one SQLite file.

A writer thread commits everything that waits for it in one transaction, synced to disk before anyone hears of it. A
reader thread has a connection of its own: with a write-ahead log, readers and the writer do not wait for each other.
Several processes may share the file.
"""

import asyncio
import sqlite3
import time
from pathlib import Path

from antiphon.errors import ConfigError, Unavailable
from antiphon.store.base import Link, StoredResponse
from antiphon.store.record import LinkRecord, pack, unpack, walk
from antiphon.store.schema import migrate, read_migrations
from antiphon.store.worker import Job, Worker

# How long a process waits for the others to let it write.
BUSY_SECONDS = 30.0

SAVE = """
INSERT INTO responses (project, id, previous_response_id, created_at, input, output, body)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (project, id) DO UPDATE SET
    previous_response_id = excluded.previous_response_id,
    created_at = excluded.created_at,
    input = excluded.input,
    output = excluded.output,
    body = excluded.body
"""

LOAD = "SELECT input, output, body FROM responses WHERE project = ? AND id = ?"

DELETE = "DELETE FROM responses WHERE project = ? AND id = ?"

# The walk itself carries only keys. UNION, not UNION ALL: a row that comes again ends the walk. The order of the rows
# is not defined, so the reader puts them in order.
CHAIN = """
WITH RECURSIVE walked (project, id, previous, place) AS (
    SELECT project, id, previous_response_id, rowid FROM responses WHERE project = ? AND id = ?
    UNION
    SELECT older.project, older.id, older.previous_response_id, older.rowid
    FROM walked JOIN responses AS older ON older.project = walked.project AND older.id = walked.previous
)
SELECT walked.id, previous, input, output FROM walked JOIN responses ON responses.rowid = place
"""


class SqliteStore:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._workers: tuple[Worker, Worker] | None = None

    async def open(self) -> None:
        writing, reading = await asyncio.to_thread(_prepare, self.path)
        self._workers = Worker("store-writer", writing, _write), Worker("store-reader", reading, _read)

    async def close(self) -> None:
        if self._workers is not None:
            await asyncio.gather(*(worker.close() for worker in self._workers))

    async def save(self, project: str, stored: StoredResponse) -> None:
        await self._writer.submit(SAVE, (project, *pack(stored)))

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        rows = await self._reader.submit(LOAD, (project, response_id))
        return unpack(response_id, *rows[0]) if rows else None

    async def delete(self, project: str, response_id: str) -> bool:
        deleted: int = await self._writer.submit(DELETE, (project, response_id))
        return deleted > 0

    async def chain(self, project: str, response_id: str) -> list[Link]:
        rows = await self._reader.submit(CHAIN, (project, response_id))
        return walk(response_id, {row[0]: LinkRecord(*row[1:]) for row in rows}.get)

    @property
    def _writer(self) -> Worker:
        return self._both()[0]

    @property
    def _reader(self) -> Worker:
        return self._both()[1]

    def _both(self) -> tuple[Worker, Worker]:
        if self._workers is None:
            raise Unavailable("The store is not open.")
        return self._workers


def _write(connection: sqlite3.Connection, batch: list[Job]) -> None:
    """Execute a batch in one transaction. A statement that fails takes nothing of its neighbours with it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for job in batch:
            try:
                job.outcome = connection.execute(job.statement, job.parameters).rowcount
            except Exception as error:
                job.outcome = error
                if not connection.in_transaction:  # a full or broken disk: SQLite has taken back the whole batch
                    raise
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _read(connection: sqlite3.Connection, batch: list[Job]) -> None:
    for job in batch:
        try:
            job.outcome = connection.execute(job.statement, job.parameters).fetchall()
        except Exception as error:
            job.outcome = error


def _prepare(path: Path) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """Make the file if there is none, bring it up to date, and return a connection to write and one to read."""
    try:
        _create(path)
        writing = connect(path)
        try:
            migrate(writing, read_migrations(), path=str(path))
            reading = connect(path)
        except BaseException:
            writing.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"The store {path} cannot be opened: {error}") from error
    reading.execute("PRAGMA query_only = ON")
    return writing, reading


def _create(path: Path) -> None:
    # Conversations are private: what we create, only we may read. SQLite gives its log the permissions of the file.
    for folder in reversed(path.absolute().parents):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        path.touch(mode=0o600)


def connect(path: Path) -> sqlite3.Connection:
    """A connection for one thread at a time, to read or to write with."""
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA page_size = 8192")  # of a new file: a typical response then fits in two pages
        _switch_to_wal(connection)
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    # When several processes meet over a new file, SQLite refuses this at once instead of waiting its timeout.
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
