"""Ledgers of agent runs: in a SQLite file of their own, or in memory."""

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from antiphon.errors import ConfigError, StoreLost
from antiphon.ledger import Holder, Lease, RunSummary, RunTaken, defer_cancellation, find_first_run, make_summary
from antiphon.store.migration_files import Migration
from antiphon.store.sqlite.database import connect, create_file
from antiphon.store.sqlite.files import DatabaseFiles
from antiphon.store.sqlite.migrations import migrate
from antiphon.store.sqlite_thread import SqliteThread

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
    ),
    Migration(
        2,
        "leases",
        """
        ALTER TABLE runs ADD COLUMN owner TEXT NOT NULL DEFAULT '';
        ALTER TABLE runs ADD COLUMN leased_until REAL NOT NULL DEFAULT 0;
        ALTER TABLE runs ADD COLUMN active_at REAL NOT NULL DEFAULT 0;
        UPDATE runs SET active_at = updated_at;
        """,
    ),
]

_APPEND = "INSERT INTO entries (run_id, number, entry) VALUES (?, ?, ?)"
_UPDATE_RUN = """
    INSERT INTO runs (run_id, created_at, updated_at, active_at, status, title)
    VALUES (:run_id, CAST(:now AS INTEGER), CAST(:now AS INTEGER), :now, coalesce(:status, ''), :title)
    ON CONFLICT (run_id) DO UPDATE SET
        updated_at = CAST(:now AS INTEGER),
        active_at = :now,
        status = coalesce(:status, status),
        title = CASE :title WHEN '' THEN title ELSE :title END
"""
_READ = "SELECT entry FROM entries WHERE run_id = ? ORDER BY number"
_IS_HELD = "SELECT 1 FROM runs WHERE run_id = ? AND owner = ?"
_HOLD = """
    UPDATE runs SET owner = :owner, leased_until = :now + :seconds, active_at = :now
    WHERE run_id = :run_id AND owner IN ('', :owner, :instead_of)
"""
_RELEASE = "UPDATE runs SET owner = '', leased_until = 0, active_at = :now WHERE run_id = :run_id AND owner = :owner"
_FIND_OWNER = "SELECT owner FROM runs WHERE run_id = ?"
# The ids that begin with the id of the run and a colon: `;` is the character after it.
_FIND_SUBAGENTS = "SELECT run_id FROM runs WHERE run_id > :run_id || ':' AND run_id < :run_id || ';'"
_DELETE = ("DELETE FROM entries WHERE run_id = ?", "DELETE FROM runs WHERE run_id = ?")
_LEASE = "owner, leased_until - :now, :now - active_at"
_FIND_LEASE = f"SELECT {_LEASE} FROM runs WHERE run_id = :run_id"
_LIST = f"SELECT run_id, created_at, updated_at, status, title, {_LEASE} FROM runs ORDER BY position DESC LIMIT :limit"


