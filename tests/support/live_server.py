"""A real server on a loopback socket, in a thread of this process, and what it takes to talk to it."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import uvicorn.server
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

from antiphon.backends.base import Backend
from antiphon.backends.scripted.backend import ScriptedBackend, create
from antiphon.config import Settings
from antiphon.engine.assembly import make_policy
from antiphon.engine.background.queue import BackgroundRun
from antiphon.engine.engine import Engine
from antiphon.engine.respond.run import Events, Run
from antiphon.engine.respond.session import Session
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest
from antiphon.server.process import Server, bind_socket
from antiphon.store.base import Store
from antiphon.store.memory.store import MemoryStore
from support import openresponses

PATIENCE = 20


class BriskServer(Server):
    """The server as it is, but for the pauses of uvicorn before an end: over all tests, they are most of a minute.

    It looks every tenth of a second whether it is to end, and then sits out another one for its connections.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._told = asyncio.Event()

    async def on_tick(self, counter: int) -> bool:
        ends = await super().on_tick(counter)
        if not ends:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), 0.1)
        return ends or self.should_exit

    def end(self) -> None:
        """Called in the server's loop."""
        self.should_exit = True
        self._told.set()


class _Pauses:
    """asyncio, as uvicorn sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


uvicorn.server.asyncio = _Pauses()  # type: ignore[assignment]


class JudgedEngine(Engine):
    """An engine whose every event is checked against Open Responses, if the request is within it.

    A model may be scripted to say what Open Responses has no form for: the items and annotations of other APIs.
    """

    async def create(
        self, request: CreateRequest, *, project: str, session: Session | None = None
    ) -> Run | BackgroundRun:
        asked = json.loads(codec.encode(request))
        run = await super().create(request, project=project, session=session)
        if openresponses.covers(asked):
            events = run.events
            run.events = lambda: self._judge(events())  # type: ignore[method-assign]
        return run

    async def _judge(self, batches: Events) -> Events:
        async with aclosing(batches):
            async for batch in batches:
                for event in batch:
                    self.judge(json.loads(codec.encode(event)))
                yield batch

    def judge(self, event: dict[str, Any]) -> None:
        if event["type"] in openresponses.event_schemas() and not _is_foreign(event):
            openresponses.validate_event(event)


def _is_foreign(event: dict[str, Any]) -> bool:
    items = event["response"]["output"] if "response" in event else [event["item"]] if "item" in event else []
    if any(item["type"] not in openresponses.item_types() for item in items):
        return True
    return any(f'"type": "{kind}"' in json.dumps(event) for kind in _FOREIGN_ANNOTATIONS)


_FOREIGN_ANNOTATIONS = ("file_citation", "container_file_citation", "file_path")


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

    def __init__(
        self,
        script: dict[str, Any],
        settings: Settings,
        store: Store | None = None,
        *,
        backend: ScriptedBackend | None = None,
        others: Mapping[str, Backend] | None = None,
    ) -> None:
        self.backend = backend or create("scripted", {"script": script}, settings.data_dir)
        self.engine = JudgedEngine(
            backends={"scripted": self.backend, **(others or {})},
            store=store or MemoryStore(),
            policy=make_policy(settings),
        )
        self.server = BriskServer(self.engine, settings, on_ready=self._arrive)
        self.url = ""
        self._clients: list[OpenAI] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._listener = bind_socket(settings)
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
        """The official client; it is closed with the server, since an open one complains when it is collected."""
        # Loading certificates that nobody asks for here would take longer than most tests.
        unsecured = DefaultHttpxClient(verify=False)
        client = OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE, http_client=unsecured)
        self._clients.append(client)
        return client

    def async_client(self) -> AsyncOpenAI:
        unsecured = DefaultAsyncHttpxClient(verify=False)
        return AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE, http_client=unsecured
        )

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
        assert self._loop is not None
        # The loop is closed already if the test has ended it.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.server.end)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        for client in self._clients:
            client.close()


def make_settings(**changes: Any) -> Settings:
    return Settings(
        **{"port": 0, "data_dir": Path("unused"), "store": "memory:", "shutdown_grace_seconds": 0} | changes
    )
