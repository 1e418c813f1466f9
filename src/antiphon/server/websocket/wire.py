"""An accepted WebSocket: lines of JSON go out as text messages, in order, and wait while the client reads slowly."""

import asyncio
from collections.abc import Callable, Sequence

from antiphon.server.http import ClientGone, Exchange, Message, Receive, Scope, Send
from antiphon.server.websocket.transport import WRITE_NOW

WriteNow = Callable[[Sequence[bytes]], bool]

GOING_AWAY = 1001
POLICY_VIOLATION = 1008


class Wire:
    """What is written at once stays together, and whoever writes first is sent first."""

    __slots__ = ("_lock", "_receive", "_send", "_write_now", "_writers")

    def __init__(self, receive: Receive, send: Send, *, write_now: WriteNow | None = None) -> None:
        self._receive = receive
        self._send = send
        self._write_now = write_now
        self._lock = asyncio.Lock()
        self._writers = 0  # between two of them the lock is free, but not for a third

    async def accept(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._receive()
        await self._put({"type": "websocket.accept", "headers": headers})

    async def read(self) -> str | bytes | None:
        """The next message; None when the connection has ended, whoever ended it."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | bytes | None = message.get("text")
        return message["bytes"] if text is None else text

    async def write(self, lines: Sequence[bytes]) -> None:
        """Send the lines, a message each. Raises ClientGone."""
        if self.write_now(lines):
            return
        self._writers += 1
        try:
            async with self._lock:
                for line in lines:
                    await self._put({"type": "websocket.send", "text": line.decode()})
        finally:
            self._writers -= 1

    def write_now(self, lines: Sequence[bytes]) -> bool:
        """Send the lines if that takes no waiting. It mostly does not, and waiting in vain costs more than sending."""
        return self._write_now is not None and not self._writers and self._write_now(lines)

    @property
    def is_writing(self) -> bool:
        """Whether a message waits for the client to read."""
        return self._writers > 0

    async def close(self, code: int) -> None:
        await self._put({"type": "websocket.close", "code": code})

    async def _put(self, message: Message) -> None:
        try:
            await self._send(message)
        except (OSError, RuntimeError):  # the second if the server has closed it, for a message it could not read
            raise ClientGone from None


class Upgrade(Exchange):
    """The request for a WebSocket. Answered like any other, it is refused; `wire` is what comes of it otherwise."""

    __slots__ = ("wire",)

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions = scope.get("extensions") or {}

        async def refuse(message: Message) -> None:
            if "websocket.http.response" in extensions:
                await send({**message, "type": f"websocket.{message['type']}"})
            elif message["type"] == "http.response.start":  # the server can only say no
                await send({"type": "websocket.close", "code": POLICY_VIOLATION})

        super().__init__({**scope, "method": "GET"}, receive, refuse)
        now = extensions.get(WRITE_NOW)
        self.wire = Wire(receive, send, write_now=None if now is None else now["write"])

    async def accept(self) -> None:
        await self.wire.accept([(b"x-request-id", self.id.encode())])
        self.status = 101
