"""The connections to one server: idle ones for reuse, and new ones."""

import asyncio

from antiphon.upstream.http1.connect import Connector
from antiphon.upstream.http1.connection import Connection
from antiphon.upstream.http1.errors import Disconnected

MAX_IDLE_SECONDS = 15.0


class ConnectionPool:
    """Keeps connections for the next request, each for a limited time. Any number can be in use at once.

    The pool belongs to the running event loop.
    """

    def __init__(self, connector: Connector, *, max_idle_seconds: float = MAX_IDLE_SECONDS) -> None:
        self.loop = asyncio.get_running_loop()
        self._connector = connector
        self._max_idle_seconds = max_idle_seconds
        self._idle: dict[Connection, float] = {}  # each with the time at which it became idle, oldest first
        self._all: set[Connection] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def take_idle(self) -> Connection | None:
        """Return the connection that was used last, or None."""
        while self._idle:
            connection, since = self._idle.popitem()
            if connection.is_open and self.loop.time() - since < self._max_idle_seconds:
                return connection
            connection.abort()
        return None

    async def connect(self, *, deadline: float) -> Connection:
        """Open a new connection."""
        if self._is_closed:
            raise Disconnected
        connection = Connection(self.loop, self)
        self._all.add(connection)
        try:
            await self._connector.connect(connection, deadline=deadline)
        except BaseException:
            connection.abort()
            raise
        if self._is_closed:
            connection.abort()
        return connection

    def put(self, connection: Connection) -> None:
        self._idle[connection] = self.loop.time()
        if self._sweep_timer is None:
            self._sweep_timer = self.loop.call_later(self._max_idle_seconds, self._sweep)

    def forget(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._all.discard(connection)

    def close(self) -> None:
        """Close all connections, including those in use."""
        self._is_closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for connection in list(self._all):
            connection.abort()

    def __len__(self) -> int:
        """Return the number of connections, in use or not."""
        return len(self._all)

    def _sweep(self) -> None:
        self._sweep_timer = None
        oldest = self.loop.time() - self._max_idle_seconds
        for connection in [each for each, since in self._idle.items() if since <= oldest]:
            connection.abort()
        if self._idle:
            due = next(iter(self._idle.values())) + self._max_idle_seconds
            self._sweep_timer = self.loop.call_at(due, self._sweep)
