"""The connections to MCP servers, shared by all responses of the process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from antiphon.errors import Unavailable
from antiphon.tools.hosted.mcp.targets import McpTarget
from antiphon.tools.mcp_client import McpClient

IDLE_SECONDS = 300.0
MAX_CONNECTIONS = 256


class _Entry:
    def __init__(self, client: McpClient) -> None:
        self.client = client
        self.users = 0
        self.timer: asyncio.TimerHandle | None = None


class McpConnections:
    """One client for each server and credentials. A client that was not used for `idle_seconds` is closed.

    If there are too many clients, the one that has been idle longest is closed. Raises Unavailable if all are in use.
    """

    def __init__(self, *, idle_seconds: float = IDLE_SECONDS, max_connections: int = MAX_CONNECTIONS) -> None:
        self._idle_seconds = idle_seconds
        self._max_connections = max_connections
        self._entries: dict[tuple[str, ...], _Entry] = {}  # the least recently used first
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def use(self, target: McpTarget) -> AsyncIterator[McpClient]:
        """Yield the client of a server."""
        entry = self._take(target)
        try:
            yield entry.client
        finally:
            self._release(target.key, entry)

    def _take(self, target: McpTarget) -> _Entry:
        entry = self._entries.pop(target.key, None)
        if entry is None:
            if len(self._entries) >= self._max_connections:
                self._evict()
            entry = _Entry(McpClient(f"'{target.label}'", target.transports))
        self._entries[target.key] = entry
        entry.users += 1
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        return entry

    def _release(self, key: tuple[str, ...], entry: _Entry) -> None:
        entry.users -= 1
        if not entry.users and self._entries.get(key) is entry:
            entry.timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._drop, key)

    def _evict(self) -> None:
        idle = next((key for key, entry in self._entries.items() if not entry.users), None)
        if idle is None:
            raise Unavailable("Too many connections to MCP servers are in use.", retry_after=1.0)
        self._drop(idle)

    def _drop(self, key: tuple[str, ...]) -> None:
        entry = self._entries.pop(key)
        if entry.timer is not None:
            entry.timer.cancel()
        task = asyncio.get_running_loop().create_task(entry.client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all connections."""
        for key in list(self._entries):
            self._drop(key)
        if self._closing:
            await asyncio.wait(self._closing)
