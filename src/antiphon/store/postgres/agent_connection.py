"""One connection to PostgreSQL, for the ledger and the sessions of agents."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from antiphon.errors import Unavailable
from antiphon.ledger import defer_cancellation
from antiphon.store.migration_files import read_migrations
from antiphon.store.postgres.connection import (
    CONNECTION_ERRORS,
    OPENING_ERRORS,
    PostgresConnector,
    ServerAddress,
    close,
    describe_error,
    explain_refusal,
    run_transaction,
)
from antiphon.store.postgres.driver import asyncpg
from antiphon.store.postgres.migrations import migrate

if TYPE_CHECKING:
    from asyncpg import Connection

T = TypeVar("T")

# The present: a parameter in tests, else the clock of the database.
NOW = "coalesce($1::float8, extract(epoch FROM clock_timestamp())::float8)"


class AgentConnection:
    """A connection that is opened on first use. The tables are created then. `noun` is its name in messages.

    Leases use the clock of the database, or `now` in tests. It can serve several event loops, one after the other. If
    the database cannot be reached, operations raise StoreUnavailable, and later ones connect again.
    """

    def __init__(self, url: str, *, noun: str, now: Callable[[], float] | None = None) -> None:
        self._address = ServerAddress(url)
        self._noun = noun
        self._clock = now
        self._connection: Connection[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._is_migrated = False
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            await _discard(connection, self._loop)

    async def _write(self, work: "Callable[[Connection[Any]], Awaitable[T]]", *, is_repeatable: bool = True) -> T:
        return await defer_cancellation(asyncio.ensure_future(self._run(work, is_repeatable=is_repeatable)))

    async def _run(self, work: "Callable[[Connection[Any]], Awaitable[T]]", *, is_repeatable: bool = True) -> T:
        """Run work in a transaction. If the connection was lost, it may have been committed, and is repeated once."""
        try:
            try:
                return await self._transact(work)
            except CONNECTION_ERRORS:
                if not is_repeatable:
                    raise
                return await self._transact(work)
        except (*CONNECTION_ERRORS, asyncpg.PostgresError) as error:
            described = describe_error(error)
            raise described from described.__cause__

    async def _transact(self, work: "Callable[[Connection[Any]], Awaitable[T]]") -> T:
        async with self._use() as connection, run_transaction(connection):
            return await work(connection)

    @asynccontextmanager
    async def _use(self) -> "AsyncIterator[Connection[Any]]":
        if self._is_closed:
            raise Unavailable(f"The {self._noun} is closed.")
        if self._loop is not asyncio.get_running_loop():
            former, self._connection = self._connection, None
            loop, self._loop = self._loop, asyncio.get_running_loop()
            self._lock = asyncio.Lock()
            if former is not None:
                await _discard(former, loop)
        async with self._lock:
            if self._connection is None or self._connection.is_closed():
                self._connection = await self._connect()
            connection = self._connection
            try:
                yield connection
            except CONNECTION_ERRORS:
                connection.terminate()
                raise
            finally:
                if self._is_closed:  # closed while the connection was opened
                    connection.terminate()

    async def _connect(self) -> "Connection[Any]":
        connector = PostgresConnector(self._address)
        try:
            connection = await connector.connect()
            try:
                if not self._is_migrated:
                    await migrate(connection, read_migrations("postgres"), name=str(self._address))
                    self._is_migrated = True
            except BaseException:
                connection.terminate()
                raise
            return connection
        except OPENING_ERRORS as error:
            if self._is_migrated:
                raise
            raise explain_refusal(self._address, error) from None

    def _read_clock(self) -> float | None:
        return None if self._clock is None else float(self._clock())


async def _discard(connection: "Connection[Any]", loop: asyncio.AbstractEventLoop | None) -> None:
    """Close a connection. One that belongs to a closed event loop is only dropped."""
    if loop is asyncio.get_running_loop():
        await close(connection)
    elif loop is not None and not loop.is_closed():
        loop.call_soon_threadsafe(connection.terminate)
