"""One SQLite file, its connections, and the two threads that use them.

The writer thread commits all waiting writes in one transaction and reports success after the commit is synced to disk.
The reader thread has its own connection. In WAL mode, readers and the writer do not block each other. Several processes
can share the file.

A failed statement fails only its own operation. If the disk is full, or on an I/O error, SQLite rolls back the
transaction: every operation in it raises StoreUnavailable, and nothing of it is stored. The threads continue, so later
writes succeed when there is space again. A foreground response then fails (`engine/respond/run.py`). A background
response retries its writes (`engine/background/attempt.py`).

If the files were deleted or replaced, every write raises StoreLost (`files.py`). Reads still see the open file.
"""

import asyncio
import contextlib
import functools
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from antiphon.errors import AntiphonError, ConfigError, StoreUnavailable, Unavailable
from antiphon.store.chain_cache import ChainCache
from antiphon.store.changes import OnChange
from antiphon.store.item_offsets import OffsetCache
from antiphon.store.limits import DEFAULT_LIMITS, StoreLimits
from antiphon.store.migration_files import read_migrations
from antiphon.store.operations import QueuedOperation, WriterCheck, resolve_waiters
from antiphon.store.peer_link import StorePeerLink
from antiphon.store.sql_steps import MAX_ROWS, RowInsert
from antiphon.store.sqlite.checkpoints import LogLimiter
from antiphon.store.sqlite.files import DatabaseFiles
from antiphon.store.sqlite.health import StoreHealth, check_disk, describe_error
from antiphon.store.sqlite.leases import LiveProcesses, locate_owners
from antiphon.store.sqlite.migrations import migrate
from antiphon.store.sqlite.open_errors import describe_open_error
from antiphon.store.write_observer import OnWrite, count_failures

# Seconds to wait for a lock that another process holds.
BUSY_TIMEOUT = 30.0

# Number of whole responses that are read at once.
CONCURRENT_READS = 4


class OutsideTransaction(NamedTuple):
    """A function that is called with the connection and the parameters after a transaction, not in one."""

    function: Callable[..., object]


# A statement, or a function that is called with the connection and the parameters and may execute several statements.
Work = str | RowInsert | OutsideTransaction | Callable[..., object]


ExecuteBatch = Callable[[sqlite3.Connection, list[QueuedOperation]], None]

_IGNORE_CLOSED_LOOP = contextlib.suppress(RuntimeError)