class SqliteLedger(SqliteThread):
    """A ledger in a SQLite file. Several processes can use the file. It is created and opened on first use.

    If the files are deleted or replaced while they are open, the next entry raises StoreLost: SQLite would write it
    to a file that nobody finds again.
    """

    def __init__(self, path: str | Path, *, now: Callable[[], float] = time.time) -> None:
        super().__init__(path, noun="ledger")
        self._now = now
        self._connection: sqlite3.Connection | None = None
        self._files: DatabaseFiles | None = None

    async def append(
        self,
        run_id: str,
        number: int,
        entry: bytes,
        *,
        status: str | None = None,
        title: str = "",
        holder: Holder | None = None,
    ) -> None:
        await defer_cancellation(self._submit(self._append, run_id, number, entry, status, title, holder))

    async def hold(self, run_id: str, owner: str, seconds: float, *, instead_of: str = "") -> bool:
        return await defer_cancellation(self._submit(self._hold, run_id, owner, seconds, instead_of))

    async def release(self, run_id: str, owner: str) -> None:
        await defer_cancellation(self._submit(self._release, run_id, owner))

    async def find_lease(self, run_id: str) -> Lease | None:
        return await self._submit(self._find_lease, run_id)

    async def read(self, run_id: str) -> Sequence[bytes]:
        return await self._submit(self._read, run_id)

    async def runs(self, *, limit: int = 100) -> Sequence[RunSummary]:
        return await self._submit(self._list, limit)

    async def delete(self, run_id: str, *, owner: str = "") -> bool:
        return await defer_cancellation(self._submit(self._delete, run_id, owner))

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection, self._files = _open(self._path)
        return self._connection

    def _disconnect(self) -> None:
        connection, files = self._connection, self._files
        self._connection = self._files = None
        if connection is None or files is None:
            return
        files.close()
        if files.can_be_closed:
            connection.close()
        else:
            # SQLite would delete the log of another file. The thread keeps the connection open until the process ends.
            threading.Thread(target=_wait_forever, args=(connection,), name="lost-ledger", daemon=True).start()

    def _begin(self) -> sqlite3.Connection:
        """Return the connection in a new transaction. Raises StoreLost if the files cannot take it."""
        connection = self._connect()
        if self._files is not None and self._files.is_check_due():
            self._raise_if_lost(self._files.find_damage())
        connection.execute("BEGIN IMMEDIATE")
        return connection

    def _commit(self, connection: sqlite3.Connection) -> None:
        """Commit. Raises StoreLost unless the data is in the files at the path."""
        connection.execute("COMMIT")
        if self._files is not None:
            self._raise_if_lost(self._files.find_loss())

    def _raise_if_lost(self, loss: str | None) -> None:
        if loss is not None:
            raise StoreLost(f"The ledger is lost, and the run cannot go on: {loss}.")

    def _append(
        self, run_id: str, number: int, entry: bytes, status: str | None, title: str, holder: Holder | None
    ) -> None:
        connection = self._begin()
        try:
            if holder is not None and not connection.execute(_IS_HELD, (holder.run_id, holder.owner)).fetchone():
                raise RunTaken(holder.run_id)
            connection.execute(_APPEND, (run_id, number, entry))
            connection.execute(_UPDATE_RUN, {"run_id": run_id, "now": self._now(), "status": status, "title": title})
            self._commit(connection)
        except sqlite3.IntegrityError:
            raise RunTaken(run_id) from None
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _read(self, run_id: str) -> list[bytes]:
        return [entry for (entry,) in self._connect().execute(_READ, (run_id,))]

    def _hold(self, run_id: str, owner: str, seconds: float, instead_of: str) -> bool:
        values = {"run_id": run_id, "owner": owner, "seconds": seconds, "instead_of": instead_of, "now": self._now()}
        return self._connect().execute(_HOLD, values).rowcount == 1

    def _release(self, run_id: str, owner: str) -> None:
        self._connect().execute(_RELEASE, {"run_id": run_id, "owner": owner, "now": self._now()})

    def _find_lease(self, run_id: str) -> Lease | None:
        row = self._connect().execute(_FIND_LEASE, {"run_id": run_id, "now": self._now()}).fetchone()
        return None if row is None else Lease(*row)

    def _delete(self, run_id: str, owner: str) -> bool:
        connection = self._begin()
        try:
            if connection.execute(_FIND_OWNER, (run_id,)).fetchone() != (owner,):
                return False
            related = [each for (each,) in connection.execute(_FIND_SUBAGENTS, {"run_id": run_id})]
            deleted = [(run_id,), *((each,) for each in related if find_first_run(each) == run_id)]
            for statement in _DELETE:
                connection.executemany(statement, deleted)
            self._commit(connection)
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        connection.execute("PRAGMA incremental_vacuum").fetchall()
        return True

    def _list(self, limit: int) -> list[RunSummary]:
        rows = self._connect().execute(_LIST, {"limit": limit, "now": self._now()})
        return [make_summary(row) for row in rows]


