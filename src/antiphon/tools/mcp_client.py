"""A client of one MCP server. It replaces a lost connection."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from antiphon.errors import AntiphonError, Unavailable
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.mcp_connection import LIST_SECONDS, Connect, Handshake, McpConnection, McpFailure

if TYPE_CHECKING:
    from mcp.types import Tool as McpTool

# Statuses with which a server of the older HTTP+SSE transport answers a POST to its URL.
_OTHER_TRANSPORT = frozenset({400, 404, 405})


class McpClient:
    """Calls the tools of one server. The first use connects, and the next use after a loss connects again.

    `transports` are tried in order: the next one if the server answers that it does not support the one before.
    `on_open` is awaited with each new connection. With `on_change`, the client subscribes to changes of the tools.
    `callbacks` answer requests of the server: see `mcp_requests.py`. With them, the older handshake is tried first:
    since 2026-07-28 the protocol has no requests of a server in the middle of a call.
    """

    def __init__(
        self,
        name: str,
        transports: Sequence[Connect],
        *,
        on_open: Callable[[McpConnection], Awaitable[Any]] | None = None,
        on_change: Callable[[], None] | None = None,
        callbacks: Mapping[str, Any] | None = None,
        timeout: float = LIST_SECONDS,
    ) -> None:
        self._name = name
        handshakes: tuple[Handshake, ...] = ("legacy", "auto") if callbacks else ("auto",)
        self._attempts = [(transport, handshake) for transport in transports for handshake in handshakes]
        self._on_open = on_open
        self._on_change = on_change
        self._callbacks = callbacks
        self._timeout = timeout
        self._connection: McpConnection | None = None
        self._closed = False
        self._connecting = asyncio.Lock()

    async def connect(self) -> McpConnection:
        """Return the connection. If there is none, or it is lost, open a new one."""
        async with self._connecting:
            if self._closed:
                raise Unavailable(f"The connection to the MCP server {self._name} is closed.")
            if self._connection is None or self._connection.state.lost:
                await self._open()
            assert self._connection is not None
            return self._connection

    async def list_tools(self) -> "list[McpTool]":
        """Return the tools. If an earlier connection turns out to be lost, list them on a new one."""
        known = self._connection
        connection = await self.connect()
        try:
            return await connection.list_tools()
        except AntiphonError:
            if connection is not known or not connection.state.lost:
                raise
        return await (await self.connect()).list_tools()

    async def call(self, name: str, arguments: JsonObject, *, meta: Any, report: Callable[[str], None]) -> JsonObject:
        """Call a tool. If the server has forgotten the session, and so has not executed the call, try once more."""
        connection = await self.connect()
        try:
            return await connection.call(name, arguments, meta=meta, report=report)
        except AntiphonError:
            if not connection.state.expired:
                raise
        connection = await self.connect()
        return await connection.call(name, arguments, meta=meta, report=report)

    async def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            await self._connection.close()

    async def _open(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        while True:
            transport, handshake = self._attempts[0]
            connection = self._connection = McpConnection(
                self._name,
                transport,
                self._on_change,
                callbacks=self._callbacks,
                handshake=handshake,
                timeout=self._timeout,
            )
            try:
                await connection.open()
                break
            except AntiphonError as error:
                refused = connection.state.http_status in _OTHER_TRANSPORT
                if len(self._attempts) == 1 or not (refused or _refuses_handshake(error, handshake)):
                    raise
            del self._attempts[0]
        if self._on_open is not None:
            await self._on_open(connection)


def _refuses_handshake(error: AntiphonError, handshake: Handshake) -> bool:
    """Return True if a server that knows only the newer handshake may have refused the older one."""
    return handshake == "legacy" and isinstance(error, McpFailure) and error.number is not None
