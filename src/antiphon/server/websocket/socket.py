"""A WebSocket over ASGI, and the upgrade request that opens it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from antiphon.server.body_budget import BodyBudget
from antiphon.server.http import ClientDisconnected, HttpRequest, Message, Receive, Scope, Send

WriteNow = Callable[[Sequence[bytes]], bool]

WRITE_NOW = "antiphon.write_now"
"""An ASGI extension: its `write` sends text messages if that needs no waiting, and returns True if it sent them.

Its `wait` waits until a write needs no waiting. Its `abort` ends the connection at once, without a close frame.
"""

GOING_AWAY = 1001
POLICY_VIOLATION = 1008


class WebSocket:
    """An accepted WebSocket. Each line of JSON is sent as a text message.

    Writes are sent in the order of the calls, and the lines of one call stay together. A write waits while the client
    reads slowly.
    """

    __slots__ = ("_abort", "_lock", "_receive", "_send", "_stalled_at", "_wait", "_write_now", "_writers")

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        write_now: WriteNow | None = None,
        wait: Callable[[], Awaitable[object]] | None = None,
        abort: Callable[[], None] | None = None,
    ) -> None:
        self._receive = receive
        self._send = send
        self._write_now = write_now
        self._wait = wait
        self._abort = abort
        self._lock = asyncio.Lock()
        # The lock alone does not show waiting writers: it is free for a moment between two of them.
        self._writers = 0
        self._stalled_at = 0.0

    async def accept(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._receive()
        await self._send_message({"type": "websocket.accept", "headers": headers})

    async def read(self) -> str | bytes | None:
        """Return the next message, or None if either side has closed the connection."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | bytes | None = message.get("text")
        return message["bytes"] if text is None else text

    async def write(self, lines: Sequence[bytes]) -> None:
        """Send each line as a message. Raises ClientDisconnected."""
        if self.write_now(lines):
            return
        self._start_waiting()
        try:
            async with self._lock:
                for line in lines:
                    await self._send_message({"type": "websocket.send", "text": line.decode()})
        finally:
            self._end_waiting()

    def write_now(self, lines: Sequence[bytes]) -> bool:
        """Send the lines if that needs no waiting, and return True if they were sent.

        This is the usual case, and an await that does not wait costs more than the write itself.
        """
        return self._write_now is not None and not self._writers and self._write_now(lines)

    async def wait_until_writable(self) -> None:
        """Wait while data waits for the client to read, if the ASGI server can tell."""
        if self._wait is not None:
            self._start_waiting()
            try:
                await self._wait()
            finally:
                self._end_waiting()

    def _start_waiting(self) -> None:
        if not self._writers:
            self._stalled_at = time.monotonic()
        self._writers += 1

    def _end_waiting(self) -> None:
        self._writers -= 1
        self._stalled_at = time.monotonic()

    def compute_stall(self) -> float:
        """Return the seconds for which a message has waited for the client to read, or 0 if none waits."""
        return time.monotonic() - self._stalled_at if self._writers else 0.0

    @property
    def is_writing(self) -> bool:
        """True while a message waits for the client to read."""
        return self._writers > 0

    async def close(self, code: int) -> None:
        self._start_waiting()
        try:
            await self._send_message({"type": "websocket.close", "code": code})
        finally:
            self._end_waiting()

    def abort(self) -> None:
        """End the connection at once, if the ASGI server can. The client does not read."""
        if self._abort is not None:
            self._abort()

    async def _send_message(self, message: Message) -> None:
        try:
            await self._send(message)
        except (OSError, RuntimeError):  # RuntimeError if uvicorn has closed the connection because of invalid data
            raise ClientDisconnected from None


class UpgradeRequest(HttpRequest):
    """A request to open a WebSocket. `accept` opens `socket`; any other response refuses the upgrade."""

    __slots__ = ("socket",)

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, body_budget: BodyBudget | None = None) -> None:
        extensions = scope.get("extensions") or {}

        async def refuse(message: Message) -> None:
            if "websocket.http.response" in extensions:
                await send({**message, "type": f"websocket.{message['type']}"})
            elif message["type"] == "http.response.start":  # this ASGI server cannot send an HTTP response
                await send({"type": "websocket.close", "code": POLICY_VIOLATION})

        super().__init__({**scope, "method": "GET"}, receive, refuse, body_budget=body_budget)
        extension = extensions.get(WRITE_NOW) or {}
        self.socket = WebSocket(
            receive, send, write_now=extension.get("write"), wait=extension.get("wait"), abort=extension.get("abort")
        )

    async def accept(self) -> None:
        await self.socket.accept([(b"x-request-id", self.id.encode())])
        self.status = 101
