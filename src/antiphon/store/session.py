"""Sessions of agents: in memory, or in a SQLite file."""

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from antiphon.errors import ConfigError
from antiphon.ledger import Lease, defer_cancellation
from antiphon.protocol.json_text import JsonObject
from antiphon.session import WAIT_SECONDS, LocalLeases, Trim, apply_trim, check_items, check_trim
from antiphon.store.sqlite.database import connect, create_file
from antiphon.store.sqlite_thread import SqliteThread

# The file may be that of a ledger, so the version of its schema is not used here.
_SCHEMA = """
    CREATE TABLE IF NOT EXISTS {schema}.agent_sessions (
        session_id TEXT PRIMARY KEY,
        owner TEXT NOT NULL DEFAULT '',
        leased_until REAL NOT NULL DEFAULT 0,
        active_at REAL NOT NULL
    ) STRICT;
    CREATE TABLE IF NOT EXISTS {schema}.agent_session_items (
        session_id TEXT NOT NULL,
        run_number INTEGER NOT NULL,
        number INTEGER NOT NULL,
        run_id TEXT NOT NULL,
        item BLOB NOT NULL,
        PRIMARY KEY (session_id, run_number, number)
    ) STRICT;
"""
_HOLD = """
    INSERT INTO agent_sessions (session_id, owner, leased_until, active_at)
    VALUES (:session_id, :owner, :now + :seconds, :now)
    ON CONFLICT (session_id) DO UPDATE SET owner = :owner, leased_until = :now + :seconds, active_at = :now
    WHERE owner IN ('', :owner, :instead_of)
"""
_RELEASE = "UPDATE agent_sessions SET owner = '', leased_until = 0 WHERE session_id = ? AND owner = ?"
_FIND_LEASE = "SELECT owner, leased_until - :now, :now - active_at FROM agent_sessions WHERE session_id = :session_id"
_LIST = """
    SELECT item FROM agent_session_items WHERE session_id = ? ORDER BY run_number DESC, number DESC LIMIT ?
"""
_FIND_RUN = "SELECT run_number FROM agent_session_items WHERE session_id = ? AND run_id = ? LIMIT 1"
_NEXT_RUN = "SELECT coalesce(max(run_number), 0) + 1 FROM agent_session_items WHERE session_id = ?"
_DELETE_RUN = "DELETE FROM agent_session_items WHERE session_id = ? AND run_number = ?"
_ADD = "INSERT INTO agent_session_items (session_id, run_number, number, run_id, item) VALUES (?, ?, ?, ?, ?)"
_POP = """
    DELETE FROM agent_session_items WHERE rowid = (
        SELECT rowid FROM agent_session_items WHERE session_id = ? ORDER BY run_number DESC, number DESC LIMIT 1
    ) RETURNING item
"""
_CLEAR = "DELETE FROM agent_session_items WHERE session_id = ?"


