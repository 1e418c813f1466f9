"""Reads and writes of a WebSocket, with and without the server's `write_now`."""

import asyncio
from typing import Any

import pytest

from antiphon.errors import NotFound
from antiphon.server.http import ClientDisconnected
from antiphon.server.websocket.socket import UpgradeRequest, WebSocket
from antiphon.server.websocket.uvicorn_protocol import encode_frames


class FakeServer:
    """The server side of ASGI. It can wait or raise."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.room = asyncio.Event()
        self.error: Exception | None = None

    async def receive(self) -> dict[str, Any]:
        return {"type": "websocket.receive", "bytes": b"x"}

    async def send(self, message: Any) -> None:
        await self.room.wait()
        if self.error is not None:
            raise self.error
        self.sent.append(message["text"])

    def write(self, lines: Any) -> bool:
        if self.room.is_set():
            self.sent.append(list(lines))
        return self.room.is_set()


async def test_each_line_is_sent_as_a_text_message() -> None:
    server = FakeServer()
    server.room.set()
    await WebSocket(server.receive, server.send).write([b"one", b"two"])
    assert server.sent == ["one", "two"]


async def test_write_now_is_used_when_there_is_room() -> None:
    server = FakeServer()
    server.room.set()
    await WebSocket(server.receive, server.send, write_now=server.write).write([b"one", b"two"])
    assert server.sent == [[b"one", b"two"]]


async def test_writes_keep_their_order_while_the_client_reads_slowly() -> None:
    server = FakeServer()
    socket = WebSocket(server.receive, server.send, write_now=server.write)
    writing = [asyncio.create_task(socket.write([str(n).encode(), b"."])) for n in range(3)]
    await asyncio.sleep(0)
    assert socket.is_writing
    server.room.set()
    late = asyncio.create_task(socket.write([b"late"]))
    await asyncio.gather(*writing, late)
    assert server.sent == ["0", ".", "1", ".", "2", ".", "late"]


@pytest.mark.parametrize("error", [OSError(), RuntimeError("after the close")])
async def test_write_to_a_closed_connection_raises_client_disconnected(error: Exception) -> None:
    server = FakeServer()
    server.room.set()
    server.error = error
    with pytest.raises(ClientDisconnected):
        await WebSocket(server.receive, server.send).write([b"x"])


@pytest.mark.parametrize(
    ("extensions", "sent"),
    [
        ({}, ["websocket.close"]),
        ({"websocket.http.response": {}}, ["websocket.http.response.start", "websocket.http.response.body"]),
    ],
)
async def test_upgrade_is_refused_with_or_without_http_response_support(extensions: Any, sent: list[str]) -> None:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {"type": "websocket", "path": "/", "query_string": b"", "headers": [], "extensions": extensions}
    await UpgradeRequest(scope, FakeServer().receive, send).respond_error(NotFound("Unknown path: /."))
    assert [message["type"] for message in messages] == sent


async def test_binary_message_is_read_as_bytes() -> None:
    server = FakeServer()
    assert await WebSocket(server.receive, server.send).read() == b"x"


@pytest.mark.parametrize(
    ("size", "head"),
    [(125, b"\x81\x7d"), (126, b"\x81\x7e\x00\x7e"), (65536, b"\x81\x7f\x00\x00\x00\x00\x00\x01\x00\x00")],
)
def test_frame_header_has_the_length(size: int, head: bytes) -> None:
    assert encode_frames([b"x" * size, b""]) == head + b"x" * size + b"\x81\x00"
