"""A scripted upstream: HTTP answers on a loopback socket, valid and broken.

    async with serve([Reply(status=500), stream_of(b'data: {"a":1}\n\n', b"data: [DONE]\n\n")]) as upstream:
        ...                          # the code under test connects to upstream.url (http://127.0.0.1:PORT/v1)
        assert upstream.requests[0].json == {...}

Each request gets the next reply of the list, in the order in which the requests come; one too many gets a 500 that says
so. Paths in `fixed` (such as "/v1/models") always get the same reply instead, and use up nothing of the list.

A reply's `body` is sent whole, with its length. With `pieces` it is sent in HTTP chunks, one write for each piece, so a
message can be cut anywhere. Between them may stand: STALL (send nothing until the client hangs up), RESET (break the
connection with an RST), HANG_UP (close it in the middle), `Raw(b"...")` (bytes on the wire that are no HTTP chunk), or
an asyncio.Event, which is waited for. `raw` sends these bytes instead of any answer, then closes; RESET or STALL as
`raw` do that before a single byte is sent.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

TIMEOUT = 20


class Act(Enum):
    STALL = "say nothing until the client hangs up"
    RESET = "break the connection"
    HANG_UP = "close the connection"


STALL, RESET, HANG_UP = Act.STALL, Act.RESET, Act.HANG_UP


@dataclass(frozen=True)
class Raw:
    data: bytes


Piece = bytes | Raw | Act | asyncio.Event


@dataclass(kw_only=True)
class Reply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    pieces: Sequence[Piece] | None = None
    raw: bytes | Act | None = None


def stream_of(*pieces: Piece, **headers: str) -> Reply:
    """Return an event stream in these chunks."""
    return Reply(headers={"Content-Type": "text/event-stream"} | headers, pieces=pieces)


def json_of(value: Any, status: int = 200, **headers: str) -> Reply:
    """Return a JSON body. Headers are keywords: `Retry_After="2"` is Retry-After."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Reply(status=status, headers={"Content-Type": "application/json"} | named, body=json.dumps(value).encode())


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # without the query
    query: dict[str, str]
    headers: dict[str, str]  # lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class UpstreamServer:
    """The server of `serve`: its address, and the requests so far."""

    def __init__(self, replies: Sequence[Reply], fixed: Mapping[str, Reply]) -> None:
        self.requests: list[Request] = []
        self.connections = 0
        self.hang_ups = 0
        """Return the number of answers that the client did not read to the end."""
        self.port = 0
        self.scheme = "http"
        self._replies = list(replies)
        self._fixed = fixed
        self._change = asyncio.Condition()
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/v1"

    def add(self, *replies: Reply) -> None:
        self._replies += replies

    def replace(self, *replies: Reply) -> None:
        """Replace the remaining replies."""
        self._replies = list(replies)

    async def until_requests(self, count: int) -> None:
        """Wait for this number of requests."""
        await self._wait_until(lambda: len(self.requests) >= count)

    async def until_hang_ups(self, count: int = 1) -> None:
        """Wait until the client has closed this number of unfinished answers."""
        await self._wait_until(lambda: self.hang_ups >= count)

    async def _wait_until(self, is_so: Any) -> None:
        async with asyncio.timeout(TIMEOUT), self._change:
            await self._change.wait_for(is_so)

    async def _note(self, *, hang_up: bool = False) -> None:
        async with self._change:
            self.hang_ups += hang_up
            self._change.notify_all()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        try:
            while (request := await _read_request(reader)) is not None:
                self.requests.append(request)
                await self._note()
                await self._answer(self._choose(request), reader, writer)
                if writer.is_closing():
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            await self._note(hang_up=True)
        finally:
            del self._open[task]
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    def _choose(self, request: Request) -> Reply:
        if request.path in self._fixed:
            return self._fixed[request.path]
        if not self._replies:
            return json_of({"error": {"message": f"no reply is left for {request.method} {request.path}"}}, 500)
        return self._replies.pop(0)

    async def _answer(self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if reply.raw is not None:
            await self._send(reply.raw if isinstance(reply.raw, Act) else Raw(reply.raw), reader, writer)
            writer.close()
            return
        headers = dict(reply.headers)
        if reply.pieces is None:
            headers.setdefault("Content-Length", str(len(reply.body)))
        else:
            headers["Transfer-Encoding"] = "chunked"
        phrase = HTTPStatus(reply.status).phrase if reply.status in set(HTTPStatus) else "Unknown"
        lines = [f"HTTP/1.1 {reply.status} {phrase}", *(f"{name}: {text}" for name, text in headers.items()), "", ""]
        writer.write("\r\n".join(lines).encode("latin-1") + (reply.body if reply.pieces is None else b""))
        await writer.drain()
        if reply.pieces is not None:
            await self._send_pieces(reply.pieces, reader, writer)

    async def _send_pieces(
        self, pieces: Sequence[Piece], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        for piece in pieces:
            await self._send(piece, reader, writer)
            if writer.is_closing():
                return
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _send(self, piece: Piece, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(piece, asyncio.Event):
            await self._stay(reader, until=piece)
        elif piece is STALL:
            await self._stay(reader, until=asyncio.Event())
        elif piece is RESET:
            raw: socket.socket = writer.get_extra_info("socket")
            # No lingering: closing then sends an RST instead of a FIN.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif piece is HANG_UP:
            writer.close()
        else:
            assert isinstance(piece, bytes | Raw)
            writer.write(piece.data if isinstance(piece, Raw) else b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            # Without this pause the socket may send two chunks together.
            await asyncio.sleep(0)

    async def _stay(self, reader: asyncio.StreamReader, *, until: asyncio.Event) -> None:
        """Wait for the event, or for the client to disconnect."""
        waiting = asyncio.create_task(until.wait())
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await gone
                raise ConnectionResetError
        finally:
            for task in (waiting, gone):
                task.cancel()
            await asyncio.gather(waiting, gone, return_exceptions=True)

    async def stop(self) -> None:
        for writer in self._open.values():
            writer.transport.abort()
        await asyncio.gather(*self._open, return_exceptions=True)


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    """Return the next request of a connection, or None at its end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    path, _, query = target.partition("?")
    headers = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, dict(parse_qsl(query)), headers, body)


@asynccontextmanager
async def serve(
    replies: Sequence[Reply] = (), *, fixed: Mapping[str, Reply] | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[UpstreamServer]:
    """Serve these replies until the block ends."""
    upstream = UpstreamServer(replies, fixed or {})
    server = await asyncio.start_server(upstream.handle, "127.0.0.1", 0, ssl=tls)
    upstream.port = server.sockets[0].getsockname()[1]
    upstream.scheme = "https" if tls else "http"
    try:
        yield upstream
    finally:
        server.close()
        await upstream.stop()
        await server.wait_closed()
