"""A minimal HTTP client with persistent connections. It parses as little as possible and measures times."""

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from typing import NamedTuple, cast

from benchmarks.workloads import FIRST_PIECE

HOST = "127.0.0.1"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class InvalidAnswer(Exception):
    """A server gave a wrong answer, so the measurement is invalid."""


class Answer(NamedTuple):
    """Head and body of an answer, and the seconds to the first byte of the body, to its end and to the first delta.

    `delta` is 0 if the answer has no text of the workloads.
    """

    head: bytes
    body: bytes
    first: float
    whole: float
    delta: float = 0.0

    @property
    def status(self) -> int:
        return int(self.head[9:12])

    @property
    def content(self) -> bytes:
        """The body without chunked framing."""
        if not _CHUNKED.search(self.head):
            return self.body
        chunks: list[bytes] = []
        start = 0
        while start < len(self.body):
            end = self.body.index(b"\r\n", start)
            size = int(self.body[start:end], 16)
            chunks.append(self.body[end + 2 : end + 2 + size])
            start = end + 2 + size + 2
        return b"".join(chunks)


class Connection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(InvalidAnswer(f"The server closed the connection: {exc or 'no reason given'}."))

    def send(self, request: bytes) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._waiter = asyncio.get_running_loop().create_future()
        self._received = bytearray()
        self._body_at = 0
        self._length: int | None = None
        self._first = self._delta = 0.0
        self._sent_at = time.perf_counter()
        if self.closed:
            self._waiter.set_exception(InvalidAnswer("The server closed an idle connection."))
        self._transport.write(request)
        return self._waiter

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._body_at and not self._read_head():
            return
        size = len(self._received) - self._body_at
        if size and not self._first:
            self._first = time.perf_counter() - self._sent_at
        if not self._delta and FIRST_PIECE in self._received:
            self._delta = time.perf_counter() - self._sent_at
        done = self._received.endswith(_LAST_CHUNK) if self._length is None else size >= self._length
        if done and self._waiter is not None and not self._waiter.done():
            whole = time.perf_counter() - self._sent_at
            head, body = bytes(self._received[: self._body_at]), bytes(self._received[self._body_at :])
            self._waiter.set_result(Answer(head, body, self._first, whole, self._delta))

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        self._body_at = end + 4
        length = _LENGTH.search(self._received, 0, end)
        self._length = int(length[1]) if length else None
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Client:
    """The connections to one server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: list[Connection] = []

    async def load(self, request: bytes, *, count: int, concurrency: int, seconds: float) -> list[Answer]:
        """Send the request `count` times, with `concurrency` requests in flight.

        Raises InvalidAnswer after `seconds`.
        """
        connections = await self.connect(concurrency)
        turns = iter(range(count))
        try:
            async with asyncio.timeout(seconds):
                parts = await asyncio.gather(*(_repeat(connection, request, turns) for connection in connections))
        except TimeoutError:
            raise InvalidAnswer(f"The server did not give {count} answers in {seconds:g} seconds.") from None
        return [answer for part in parts for answer in part]

    async def send(self, request: bytes, *, seconds: float = 10) -> Answer:
        return (await self.load(request, count=1, concurrency=1, seconds=seconds))[0]

    async def connect(self, count: int) -> list[Connection]:
        """Return this many open connections."""
        self._connections = [connection for connection in self._connections if not connection.closed]
        loop = asyncio.get_running_loop()
        while len(self._connections) < count:
            self._connections.append((await loop.create_connection(Connection, HOST, self._port))[1])
        return self._connections[:count]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


async def _repeat(connection: Connection, request: bytes, turns: Iterator[int]) -> list[Answer]:
    return [await connection.send(request) for _ in turns]


def post(body: bytes, *, key: str = "", path: str = "/v1/responses") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
    if key:
        head += f"authorization: Bearer {key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: {HOST}\r\n\r\n".encode()


async def is_up(port: int, path: str) -> bool:
    """Return True if a server answers the path with status 200."""
    client = Client(port)
    with contextlib.suppress(OSError, InvalidAnswer), contextlib.closing(client):
        return (await client.send(get(path))).status == 200
    return False