class ConnectionThread:
    """A thread with one connection. It executes operations in batches: all that are waiting at a time.

    `execute_batch` sets the outcome of each operation. If it raises, all operations of the batch get the exception.
    The connection is closed at the end only if `files` can be closed. Otherwise it stays open until the process ends.
    """

    def __init__(
        self, name: str, connection: sqlite3.Connection, execute_batch: ExecuteBatch, files: DatabaseFiles
    ) -> None:
        self._connection = connection
        self._files = files
        self._execute_batch = execute_batch
        self._queue: queue.SimpleQueue[Sequence[QueuedOperation] | None] = queue.SimpleQueue()
        self._outbox: list[QueuedOperation] = []
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        # A daemon thread does not keep a process alive that ends without closing its store.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Work, parameters: Sequence[object]) -> asyncio.Future[Any]:
        """Queue work and return a future for its result. Cancelling the future does not stop the work."""
        if self._closing:
            raise Unavailable("The store is not open.")
        waiter = self._loop.create_future()
        if not self._outbox:
            self._loop.call_soon(self._send)
        self._outbox.append(QueuedOperation(work, parameters, waiter))
        return waiter

    async def close(self) -> None:
        """Execute queued operations, then disconnect."""
        if not self._closing:
            self._closing = True
            self._send()
            self._queue.put(None)
        await asyncio.shield(self._finished)

    def _send(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._queue.put(outbox)

    def _run(self) -> None:
        closing = False
        while not closing:
            taken = [self._queue.get()]
            taken += [self._queue.get() for _ in range(self._queue.qsize())]
            batch = [operation for operations in taken if operations is not None for operation in operations]
            closing = None in taken
            if batch:
                self._execute(batch)
                self._call_loop(_resolve_waiters, batch)
        can_be_closed = self._files.can_be_closed
        if can_be_closed:
            self._connection.close()
        self._call_loop(self._finished.set_result, None)
        if not can_be_closed:
            threading.Event().wait()  # forever: a connection that no thread holds is closed by the interpreter

    def _execute(self, batch: list[QueuedOperation]) -> None:
        try:
            self._execute_batch(self._connection, batch)
        except Exception as error:
            for operation in batch:
                operation.outcome = error

    def _call_loop(self, callback: Callable[[Any], object], argument: object) -> None:
        # If the loop is closed, no caller waits.
        with _IGNORE_CLOSED_LOOP:
            self._loop.call_soon_threadsafe(callback, argument)


class Database:
    """Base of the parts of the SQLite store. `now` is the clock for expiry and leases.

    The default for `configuration_id` is a random one, which no other process has. `schema` is the folder of the
    migrations.
    """

    schema = "sqlite"
    reports_changes = False
    peer_link: StorePeerLink | None = None

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.time,
        configuration_id: str | None = None,
        limits: StoreLimits = DEFAULT_LIMITS,
    ) -> None:
        self.path = path
        self._limits = limits
        self._files = DatabaseFiles(path)
        self._health = StoreHealth(self._files, min_free_bytes=limits.min_free_bytes)
        self._check = WriterCheck()
        self._now = now
        self.configuration_id = configuration_id or secrets.token_hex(16)
        self.on_change: OnChange | None = None
        self.on_write: OnWrite | None = None
        self._reads = asyncio.Semaphore(CONCURRENT_READS)
        self._large_reads = asyncio.Lock()
        self._chain_locks = WeakValueDictionary[tuple[str, str], asyncio.Lock]()
        self._offsets = OffsetCache()
        self._processes = LiveProcesses(locate_owners(path))
        self._threads: tuple[ConnectionThread, ConnectionThread] | None = None
        self._chain_cache = ChainCache(max_bytes=limits.chain_cache_bytes)

    async def open(self) -> None:
        writer, reader = await asyncio.to_thread(_open_connections, self.path, self._files, self.schema)
        write_batch: ExecuteBatch = self._make_batch_writer(writer).execute
        if self.on_write is not None:
            write_batch = _measure_writes(write_batch, self.on_write)
        self._threads = (
            ConnectionThread("store-writer", writer, write_batch, self._files),
            ConnectionThread("store-reader", reader, _read_batch, self._files),
        )

    def _make_batch_writer(self, connection: sqlite3.Connection) -> "BatchWriter":
        max_bytes = self._limits.wal_bytes
        connection.execute(f"PRAGMA journal_size_limit = {max_bytes}")
        return BatchWriter(self._health, LogLimiter(self._files, max_bytes=max_bytes))

    async def close(self) -> None:
        if self._threads is not None:
            await asyncio.gather(*(thread.close() for thread in self._threads))
            self._files.close()
        self._chain_cache.clear()
        self._processes.unregister_all()

    @property
    def failure(self) -> StoreUnavailable | None:
        return self._health.failure

    async def check(self) -> None:
        writer, parameters = self._writer, (self.path, self._limits.min_free_bytes, self._health)
        await self._check.run(lambda: writer.submit(_check_writable, parameters), self.failure)

    @property
    def _writer(self) -> ConnectionThread:
        if self._threads is None:
            raise Unavailable("The store is not open.")
        return self._threads[0]

    @property
    def _reader(self) -> ConnectionThread:
        if self._threads is None:
            raise Unavailable("The store is not open.")
        return self._threads[1]


def create_file(path: Path) -> None:
    """Create the file and the folders above it if they do not exist.

    Only the user of the process can read them. SQLite gives its log the permissions of the file.
    """
    for folder in reversed(path.absolute().parents):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        path.touch(mode=0o600)


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection for reading or writing. Only one thread at a time may use it."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
    # Text that was damaged must not fail the query of other rows.
    connection.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
    try:
        # The first two are for a new file. A commit writes whole pages: six for a typical response.
        connection.execute("PRAGMA page_size = 4096")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        _switch_to_wal(connection)
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _resolve_waiters(batch: list[QueuedOperation]) -> None:
    resolve_waiters(batch, _describe_outcome)


def _describe_outcome(error: Exception) -> Exception:
    # A function of an operation raises AntiphonError itself.
    return error if isinstance(error, AntiphonError) else describe_error(error)


class BatchWriter:
    """Executes batches of writes, and checks that the committed data is in the files at the path."""

    def __init__(self, health: StoreHealth, log_limiter: LogLimiter) -> None:
        self._health = health
        self._log_limiter = log_limiter

    def execute(self, connection: sqlite3.Connection, batch: list[QueuedOperation]) -> None:
        """Execute a batch in one transaction. An operation that fails does not affect the others."""
        self._health.check_before_write()
        try:
            if not _insert_rows(connection, batch) and not _write_alone(connection, batch):
                _write_in_transaction(connection, batch)
        except Exception as error:
            self._health.report_error(error)
            raise
        self._health.check_after_write()
        self._log_limiter.apply(connection)


def _measure_writes(write_batch: ExecuteBatch, on_write: OnWrite) -> ExecuteBatch:
    """Return a function that executes a batch and reports its duration and failures."""

    def write_and_report(connection: sqlite3.Connection, batch: list[QueuedOperation]) -> None:
        began_at = time.perf_counter()
        failures = len(batch)
        try:
            write_batch(connection, batch)
            failures = count_failures(batch)
        finally:
            on_write(time.perf_counter() - began_at, failures)

    return write_and_report


