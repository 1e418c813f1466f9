"""One SQLite file, and the two threads that work on it.

A writer thread commits everything that waits for it in one transaction, synced to disk before anyone hears of it. A
reader thread has a connection of its own: with a write-ahead log, readers and the writer do not wait for each other.
Several processes may share the file.
"""

import asyncio
import contextlib
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from antiphon.errors import AntiphonError, ConfigError, ServerError, Unavailable
from antiphon.store.sqlite.leases import Owners
from antiphon.store.sqlite.migrations import migrate, read_migrations

# A statement, or a function that is called with the connection and the parameters and may execute several.
Work = str | Callable[..., object]


class Job:
    """Some work, the future of whoever waits for it, and what came of it: rows, a count, a result, or an error."""

    __slots__ = ("outcome", "parameters", "waiter", "work")

    def __init__(self, work: Work, parameters: Sequence[object], waiter: asyncio.Future[Any]) -> None:
        self.work = work
        self.parameters = parameters
        self.waiter = waiter
        self.outcome: object = None


Run = Callable[[sqlite3.Connection, list[Job]], None]


class Worker:
    """`run` executes a batch and leaves an outcome in each job; if it raises, the error is every job's outcome."""

    def __init__(self, name: str, connection: sqlite3.Connection, run: Run) -> None:
        self._connection = connection
        self._run = run
        self._jobs: queue.SimpleQueue[Sequence[Job] | None] = queue.SimpleQueue()
        self._outbox: list[Job] = []
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        # A process that ends without closing its store must not hang on this thread; nothing acknowledged is lost.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, work: Work, parameters: Sequence[object]) -> asyncio.Future[Any]:
        """Queue some work. It is executed even if the future is cancelled meanwhile."""
        if self._closing:
            raise Unavailable("The store is not open.")
        waiter = self._loop.create_future()
        if not self._outbox:
            self._loop.call_soon(self._send)
        self._outbox.append(Job(work, parameters, waiter))
        return waiter

    async def close(self) -> None:
        """Execute what is queued, then disconnect."""
        if not self._closing:
            self._closing = True
            self._send()
            self._jobs.put(None)
        await asyncio.shield(self._finished)

    def _send(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._jobs.put(outbox)

    def _work(self) -> None:
        closing = False
        while not closing:
            taken = [self._jobs.get()]
            taken += [self._jobs.get() for _ in range(self._jobs.qsize())]
            batch = [job for jobs in taken if jobs is not None for job in jobs]
            closing = None in taken
            if batch:
                self._execute(batch)
                self._call_loop(_answer, batch)
        self._connection.close()
        self._call_loop(self._finished.set_result, None)

    def _execute(self, batch: list[Job]) -> None:
        try:
            self._run(self._connection, batch)
        except Exception as error:
            for job in batch:
                job.outcome = error

    def _call_loop(self, callback: Callable[[Any], object], argument: object) -> None:
        # A closed loop has nobody left who waits; the jobs are done all the same.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, argument)


def _answer(batch: list[Job]) -> None:
    for job in batch:
        if job.waiter.done():  # cancelled: whoever asked has gone
            continue
        if isinstance(job.outcome, AntiphonError):  # raised by the job's own function
            job.waiter.set_exception(job.outcome)
        elif isinstance(job.outcome, Exception):
            # One error may be the outcome of many jobs, and each waiter raises one of its own.
            # What went wrong is for the log: a client has no use for it, and it may name tables and paths.
            failure = ServerError("The store failed.")
            failure.__cause__ = job.outcome
            job.waiter.set_exception(failure)
        else:
            job.waiter.set_result(job.outcome)


# How long a process waits for the others to let it write.
BUSY_SECONDS = 30.0


class Database:
    """The base of the store's parts. `now` tells what has expired. Without a `home`, this process is alone."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time, home: str | None = None) -> None:
        self.path = path
        self._now = now
        self.home = home or secrets.token_hex(16)
        self._owners = Owners(path.with_name(f"{path.name}-owners"))
        self._workers: tuple[Worker, Worker] | None = None

    async def open(self) -> None:
        writing, reading = await asyncio.to_thread(_prepare, self.path)
        self._workers = Worker("store-writer", writing, _write), Worker("store-reader", reading, _read)

    async def close(self) -> None:
        if self._workers is not None:
            await asyncio.gather(*(worker.close() for worker in self._workers))
        self._owners.leave_all()

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
    """Execute a batch in one transaction. A job that fails takes nothing of its neighbours with it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for job in batch:
            try:
                if isinstance(job.work, str):
                    job.outcome = connection.execute(job.work, job.parameters).rowcount
                else:
                    job.outcome = _write_apart(connection, job.work, job)
            except Exception as error:
                job.outcome = error
                if not connection.in_transaction:  # a full or broken disk: SQLite has taken back the whole batch
                    raise
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _write_apart(connection: sqlite3.Connection, function: Callable[..., object], job: Job) -> object:
    """Call a job's function so that all of its statements count, or none."""
    connection.execute("SAVEPOINT job")
    try:
        outcome = function(connection, *job.parameters)
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")
        raise
    connection.execute("RELEASE job")
    return outcome


def _read(connection: sqlite3.Connection, batch: list[Job]) -> None:
    for job in batch:
        try:
            if isinstance(job.work, str):
                job.outcome = connection.execute(job.work, job.parameters).fetchall()
            else:
                job.outcome = _read_apart(connection, job.work, job)
        except Exception as error:
            job.outcome = error


def _read_apart(connection: sqlite3.Connection, function: Callable[..., object], job: Job) -> object:
    """Call a job's function so that all of its statements see the same state."""
    connection.execute("BEGIN")
    try:
        return function(connection, *job.parameters)
    finally:
        connection.execute("ROLLBACK")


def _prepare(path: Path) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """Make the file if there is none, bring it up to date, and return a connection to write and one to read."""
    try:
        create_file(path)
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


def create_file(path: Path) -> None:
    """Make the file, and the folders above it, if there are none."""
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
