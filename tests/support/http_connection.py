"""Connections of HttpProtocol without sockets: an application's responses, and all data on their way recorded."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from uvicorn.server import ServerState

from antiphon.server.body_budget import BodyBudget
from antiphon.server.connections import ServerLimits
from antiphon.server.http import Message, Receive, Scope, Send
from antiphon.server.process import ServerConfig
from antiphon.server.uvicorn_protocol import HttpProtocol
from support.live_server import make_settings


class RecordingTransport(asyncio.Transport):
    """A transport that records the writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


def connect_app(app: Asgi, **changes: Any) -> tuple[HttpProtocol, RecordingTransport]:
    """Return a connection to an application, with all data on its way recorded."""
    settings = make_settings(**changes)
    limits = ServerLimits(settings, BodyBudget(settings.max_body_bytes))
    config = ServerConfig(app, limits, http=HttpProtocol, lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.load()
    connection = HttpProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    transport = RecordingTransport()
    connection.connection_made(transport)
    return connection, transport


async def answer(app: Asgi, request: bytes) -> RecordingTransport:
    connection, transport = connect_app(app)
    connection.data_received(request)
    await asyncio.gather(*connection.tasks)
    closed = transport.closed
    connection.connection_lost(None)
    transport.closed = closed
    return transport


def make_app(*messages: Message) -> Asgi:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        for message in messages:
            await send(message)

    return app


def make_start(*headers: tuple[bytes, bytes], status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def make_body(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LENGTH = (b"content-length", b"3")
