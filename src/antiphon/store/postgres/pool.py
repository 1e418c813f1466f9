"""The connections of a PostgreSQL store for reading, and for transactions that are not grouped with others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from antiphon.errors import Unavailable
from antiphon.store.postgres.connection import (
    CONNECTION_ERRORS,
    DatabaseHealth,
    PostgresConnector,
    close,
    run_transaction,
)
from antiphon.store.postgres.driver import asyncpg

if TYPE_CHECKING:
    from asyncpg import Connection, Record


class PostgresPool:
    """Up to `size` connections, opened when they are needed. The one used last is used next.

    Unlike asyncpg's own pool, it sends no statement to reset a connection: no state of a session is used.
    """

    def __init__(self, connector: PostgresConnector, health: DatabaseHealth, *, size: int) -> None:
        self._connector = connector
        self._health = health
        self._idle: list[Connection[Any]] = []
        self._slots = asyncio.Semaphore(size)
        self._closing = False

    def add(self, connection: "Connection[Any]") -> None:
        """Use a connection that was opened before."""
        self._idle.append(connection)

    async def submit(self, statement: str, parameters: Sequence[object] = ()) -> "list[Record]":
        """Return the rows of a query. It is repeated once if its connection was lost."""
        rows: list[Record] = await self.read(_fetch, (statement, parameters))
        return rows

    async def read(self, function: Callable[..., Awaitable[Any]], parameters: Sequence[object]) -> Any:
        """Call a function of the connection and the parameters. It changes nothing.

        It is repeated once if its connection was lost.
        """
        try:
            try:
                return await self._read(function, parameters)
            except CONNECTION_ERRORS:
                return await self._read(function, parameters)
        except (*CONNECTION_ERRORS, asyncpg.PostgresError) as error:
            described = self._health.report_error(error)
            raise described from described.__cause__

    async def _read(self, function: Callable[..., Awaitable[Any]], parameters: Sequence[object]) -> Any:
        async with self.use() as connection:
            if not self._connector.is_pooled:
                return await function(connection, *parameters)
            # Each transaction may get another session, and a query is more than one message.
            async with run_transaction(connection):
                return await function(connection, *parameters)

    @asynccontextmanager
    async def transact(self) -> "AsyncIterator[Connection[Any]]":
        """Run the body in a transaction of its own."""
        try:
            async with self.use() as connection, run_transaction(connection):
                yield connection
        except (*CONNECTION_ERRORS, asyncpg.PostgresError) as error:
            described = self._health.report_error(error)
            raise described from described.__cause__

    async def close(self) -> None:
        self._closing = True
        idle, self._idle = self._idle, []
        await asyncio.gather(*(close(connection) for connection in idle))

    @asynccontextmanager
    async def use(self) -> "AsyncIterator[Connection[Any]]":
        """Yield a connection. Errors are those of asyncpg."""
        if self._closing:
            raise Unavailable("The store is not open.")
        async with self._slots:
            idle = self._take_idle()
            connection = await self._connect() if idle is None else idle
            try:
                yield connection
            except CONNECTION_ERRORS:
                connection.terminate()
                self._discard_idle()
                raise
            finally:
                if self._closing:
                    connection.terminate()
                elif not connection.is_closed():
                    self._idle.append(connection)
            self._health.report_contact(is_lost=False)

    async def _connect(self) -> "Connection[Any]":
        try:
            return await self._connector.connect()
        except CONNECTION_ERRORS:
            self._health.report_contact(is_lost=True)
            raise

    def _discard_idle(self) -> None:
        """Close the idle connections: if the server was restarted, all of them are lost."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.terminate()

    def _take_idle(self) -> "Connection[Any] | None":
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return None


async def _fetch(connection: "Connection[Any]", statement: str, parameters: Sequence[object]) -> "list[Record]":
    rows: list[Record] = await connection.fetch(statement, *parameters)
    return rows
