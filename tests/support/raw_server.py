"""A server that sends given bytes, which need not be HTTP.

Each connection runs the next of the given handlers; the last one is repeated. Client and server share an event loop, so
a byte that is sent before a pause is received before the pause ends.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from antiphon.errors import AntiphonError, UpstreamError
from antiphon.upstream.http import HttpResponse, HttpSession

TIMEOUT = 20


class Peer:
    """The server's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read_head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def read_request(self) -> bytes:
        """Return the next request with its body."""
        head = await self.read_head()
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        return head + await self.reader.readexactly(int(lines.get(b"content-length", b"0")))

    async def send(self, *parts: bytes) -> None:
        """Send the parts so that the client receives them one by one."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            for _ in range(3):
                await asyncio.sleep(0)

    async def answer(self, *parts: bytes) -> None:
        """Read a request, and send the parts."""
        await self.read_request()
        await self.send(*parts)

    def reset(self) -> None:
        """Close the connection with an RST."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def until_closed(self) -> None:
        """Wait until the client has closed the connection."""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while await self.reader.read(65536):
                pass


Handler = Callable[[Peer], Awaitable[Any]]


def reply(*parts: bytes) -> Handler:
    """Return a handler that answers one request with these parts, and then closes the connection."""

    async def handle(peer: Peer) -> None:
        await peer.answer(*parts)

    return handle


def reply_always(answer: bytes) -> Handler:
    """Return a handler that answers every request of a connection."""

    async def handle(peer: Peer) -> None:
        while True:
            await peer.answer(answer)

    return handle


class RawServer:
    """The server of `serve_raw`."""

    def __init__(self, handlers: tuple[Handler, ...]) -> None:
        self.port = 0
        self.scheme = "http"
        self.connections = 0
        self.closed = 0
        self._handlers = handlers
        self._change = asyncio.Condition()
        self._running: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/v1"

    async def until_closed(self, count: int) -> None:
        """Wait until this number of connections has ended."""
        async with asyncio.timeout(TIMEOUT), self._change:
            await self._change.wait_for(lambda: self.closed >= count)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._handle(reader, writer))
        self._running[task] = writer
        task.add_done_callback(self._running.pop)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = self._handlers[min(self.connections, len(self._handlers) - 1)]
        self.connections += 1
        peer = Peer(reader, writer)
        try:
            await handler(peer)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        except RuntimeError:
            assert writer.transport.is_closing()  # uvloop raises it for a write to a closed connection
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()
            async with self._change:
                self.closed += 1
                self._change.notify_all()

    async def stop(self) -> None:
        for task, writer in self._running.items():
            task.cancel()
            writer.close()  # a task that has not started does not close it
        await asyncio.gather(*self._running, return_exceptions=True)


@asynccontextmanager
async def serve_raw(*handlers: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    raw = RawServer(handlers)
    server = await asyncio.start_server(raw.accept, "127.0.0.1", 0, ssl=tls)
    raw.port = server.sockets[0].getsockname()[1]
    raw.scheme = "https" if tls else "http"
    try:
        yield raw
    finally:
        server.close()
        await raw.stop()


def map_status(status: int, body: bytes, retry_after: float | None) -> AntiphonError:
    return UpstreamError(f"status {status}: {body.decode()}", retry_after=retry_after)


@asynccontextmanager
async def open_session(url: str, **options: Any) -> AsyncIterator[HttpSession]:
    session = HttpSession(url, **{"headers": {}, "map_error": map_status, "connect_timeout": 10.0} | options)
    session.open()
    try:
        yield session
    finally:
        await session.close()


async def read_all(response: HttpResponse) -> bytes:
    try:
        chunks = []
        while chunk := await response.read():
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        response.close()


async def fetch(session: HttpSession, method: str = "POST", body: bytes | None = b"{}", **options: Any) -> bytes:
    """Return the body of a response."""
    async with asyncio.timeout(TIMEOUT):
        return await read_all(await session.send(method, "/chat", body, **options))


async def fetch_once(*handlers: Handler, method: str = "POST") -> bytes:
    """Return the body of a response from a server with these handlers."""
    async with serve_raw(*handlers) as server, open_session(server.url) as session:
        return await fetch(session, method, b"{}" if method == "POST" else None)


def count_connections(session: HttpSession) -> int:
    """Return the number of connections that a session holds, idle or in use."""
    return len(session._pool) if session._pool is not None else 0


def count_used_connections(session: HttpSession) -> int:
    return len(session._pool) - len(session._pool._idle) if session._pool is not None else 0
