"""Servers for the tests of this folder, and a fake ASGI server."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from antiphon.config.settings import ApiKey
from antiphon.server.http import HttpRequest, Message, Scope
from antiphon.store.base import Store
from support.live_server import LiveServer, make_settings


@pytest.fixture
def serve() -> Iterator[Callable[..., LiveServer]]:
    """Start a server with a script and changed settings."""
    started: list[LiveServer] = []

    def start(script: dict[str, Any] | None = None, *, store: Store | None = None, **changes: Any) -> LiveServer:
        started.append(LiveServer(script or {}, make_settings(**changes), store))
        return started[-1]

    yield start
    for running in started:
        running.stop()


SCRIPT = {
    "models": ["scripted", "family/member"],
    "rules": [
        {"user": "recall", "text": "ada", "answers": ["Your name is ada."]},
        {"user": "weather", "answers": [[{"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}}]]},
        {"user": "fail at once", "answers": [[{"failure": {"message": "No.", "code": "model_error"}}]]},
        {"user": "fail later", "answers": [[{"text": "So "}, {"failure": {"message": "No.", "code": "model_error"}}]]},
        {
            "user": "refuse",
            "answers": [
                [{"raise": {"message": "Too hot.", "status": 400, "code": "too_hot", "type": "invalid_request_error"}}]
            ],
        },
        {"user": "crash", "answers": [[{"crash": "a secret of the inside"}]]},
    ],
}


@pytest.fixture(scope="package")
def server() -> Iterator[LiveServer]:
    """A shared server without keys. A test must leave nothing running on it."""
    running = LiveServer(SCRIPT, make_settings())
    yield running
    running.stop()


@pytest.fixture(scope="package")
def guarded() -> Iterator[LiveServer]:
    """A server with keys for two projects, and a small limit for bodies."""
    keys = (ApiKey("sk-ada", "a"), ApiKey("sk-bob", "b"))
    running = LiveServer(SCRIPT, make_settings(api_keys=keys, max_body_bytes=1000))
    yield running
    running.stop()


class AsgiChannel:
    """The server side of ASGI: receives from a list of messages, and records the sent ones."""

    def __init__(self, *incoming: Message) -> None:
        self.incoming = list(incoming)
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if not self.incoming:
            await asyncio.get_running_loop().create_future()
        return self.incoming.pop(0)

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def make_request(
        self,
        method: str = "GET",
        path: str = "/",
        *,
        headers: dict[str, str] | None = None,
        query: bytes = b"",
        raw_path: bytes | None = None,
    ) -> HttpRequest:
        """Return a request on this channel. `raw_path` is optional in ASGI."""
        raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope: Scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": raw}
        if raw_path is not None:
            scope["raw_path"] = raw_path
        return HttpRequest(scope, self.receive, self.send)


@pytest.fixture
def make_channel() -> type[AsgiChannel]:
    return AsgiChannel
