"""The writer of a PostgreSQL store: one connection, on which all waiting writes are committed together.

While one transaction is being committed, further writes wait, and the next transaction has all of them. So the number
of commits does not grow with the number of requests.

Each caller gets its own error. An operation raises AntiphonError only before it has changed anything. Any other error
rolls back the whole transaction; then its operations are executed one by one.

If the connection is lost, the transaction is repeated on a new one, unless it may have been committed and would then
have another effect. Such operations raise StoreUnavailable.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from antiphon.errors import AntiphonError, StoreUnavailable, Unavailable
from antiphon.store.operations import QueuedOperation, resolve_waiters
from antiphon.store.postgres.connection import (
    BEGIN,
    CONFLICTS,
    CONNECTION_ERRORS,
    LOST,
    OPENING_ERRORS,
    DatabaseHealth,
    PostgresConnector,
    close,
    describe_error,
    is_uncommitted,
    roll_back,
)
from antiphon.store.write_observer import OnWrite, count_failures

if TYPE_CHECKING:
    from asyncpg import Connection

# Maximum number of operations in one transaction.
MAX_BATCH = 256
# After a failed attempt to connect, operations fail at once for this time.
RECONNECT_SECONDS = 0.5
# Number of times that an operation is repeated after a deadlock.
MAX_CONFLICTS = 5


class GroupedStatement(NamedTuple):
    """A statement with exactly one row as its result. The first value of the row is the result of the operation.

    Neighbouring operations with the same statement need one round trip together. `is_idempotent`: executing it twice
    has the same effect as once. `after_repeat` follows a repetition if the first execution may have been committed.
    Its parameters are the first two.
    """

    text: str
    is_idempotent: bool = False
    after_repeat: str | None = None


# A function is called with the connection and the parameters, in a transaction.
Work = GroupedStatement | Callable[..., Awaitable[object]]


class GroupWriter:
    """Executes operations on one connection, in batches: all that are waiting at a time."""

    def __init__(
        self, connector: PostgresConnector, health: DatabaseHealth, *, on_write: OnWrite | None = None
    ) -> None:
        self._connector = connector
        self._health = health
        self._connection: Connection[Any] | None = None
        self._waiting: list[QueuedOperation] = []
        self._wake = asyncio.Event()
        self._closing = False
        self._on_write = on_write
        self._next_connect = 0.0
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())

    def submit(self, work: Work, parameters: Sequence[object]) -> asyncio.Future[Any]:
        """Queue work and return a future for its result. Cancelling the future does not stop the work."""
        if self._closing:
            raise Unavailable("The store is not open.")
        waiter = self._loop.create_future()
        self._waiting.append(QueuedOperation(work, parameters, waiter))
        self._wake.set()
        return waiter

    async def close(self) -> None:
        """Execute waiting operations, then disconnect."""
        self._closing = True
        self._wake.set()
        await asyncio.shield(self._task)

    async def _run(self) -> None:
        while self._waiting or not self._closing:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                began_at = time.perf_counter()
                await self._execute(batch)
                if self._on_write is not None:
                    failures = count_failures(batch)
                    self._on_write(time.perf_counter() - began_at, failures)
                resolve_waiters(batch, describe_error)
        if self._connection is not None:
            await close(self._connection)

    async def _execute(self, batch: list[QueuedOperation]) -> None:
        """Set the outcome of each operation."""
        try:
            await self._write_batch(batch)
        except (*CONNECTION_ERRORS, StoreUnavailable) as error:
            _fail_all(batch, self._health.report_error(error))
        except Exception as error:
            if len(batch) == 1:
                batch[0].outcome = self._health.report_error(error)
                return
            for operation in batch:
                operation.outcome = None
                await self._execute([operation])
        else:
            self._health.report_success()

    async def _write_batch(self, batch: list[QueuedOperation]) -> None:
        conflicts = 0
        has_reconnected = is_repeated = False
        while True:
            connection = await self._get_connection()
            attempt = _Attempt(connection, is_pooled=bool(self._connector.is_pooled), is_repeated=is_repeated)
            try:
                await attempt.execute(batch)
                return
            except CONFLICTS:
                conflicts += 1
                if len(batch) > 1 or conflicts > MAX_CONFLICTS:
                    raise
            except CONNECTION_ERRORS as error:
                self._discard_connection()
                can_repeat = attempt.can_repeat or is_uncommitted(error)
                if has_reconnected or not (can_repeat or _are_idempotent(batch)):
                    raise
                has_reconnected, is_repeated = True, not can_repeat
            finally:
                await attempt.clean_up()

    async def _get_connection(self) -> "Connection[Any]":
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        if time.monotonic() < self._next_connect:
            raise StoreUnavailable(LOST)
        try:
            self._connection = await self._connector.connect()
        except OPENING_ERRORS as error:
            self._next_connect = time.monotonic() + RECONNECT_SECONDS
            failure = self._health.report_error(error)
            if isinstance(failure, StoreUnavailable):
                raise failure from None
            raise StoreUnavailable(LOST) from error
        return self._connection

    def _discard_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


class _Attempt:
    """One transaction. `can_repeat` is False from the moment at which it may have been committed.

    `is_repeated`: an earlier attempt may have been committed.
    """

    def __init__(self, connection: "Connection[Any]", *, is_pooled: bool, is_repeated: bool) -> None:
        self._connection = connection
        self._needs_begin = is_pooled or is_repeated
        self._is_repeated = is_repeated
        self.can_repeat = True

    async def execute(self, batch: list[QueuedOperation]) -> None:
        groups = [(work, list(group)) for work, group in groupby(batch, key=lambda operation: operation.work)]
        if len(groups) == 1 and isinstance(groups[0][0], GroupedStatement) and not self._needs_begin:
            self.can_repeat = False
            await _execute_group(self._connection, *groups[0])  # a transaction of its own
            return
        await self._connection.execute(BEGIN)
        for work, group in groups:
            await _execute_group(self._connection, work, group)
        if self._is_repeated:
            await self._correct(batch)
        # The session may have ended since the last result. Then the COMMIT is not sent.
        self.can_repeat = self._connection.is_closed()
        await self._connection.execute("COMMIT")

    async def _correct(self, batch: Sequence[QueuedOperation]) -> None:
        for operation in batch:
            if isinstance(operation.work, GroupedStatement) and operation.work.after_repeat is not None:
                await self._connection.execute(operation.work.after_repeat, *operation.parameters[:2])

    async def clean_up(self) -> None:
        """End a transaction that has failed."""
        if not self._connection.is_closed() and self._connection.is_in_transaction():
            await roll_back(self._connection)


async def _execute_group(connection: "Connection[Any]", work: Work, group: list[QueuedOperation]) -> None:
    if isinstance(work, GroupedStatement):
        rows = await connection.fetchmany(work.text, [operation.parameters for operation in group])
        for operation, row in zip(group, rows, strict=True):
            operation.outcome = row[0]
        return
    for operation in group:
        try:
            operation.outcome = await work(connection, *operation.parameters)
        except AntiphonError as error:  # raised before it has changed anything
            operation.outcome = error


def _are_idempotent(batch: Sequence[QueuedOperation]) -> bool:
    return all(isinstance(operation.work, GroupedStatement) and operation.work.is_idempotent for operation in batch)


def _fail_all(batch: Sequence[QueuedOperation], error: AntiphonError) -> None:
    for operation in batch:
        operation.outcome = error
