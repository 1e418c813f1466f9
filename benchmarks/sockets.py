"""The same turns over HTTP and over WebSockets, and the memory of WebSockets on which nothing happens."""

import asyncio
import contextlib
import json
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from benchmarks import rounds
from benchmarks.client import HOST, Answer, BadAnswer, Client
from benchmarks.rounds import Round, Rounds
from benchmarks.servers import Running, Server, run
from benchmarks.workloads import BRIEF, LONG, Workload

ONE = BRIEF._replace(name="one at once", concurrency=1, requests=120)
MANY = BRIEF._replace(name="32 at once")
LENGTHY = LONG._replace(name="200 deltas")
_WORKLOADS = (ONE, MANY, LENGTHY)
_SECONDS = 30.0
_HANDSHAKE = (
    f"GET /v1/responses HTTP/1.1\r\nhost: {HOST}\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
).encode()
_LAST = b'{"type":"response.completed"'
_ERROR = b'{"type":"error"'


class Socket(asyncio.Protocol):
    """A WebSocket for one turn at a time. It is as lean as the HTTP client that it is compared with."""

    def __init__(self) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._received = bytearray()
        self._messages: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_HANDSHAKE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("The server closed a WebSocket.")

    def ask(self, frame: bytes) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._waiter = asyncio.get_running_loop().create_future()
        self._messages = []
        self._first = 0.0
        self._asked = time.perf_counter()
        self._transport.write(frame)
        return self._waiter

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self.opened.done():
            self._read_head()
            return
        while (message := self._read_message()) is not None:
            if not self._messages:
                self._first = time.perf_counter() - self._asked
            self._messages.append(message)
            if message.startswith(_ERROR):
                self._fail(f"A turn on a WebSocket failed: {message!r}")
            elif message.startswith(_LAST) and self._waiter is not None:
                whole = time.perf_counter() - self._asked
                self._waiter.set_result(Answer(b"", b"\n".join(self._messages), self._first, whole))

    def _read_head(self) -> None:
        if self._received.endswith(b"\r\n\r\n"):
            if self._received.startswith(b"HTTP/1.1 101 "):
                self._received.clear()
                self.opened.set_result(None)
            else:
                self._fail(f"The server has no WebSockets: {bytes(self._received)!r}")

    def _read_message(self) -> bytes | None:
        """The next message, if it is there. What the server sends is whole and not masked."""
        received = self._received
        if len(received) < 10:
            return None
        size, start = received[1], 2
        if size == 126:
            size, start = int.from_bytes(received[2:4]), 4
        elif size == 127:
            size, start = int.from_bytes(received[2:10]), 10
        if len(received) < start + size:
            return None
        is_text, message = received[0] == 0x81, bytes(received[start : start + size])
        del received[: start + size]
        return message if is_text else self._read_message()  # a ping, on a slow machine

    def _fail(self, reason: str) -> None:
        for waiter in (self.opened, self._waiter):
            if waiter is not None and not waiter.done():
                waiter.set_exception(BadAnswer(reason))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def connect(port: int) -> Socket:
    _, socket = await asyncio.get_running_loop().create_connection(Socket, HOST, port)
    await socket.opened
    return socket


def make_frame(workload: Workload) -> bytes:
    """The workload's request as a message. Its mask is all zeros, so that it stays as it is."""
    body = json.dumps({"type": "response.create"} | json.loads(workload.body)).encode()
    return b"\x81\xfe" + struct.pack("!H", len(body)) + bytes(4) + body


async def measure(server: Server, folder: Path, *, repeats: int, scale: float) -> Rounds:
    """Rounds by the names of the workload and the way it went."""
    found: Rounds = defaultdict(list)
    async with run(server, folder / "sockets") as running, contextlib.AsyncExitStack() as stack:
        client = stack.enter_context(contextlib.closing(Client(running.port)))
        sockets = [await connect(running.port) for _ in range(MANY.concurrency)]
        for socket in sockets:
            stack.callback(socket.close)
        for number in range(repeats + 1):  # the first one warms up
            for workload in _WORKLOADS:
                pair = (
                    await rounds.play(running, client, workload, scale=scale),
                    await _play(running, sockets, workload, scale=scale),
                )
                for way, each in zip(("http", "websocket"), pair, strict=True):
                    if number:
                        found[workload.name, way].append(each)
    return dict(found)


async def _play(server: Running, sockets: list[Socket], workload: Workload, *, scale: float) -> Round:
    """One round like `rounds.play`, on WebSockets that are open already."""
    count = max(workload.concurrency, round(workload.requests * scale))
    frame, turns = make_frame(workload), iter(range(count))
    before = server.cpu
    async with asyncio.timeout(_SECONDS):
        parts = await asyncio.gather(*(_repeat(each, frame, turns) for each in sockets[: workload.concurrency]))
    cpu = server.cpu - before
    answers = [answer for part in parts for answer in part]
    if any(answer.body.count(b"\n") + 1 != workload.events for answer in answers):
        raise BadAnswer(f"WebSocket, {workload.name}: {answers[0].body[:2000]!r}")
    wholes = sorted(answer.whole * 1e3 for answer in answers)
    return Round(
        cpu=cpu / count * 1e6,
        rate=workload.concurrency * count / sum(answer.whole for answer in answers),
        p50=statistics.median(wholes),
        p95=wholes[int(len(wholes) * 0.95)],
        first=statistics.median(answer.first * 1e3 for answer in answers),
    )


async def _repeat(socket: Socket, frame: bytes, turns: Iterator[int]) -> list[Answer]:
    return [await socket.ask(frame) for _ in turns]


async def measure_idle(server: Server, folder: Path, *, sockets: int) -> tuple[float, float]:
    """Megabytes without idle WebSockets and with them. Each has had a turn."""
    frame = make_frame(BRIEF)
    async with run(server, folder / "idle-sockets") as running, contextlib.AsyncExitStack() as stack:

        async def open_some(count: int) -> None:
            for _ in range(count):
                socket = await connect(running.port)
                stack.callback(socket.close)
                await socket.ask(frame)

        # The first ones bring what all share.
        await open_some(32)
        before = running.megabytes
        await open_some(sockets)
        return before, running.megabytes