def migrate_ledger(path: Path) -> None:
    """Create the file of a ledger, or update its tables. Raises ConfigError."""
    connection, _ = _open(path)
    connection.close()


def _open(path: Path) -> tuple[sqlite3.Connection, DatabaseFiles]:
    files = DatabaseFiles(path)
    try:
        create_file(path)
        opened = files.identify()
        connection = connect(path)
        try:
            migrate(connection, _MIGRATIONS, path=str(path))
            (page_size,) = connection.execute("PRAGMA page_size").fetchone()
            files.record(opened, page_size=page_size)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"The ledger {path} cannot be opened: {error}") from error
    return connection, files


def _wait_forever(_: sqlite3.Connection) -> None:
    threading.Event().wait()


class _StoredLease(msgspec.Struct):
    """The lease of a run. Times are those of the clock of the ledger."""

    owner: str
    ends_at: float
    active_at: float


class MemoryLedger:
    """A ledger in memory, for tests and for runs that need not outlive their process."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._entries: dict[str, dict[int, bytes]] = {}
        self._runs: dict[str, RunSummary] = {}
        self._leases: dict[str, _StoredLease] = {}

    async def append(
        self,
        run_id: str,
        number: int,
        entry: bytes,
        *,
        status: str | None = None,
        title: str = "",
        holder: Holder | None = None,
    ) -> None:
        entries = self._entries.setdefault(run_id, {})
        if holder is not None and not self._is_held(holder):
            raise RunTaken(holder.run_id)
        if number in entries:
            raise RunTaken(run_id)
        entries[number] = entry
        now = self._now()
        known = self._runs.get(run_id)
        if known is None:
            known = RunSummary(run_id=run_id, created_at=int(now), updated_at=int(now), status="", title="")
        self._runs[run_id] = msgspec.structs.replace(
            known,
            updated_at=int(now),
            status=known.status if status is None else status,
            title=title or known.title,
        )
        self._leases.setdefault(run_id, _StoredLease("", 0.0, now)).active_at = now

    async def hold(self, run_id: str, owner: str, seconds: float, *, instead_of: str = "") -> bool:
        if run_id not in self._runs or self._leases[run_id].owner not in ("", owner, instead_of):
            return False
        self._leases[run_id] = _StoredLease(owner, self._now() + seconds, self._now())
        return True

    async def release(self, run_id: str, owner: str) -> None:
        if self._is_held(Holder(run_id, owner)):
            self._leases[run_id] = _StoredLease("", 0.0, self._now())

    async def find_lease(self, run_id: str) -> Lease | None:
        if run_id not in self._runs:
            return None
        lease, now = self._leases[run_id], self._now()
        return Lease(lease.owner, lease.ends_at - now, now - lease.active_at)

    async def read(self, run_id: str) -> Sequence[bytes]:
        entries = self._entries.get(run_id, {})
        return [entries[number] for number in sorted(entries)]

    async def runs(self, *, limit: int = 100) -> Sequence[RunSummary]:
        newest = list(reversed(self._runs.values()))[:limit]
        leases = [await self.find_lease(run.run_id) for run in newest]
        return [
            msgspec.structs.replace(run, lease=lease if lease is not None and lease.owner else None)
            for run, lease in zip(newest, leases, strict=True)
        ]

    async def delete(self, run_id: str, *, owner: str = "") -> bool:
        if run_id not in self._runs or self._leases[run_id].owner != owner:
            return False
        for each in [run_id, *(other for other in self._runs if find_first_run(other) == run_id)]:
            del self._runs[each], self._entries[each], self._leases[each]
        return True

    async def close(self) -> None:
        """Do nothing: there is no file."""

    def _is_held(self, holder: Holder) -> bool:
        lease = self._leases.get(holder.run_id)
        return lease is not None and lease.owner == holder.owner