def _check_writable(connection: sqlite3.Connection, path: Path, min_free_bytes: int, health: StoreHealth) -> None:
    """Raise StoreUnavailable if the disk cannot take data. If the last write failed, try to write again."""
    check_disk(path, min_free_bytes=min_free_bytes)
    if health.failure is not None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        connection.execute(f"PRAGMA user_version = {version}")  # writes a page, and changes nothing


def _insert_rows(connection: sqlite3.Connection, batch: list[QueuedOperation]) -> bool:
    """Execute a batch of equal inserts as one statement, which is a transaction of its own.

    The thread then takes the interpreter lock three times instead of at least nine times, and delays the event loop
    less. Return False, and change nothing, if the operations have to be executed one by one.
    """
    insert = batch[0].work
    if not isinstance(insert, RowInsert) or len(batch) > MAX_ROWS:
        return False
    rows: list[object] = []
    for operation in batch:
        if operation.work is not insert:
            return False
        rows += operation.parameters
    try:
        connection.execute(insert.for_rows(len(batch)), rows)
    except Exception as error:
        if _is_locked(error):  # no row can be written, and each attempt waits for the lock
            raise
        return False  # one of the rows is invalid, or does not fit the disk
    return True


def _write_alone(connection: sqlite3.Connection, batch: list[QueuedOperation]) -> bool:
    """Execute a batch of one statement, which is a transaction of its own. Return False if it is another batch."""
    operation = batch[0]
    if len(batch) > 1 or not isinstance(operation.work, str):
        return False
    try:
        operation.outcome = connection.execute(operation.work, operation.parameters).rowcount
    except sqlite3.OperationalError:  # a lock, a full disk or a damaged file
        raise
    except Exception as error:  # the row is invalid
        operation.outcome = error
    return True


def _is_locked(error: Exception) -> bool:
    """Return True if another process holds the lock."""
    # The low byte is the kind of the error, without its details.
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def _write_in_transaction(connection: sqlite3.Connection, batch: list[QueuedOperation]) -> None:
    outside = [operation for operation in batch if isinstance(operation.work, OutsideTransaction)]
    connection.execute("BEGIN IMMEDIATE")
    try:
        for operation in batch:
            if operation in outside:
                continue
            try:
                operation.outcome = _write(connection, operation.work, operation.parameters)
            except Exception as error:
                operation.outcome = error
                if not connection.in_transaction:  # disk full or I/O error: SQLite has rolled back the whole batch
                    raise
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    for operation in outside:
        assert isinstance(operation.work, OutsideTransaction)
        try:
            operation.outcome = operation.work.function(connection, *operation.parameters)
        except Exception as error:
            operation.outcome = error


def _write(connection: sqlite3.Connection, work: Work, parameters: Sequence[object]) -> object:
    """Return the result of a function, or the number of changed rows for a statement."""
    if isinstance(work, RowInsert):
        work = work.one_row
    if isinstance(work, str):
        return connection.execute(work, parameters).rowcount
    assert callable(work)
    return _write_atomically(connection, work, parameters)


def _write_atomically(
    connection: sqlite3.Connection, function: Callable[..., object], parameters: Sequence[object]
) -> object:
    """Call a function in a savepoint, so that either all of its statements take effect or none."""
    connection.execute("SAVEPOINT operation")
    try:
        outcome = function(connection, *parameters)
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK TO operation")
            connection.execute("RELEASE operation")
        raise
    connection.execute("RELEASE operation")
    return outcome


def _read_batch(connection: sqlite3.Connection, batch: list[QueuedOperation]) -> None:
    for operation in batch:
        try:
            if isinstance(operation.work, str):
                operation.outcome = connection.execute(operation.work, operation.parameters).fetchall()
            else:
                assert callable(operation.work)
                operation.outcome = _read_consistently(connection, operation.work, operation.parameters)
        except Exception as error:
            operation.outcome = error


def _read_consistently(
    connection: sqlite3.Connection, function: Callable[..., object], parameters: Sequence[object]
) -> object:
    """Call a function in a transaction, so that all of its statements see the same state."""
    connection.execute("BEGIN")
    try:
        return function(connection, *parameters)
    finally:
        connection.execute("ROLLBACK")


def _open_connections(path: Path, files: DatabaseFiles, schema: str) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """Create the file if there is none, migrate it, and return a connection for writing and one for reading."""
    try:
        create_file(path)
        opened = files.identify()
        writer = connect(path)
        try:
            migrate(writer, read_migrations(schema), path=str(path))
            (page_size,) = writer.execute("PRAGMA page_size").fetchone()
            files.record(opened, page_size=page_size)
            reader = connect(path)
        except BaseException:
            writer.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"The store {path} cannot be opened: {describe_open_error(path, error)}") from error
    except UnicodeDecodeError as error:  # the message of an error of SQLite, with a part of a damaged schema
        raise ConfigError(f"The store {path} cannot be opened: the file is damaged.") from error
    reader.execute("PRAGMA query_only = ON")
    return writer, reader


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    # If several processes open a new file, SQLite fails with SQLITE_BUSY at once instead of waiting for the timeout.
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not _is_locked(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
