"""The same turns over HTTP and over WebSockets, and the memory of idle WebSockets."""

import asyncio
import contextlib
import json
import re
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from benchmarks import rounds
from benchmarks.client import HOST, Answer, Client, InvalidAnswer
from benchmarks.rounds import Round, Rounds
from benchmarks.servers import RunningServer, Server, start_server
from benchmarks.workloads import BRIEF, LONG, Workload

ONE = BRIEF._replace(name="one at once", concurrency=1, requests=120)
MANY = BRIEF._replace(name="32 at once")
LENGTHY = LONG._replace(name="200 deltas")
_WORKLOADS = (ONE, MANY, LENGTHY)
_SECONDS = 30.0
_HANDSHAKE = (
    f"GET /v1/responses HTTP/1.1\r\nhost: {HOST}\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
_LAST = re.compile(rb'"type": ?"response.completed"')
_ERROR = re.compile(rb'"type": ?"(error|response.failed)"')


class WebSocket(asyncio.Protocol):
    """A WebSocket for one turn at a time, as minimal as the HTTP client it is compared with."""

    def __init__(self, key: str = "") -> None:
        self.closed = False
        self._handshake = _HANDSHAKE + (f"authorization: Bearer {key}\r\n\r\n" if key else "\r\n")
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._received = bytearray()
        self._messages: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._handshake.encode())

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail("The server closed a WebSocket.")

    def send(self, frame: bytes) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._waiter = asyncio.get_running_loop().create_future()
        self._messages = []
        self._first = 0.0
        self._sent_at = time.perf_counter()
        self._transport.write(frame)
        return self._waiter

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self.opened.done():
            self._read_head()
            return
        while (message := self._read_message()) is not None:
            if not self._messages:
                self._first = time.perf_counter() - self._sent_at
            self._messages.append(message)
            if _ERROR.search(message):
                self._fail(f"A turn on a WebSocket failed: {message!r}")
            elif _LAST.search(message) and self._waiter is not None:
                whole = time.perf_counter() - self._sent_at
                self._waiter.set_result(Answer(b"", b"\n".join(self._messages), self._first, whole))

    def _read_head(self) -> None:
        if self._received.endswith(b"\r\n\r\n"):
            if self._received.startswith(b"HTTP/1.1 101 "):
                self._received.clear()
                self.opened.set_result(None)
            else:
                self._fail(f"The server rejected the WebSocket: {bytes(self._received)!r}")

    def _read_message(self) -> bytes | None:
        """Return the next message, or None if it is incomplete. Server messages are not fragmented or masked."""
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
                waiter.set_exception(InvalidAnswer(reason))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def connect(port: int, *, key: str = "") -> WebSocket:
    _, socket = await asyncio.get_running_loop().create_connection(lambda: WebSocket(key), HOST, port)
    await socket.opened
    return socket


def make_frame(request: bytes) -> bytes:
    """Return a request as a frame. The mask is zero, so the payload is unchanged."""
    body = json.dumps({"type": "response.create"} | json.loads(request)).encode()
    return b"\x81\xfe" + struct.pack("!H", len(body)) + bytes(4) + body


async def measure(server: Server, folder: Path, *, repeats: int, scale: float) -> Rounds:
    """Return rounds by workload and transport."""
    found: Rounds = defaultdict(list)
    async with start_server(server, folder / "sockets") as running, contextlib.AsyncExitStack() as stack:
        client = stack.enter_context(contextlib.closing(Client(running.port)))
        sockets = [await connect(running.port) for _ in range(MANY.concurrency)]
        for socket in sockets:
            stack.callback(socket.close)
        for number in range(repeats + 1):  # the first round is a warm-up
            for workload in _WORKLOADS:
                pair = (
                    await rounds.run_round(running, client, workload, scale=scale),
                    await _run_round(running, sockets, workload, scale=scale),
                )
                for transport, each in zip(("http", "websocket"), pair, strict=True):
                    if number:
                        found[workload.name, transport].append(each)
    return dict(found)


async def _run_round(server: RunningServer, sockets: list[WebSocket], workload: Workload, *, scale: float) -> Round:
    """Run one round like `rounds.run_round`, on open WebSockets."""
    count = max(workload.concurrency, round(workload.requests * scale))
    frame, turns = make_frame(workload.body), iter(range(count))
    before = server.cpu
    async with asyncio.timeout(_SECONDS):
        parts = await asyncio.gather(*(_repeat(each, frame, turns) for each in sockets[: workload.concurrency]))
    cpu = server.cpu - before
    answers = [answer for part in parts for answer in part]
    if any(answer.body.count(b"\n") + 1 != workload.events for answer in answers):
        raise InvalidAnswer(f"WebSocket, {workload.name}: {answers[0].body[:2000]!r}")
    return rounds.summarize(answers, cpu, workload.concurrency)


async def _repeat(socket: WebSocket, frame: bytes, turns: Iterator[int]) -> list[Answer]:
    return [await socket.send(frame) for _ in turns]


async def measure_idle(server: Server, folder: Path, *, sockets: int) -> tuple[float, float]:
    """Return the megabytes without and with idle WebSockets. Each has completed one turn."""
    frame = make_frame(BRIEF.body)
    async with start_server(server, folder / "idle-sockets") as running, contextlib.AsyncExitStack() as stack:

        async def open_some(count: int) -> None:
            for _ in range(count):
                socket = await connect(running.port)
                stack.callback(socket.close)
                await socket.send(frame)

        # The first sockets allocate the shared memory.
        await open_some(32)
        before = running.megabytes
        await open_some(sockets)
        return before, running.megabytes