class MemorySession(LocalLeases):
    """A session in memory, for one process. `trim` selects the items that a run reads."""

    appends_only = False

    def __init__(
        self, session_id: str = "session", *, trim: Trim | None = None, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        super().__init__()
        self.session_id = session_id
        self.wait_seconds = wait_seconds
        self._trim = check_trim(trim)
        self._runs: list[tuple[str, list[JsonObject]]] = []
        self._runs_lock = threading.Lock()

    async def load(self) -> list[JsonObject]:
        return await apply_trim(self._trim, await self.list_items())

    async def save_run(self, run_id: str, items: Sequence[JsonObject]) -> None:
        copied = _copy(items)
        with self._runs_lock:
            for index, (other_id, _) in enumerate(self._runs):
                if run_id and other_id == run_id:
                    self._runs[index] = (run_id, copied)
                    return
            self._runs.append((run_id, copied))

    async def list_items(self, *, limit: int | None = None) -> list[JsonObject]:
        with self._runs_lock:
            items = [item for _, run in self._runs for item in run]
        return _copy(items if limit is None else items[max(0, len(items) - limit) :])

    async def add_items(self, items: Sequence[JsonObject]) -> None:
        await self.save_run("", check_items(items))

    async def pop_item(self) -> JsonObject | None:
        with self._runs_lock:
            for _, items in reversed(self._runs):
                if items:
                    return items.pop()
        return None

    async def clear(self) -> None:
        with self._runs_lock:
            self._runs.clear()

    async def close(self) -> None:
        """Do nothing: there is no file."""


class SqliteSession(SqliteThread):
    """A session in a SQLite file. A file can have many sessions, and also a ledger. Several processes can use it.

    The file is created and opened on first use. `trim` selects the items that a run reads.
    """

    appends_only = False

    def __init__(
        self,
        path: str | Path,
        session_id: str,
        *,
        trim: Trim | None = None,
        wait_seconds: float = WAIT_SECONDS,
        now: Callable[[], float] = time.time,
    ) -> None:
        if not session_id:
            raise ConfigError("session_id: a session needs an id.")
        super().__init__(path, noun="session")
        self.session_id = session_id
        self.wait_seconds = wait_seconds
        self._trim = check_trim(trim)
        self._now = now
        self._connection: sqlite3.Connection | None = None

    async def load(self) -> list[JsonObject]:
        return await apply_trim(self._trim, await self.list_items())

    async def save_run(self, run_id: str, items: Sequence[JsonObject]) -> None:
        encoded = [msgspec.json.encode(item) for item in items]
        await defer_cancellation(self._submit(self._save_run, run_id, encoded))

    async def list_items(self, *, limit: int | None = None) -> list[JsonObject]:
        return await self._submit(self._list, -1 if limit is None else limit)

    async def add_items(self, items: Sequence[JsonObject]) -> None:
        await self.save_run("", check_items(items))

    async def pop_item(self) -> JsonObject | None:
        return await defer_cancellation(self._submit(self._pop))

    async def clear(self) -> None:
        await defer_cancellation(self._submit(self._execute, _CLEAR, (self.session_id,)))

    async def hold(self, run_id: str, owner: str, seconds: float, *, instead_of: str = "") -> bool:
        values = {"session_id": run_id, "owner": owner, "seconds": seconds, "instead_of": instead_of}
        return await defer_cancellation(self._submit(self._hold, values))

    async def release(self, run_id: str, owner: str) -> None:
        await defer_cancellation(self._submit(self._execute, _RELEASE, (run_id, owner)))

    async def find_lease(self, run_id: str) -> Lease | None:
        return await self._submit(self._find_lease, run_id)

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _open(self._path)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _execute(self, statement: str, values: Sequence[object]) -> None:
        self._connect().execute(statement, values)

    def _save_run(self, run_id: str, items: list[bytes]) -> None:
        connection, session_id = self._connect(), self.session_id
        connection.execute("BEGIN IMMEDIATE")
        try:
            found = connection.execute(_FIND_RUN, (session_id, run_id)).fetchone() if run_id else None
            (number,) = found or connection.execute(_NEXT_RUN, (session_id,)).fetchone()
            connection.execute(_DELETE_RUN, (session_id, number))
            connection.executemany(
                _ADD, [(session_id, number, index, run_id, item) for index, item in enumerate(items)]
            )
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _list(self, limit: int) -> list[JsonObject]:
        rows = self._connect().execute(_LIST, (self.session_id, limit)).fetchall()
        return [msgspec.json.decode(item) for (item,) in reversed(rows)]

    def _pop(self) -> JsonObject | None:
        rows = self._connect().execute(_POP, (self.session_id,)).fetchall()
        return msgspec.json.decode(rows[0][0]) if rows else None

    def _hold(self, values: dict[str, object]) -> bool:
        return self._connect().execute(_HOLD, values | {"now": self._now()}).rowcount == 1

    def _find_lease(self, session_id: str) -> Lease | None:
        row = self._connect().execute(_FIND_LEASE, {"session_id": session_id, "now": self._now()}).fetchone()
        return None if row is None else Lease(*row)


def create_session_tables(connection: sqlite3.Connection, *, schema: str = "main") -> None:
    """Create the tables of sessions in one of the databases of a connection, unless it has them."""
    for statement in _SCHEMA.format(schema=schema).split(";"):
        connection.execute(statement)


def _open(path: Path) -> sqlite3.Connection:
    try:
        create_file(path)
        connection = connect(path)
        try:
            create_session_tables(connection)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"The file of the session {path} cannot be opened: {error}") from error
    return connection


def _copy(items: Sequence[JsonObject]) -> list[JsonObject]:
    """Return copies of items, nested values included."""
    copied: list[JsonObject] = msgspec.json.decode(msgspec.json.encode(items))
    return copied
