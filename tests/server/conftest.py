"""A real server on a loopback socket, in a thread of this process, and what it takes to talk to it."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from antiphon.backends.scripted import create
from antiphon.config import ApiKey, Settings
from antiphon.engine.engine import Engine
from antiphon.server.exchange import Exchange, Message
from antiphon.server.process import Server, bind
from antiphon.store.base import Store
from antiphon.store.memory.store import MemoryStore

PATIENCE = 20


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Running:
    """The server, the scripted model behind it, and ways to reach both."""

    def __init__(self, script: dict[str, Any], settings: Settings, store: Store | None = None) -> None:
        self.backend = create("scripted", {"script": script}, settings.data_dir)
        self.engine = Engine(backends={"scripted": self.backend}, store=store or MemoryStore())
        self.server = Server(self.engine, settings, on_ready=self._arrive)
        self.url = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._listener = bind(settings)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    def _run(self) -> None:
        self.server.run(sockets=[self._listener])

    def _arrive(self, url: str) -> None:
        self.url = url
        self._loop = asyncio.get_running_loop()
        self._ready.set()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None) -> Answer:
        """One request on a connection of its own. Bodies that are not bytes are sent as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, headers or {})
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def client(self, key: str = "any") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def wait_for(self, make: Callable[[], Awaitable[Any]]) -> Any:
        """Await something in the server's loop."""

        async def wait() -> Any:
            return await make()

        assert self._loop is not None
        future: Future[Any] = asyncio.run_coroutine_threadsafe(wait(), self._loop)
        return future.result(PATIENCE)

    def do(self, act: Callable[[], object]) -> None:
        """Call something in the server's loop."""

        async def call() -> None:
            act()

        self.wait_for(call)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def make_settings(**changes: Any) -> Settings:
    return Settings(
        **{"port": 0, "data_dir": Path("unused"), "store": "memory:", "shutdown_grace_seconds": 0} | changes
    )


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Starts a server with a script, and settings that differ from the usual."""
    started: list[Running] = []

    def start(script: dict[str, Any] | None = None, *, keep_in: Store | None = None, **changes: Any) -> Running:
        started.append(Running(script or {}, make_settings(**changes), keep_in))
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
def server() -> Iterator[Running]:
    """An open server that everyone may use who leaves nothing running on it."""
    running = Running(SCRIPT, make_settings())
    yield running
    running.stop()


@pytest.fixture(scope="package")
def guarded() -> Iterator[Running]:
    """A server with keys for two projects, and a small limit for bodies."""
    keys = (ApiKey("sk-ada", "a"), ApiKey("sk-bob", "b"))
    running = Running(SCRIPT, make_settings(api_keys=keys, max_body_bytes=1000))
    yield running
    running.stop()


class Wire:
    """The server's side of an exchange, played by a list of messages."""

    def __init__(self, *incoming: Message) -> None:
        self.incoming = list(incoming)
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if not self.incoming:
            await asyncio.get_running_loop().create_future()
        return self.incoming.pop(0)

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def exchange(
        self, method: str = "GET", path: str = "/", *, headers: dict[str, str] | None = None, query: bytes = b""
    ) -> Exchange:
        raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": raw}
        return Exchange(scope, self.receive, self.send)


@pytest.fixture
def wire() -> type[Wire]:
    return Wire
