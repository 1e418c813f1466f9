"""Ledgers of agent runs: in a SQLite file of their own, or in memory."""

import asyncio
import functools
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from antiphon.errors import ConfigError, ServerError, Unavailable
from antiphon.ledger import EntryTaken, RunSummary, defer_cancellation
from antiphon.store.sqlite.database import connect, create_file
from antiphon.store.sqlite.migrations import Migration, migrate

_Result = TypeVar("_Result")

_MIGRATIONS = [
    Migration(
        1,
        "ledger",
        """
        CREATE TABLE runs (
            position INTEGER PRIMARY KEY,
            run_id TEXT NOT NULL UNIQUE,
            created_at INTEGER NOT NULL,
            updated_at INTEGER NOT NULL,
            status TEXT NOT NULL,
            title TEXT NOT NULL
        ) STRICT;
        CREATE TABLE entries (
            run_id TEXT NOT NULL,
            number INTEGER NOT NULL,
            entry BLOB NOT NULL,
            PRIMARY KEY (run_id, number)
        ) STRICT;
        """,
    )
]

_APPEND = "INSERT INTO entries (run_id, number, entry) VALUES (?, ?, ?)"
_UPDATE_RUN = """
    INSERT INTO runs (run_id, created_at, updated_at, status, title)
    VALUES (:run_id, :now, :now, coalesce(:status, ''), :title)
    ON CONFLICT (run_id) DO UPDATE SET
        updated_at = :now,
        status = coalesce(:status, status),
        title = CASE :title WHEN '' THEN title ELSE :title END
"""
_READ = "SELECT entry FROM entries WHERE run_id = ? ORDER BY number"
_LIST = "SELECT run_id, created_at, updated_at, status, title FROM runs ORDER BY position DESC LIMIT ?"


class SqliteLedger:
    """A ledger in a SQLite file. Several processes can use the file. It is created and opened on first use.

    The ledger has its own thread, because tools can block all threads of the default executor. One ledger can serve
    several event loops, one after the other.
    """

    def __init__(self, path: str | Path, *, now: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._now = now
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._connection: sqlite3.Connection | None = None
        self._closed = False

    async def append(
        self, run_id: str, number: int, entry: bytes, *, status: str | None = None, title: str = ""
    ) -> None:
        await defer_cancellation(self._submit(self._append, run_id, number, entry, status, title))

    async def read(self, run_id: str) -> Sequence[bytes]:
        return await self._submit(self._read, run_id)

    async def runs(self, *, limit: int = 100) -> Sequence[RunSummary]:
        return await self._submit(self._list, limit)

    async def close(self) -> None:
        if not self._closed:
            closing = self._submit(self._disconnect)
            self._closed = True
            await defer_cancellation(closing)
            self._thread.shutdown(wait=False)

    def _submit(self, work: Callable[..., _Result], *arguments: object) -> asyncio.Future[_Result]:
        if self._closed:
            raise Unavailable("The ledger is closed.")
        call = functools.partial(self._call, work, *arguments)
        return asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _call(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        try:
            return work(*arguments)
        except sqlite3.Error as error:
            raise ServerError(f"The ledger {self._path} failed: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _open(self._path)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _append(self, run_id: str, number: int, entry: bytes, status: str | None, title: str) -> None:
        connection = self._connect()
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(_APPEND, (run_id, number, entry))
            connection.execute(
                _UPDATE_RUN, {"run_id": run_id, "now": int(self._now()), "status": status, "title": title}
            )
            connection.execute("COMMIT")
        except sqlite3.IntegrityError:
            raise EntryTaken(run_id) from None
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _read(self, run_id: str) -> list[bytes]:
        return [entry for (entry,) in self._connect().execute(_READ, (run_id,))]

    def _list(self, limit: int) -> list[RunSummary]:
        return [
            RunSummary(run_id=run_id, created_at=created_at, updated_at=updated_at, status=status, title=title)
            for run_id, created_at, updated_at, status, title in self._connect().execute(_LIST, (limit,))
        ]


def _open(path: Path) -> sqlite3.Connection:
    try:
        create_file(path)
        connection = connect(path)
        try:
            migrate(connection, _MIGRATIONS, path=str(path))
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"The ledger {path} cannot be opened: {error}") from error
    return connection


class MemoryLedger:
    """A ledger in memory, for tests and for runs that need not outlive their process."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._entries: dict[str, dict[int, bytes]] = {}
        self._runs: dict[str, RunSummary] = {}

    async def append(
        self, run_id: str, number: int, entry: bytes, *, status: str | None = None, title: str = ""
    ) -> None:
        entries = self._entries.setdefault(run_id, {})
        if number in entries:
            raise EntryTaken(run_id)
        entries[number] = entry
        now = int(self._now())
        known = self._runs.get(run_id) or RunSummary(run_id=run_id, created_at=now, updated_at=now, status="", title="")
        self._runs[run_id] = msgspec.structs.replace(
            known,
            updated_at=now,
            status=known.status if status is None else status,
            title=title or known.title,
        )

    async def read(self, run_id: str) -> Sequence[bytes]:
        entries = self._entries.get(run_id, {})
        return [entries[number] for number in sorted(entries)]

    async def runs(self, *, limit: int = 100) -> Sequence[RunSummary]:
        return list(reversed(self._runs.values()))[:limit]

    async def close(self) -> None:
        """Do nothing: there is no file."""
