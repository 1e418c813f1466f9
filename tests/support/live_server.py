"""A real server on a loopback socket, in a thread of this process, with clients to reach it."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn.server
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

from antiphon.backends.base import Backend
from antiphon.backends.scripted.backend import ScriptedBackend, create
from antiphon.config.settings import Settings
from antiphon.engine.assembly import make_containers, make_policy
from antiphon.engine.engine import Engine
from antiphon.engine.files.loader import FileServiceLoader
from antiphon.server.listener import bind_socket
from antiphon.server.process import Server
from antiphon.store.base import Store
from antiphon.store.memory.store import MemoryStore
from antiphon.tools.hosted.registry import NO_HOSTED_TOOLS, HostedTools
from support.wire_check import RecordingApp

TIMEOUT = 60
"""Limit for anything that a test waits for, in seconds. Long enough for a machine with busy cores."""


class FastShutdownServer(Server):
    """The server without uvicorn's pauses at shutdown. Over all tests they add up to most of a minute.

    uvicorn checks every 0.1 s if it should exit, and then waits another 0.1 s for its connections. `stop_draining` ends
    the time in which a stopped server accepts requests.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._exit_requested = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    async def on_tick(self, counter: int) -> bool:
        should_exit = await super().on_tick(counter)
        if not should_exit:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._exit_requested.wait(), 0.1)
        return should_exit or self.should_exit

    def request_exit(self) -> None:
        """Start the shutdown. Call it in the server's event loop."""
        self.should_exit = True
        self._exit_requested.set()

    async def drain(self, seconds: float) -> None:
        self._draining = asyncio.ensure_future(super().drain(seconds))
        await asyncio.wait([self._draining])

    def stop_draining(self) -> None:
        """Do not wait any longer. Call it in the server's event loop."""
        assert self._draining is not None
        self._draining.cancel()


class _ShortSleeps:
    """The asyncio module for uvicorn, with shorter sleeps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


uvicorn.server.asyncio = _ShortSleeps()  # type: ignore[assignment]


class HttpResponse:
    """A response that was read completely."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class LiveServer:
    """A running server with a scripted model. `stop` must be called at the end."""

    def __init__(
        self,
        script: dict[str, Any],
        settings: Settings,
        store: Store | None = None,
        *,
        backend: ScriptedBackend | None = None,
        others: Mapping[str, Backend] | None = None,
        files: FileServiceLoader | None = None,
        hosted_tools: HostedTools = NO_HOSTED_TOOLS,
    ) -> None:
        self.backend = backend or create("scripted", {"script": script}, settings.data_dir)
        store = store or MemoryStore()
        self.engine = Engine(
            backends={"scripted": self.backend, **(others or {})},
            store=store,
            policy=make_policy(settings),
            files=files,
            hosted_tools=hosted_tools,
            containers=make_containers(settings, store),
        )
        self.server = FastShutdownServer(self.engine, settings, on_ready=self._set_url)
        self.server.config.app = RecordingApp(self.server.config.app)  # type: ignore[arg-type]
        self.url = ""
        self._clients: list[OpenAI] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._listener = bind_socket(settings)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(TIMEOUT)

    def _run(self) -> None:
        self.server.run(sockets=[self._listener])

    def _set_url(self, url: str) -> None:
        self.url = url
        self._loop = asyncio.get_running_loop()
        self._ready.set()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None) -> HttpResponse:
        """Send a request on a new connection and return the response. A body that is not bytes is encoded as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            connection.request(method, path, body, headers or {})
            return HttpResponse(connection.getresponse())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)

    def client(self, key: str = "any") -> OpenAI:
        """Return the official client. It is closed with the server: an open one warns when it is garbage collected."""
        # Loading certificates takes longer than most tests.
        unsecured = DefaultHttpxClient(verify=False)
        client = OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT, http_client=unsecured)
        self._clients.append(client)
        return client

    def async_client(self) -> AsyncOpenAI:
        unsecured = DefaultAsyncHttpxClient(verify=False)
        return AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=TIMEOUT, http_client=unsecured
        )

    def wait_for(self, make: Callable[[], Awaitable[Any]]) -> Any:
        """Await in the server's event loop and return the result."""

        async def wait() -> Any:
            return await make()

        assert self._loop is not None
        future: Future[Any] = asyncio.run_coroutine_threadsafe(wait(), self._loop)
        return future.result(TIMEOUT)

    def do(self, function: Callable[[], object]) -> None:
        """Call a function in the server's event loop."""

        async def call() -> None:
            function()

        self.wait_for(call)

    def stop(self) -> None:
        """Stop the server and wait for its thread to end."""
        assert self._loop is not None
        # The loop is closed already if the test has stopped the server.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.server.request_exit)
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        for client in self._clients:
            client.close()


def make_settings(**changes: Any) -> Settings:
    return Settings(
        **{"port": 0, "data_dir": Path("unused"), "store": "memory:", "shutdown_grace_seconds": 0, "log_block_ms": 0}
        | changes
    )
