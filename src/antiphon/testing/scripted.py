"""A model with scripted answers for tests of agents: in this process, or behind a real server."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from antiphon.agent.transports.base import Events
from antiphon.agent.transports.engine import LocalTransport
from antiphon.backends.scripted.backend import ScriptedBackend, create
from antiphon.config.settings import Settings
from antiphon.engine.engine import Engine
from antiphon.errors import AntiphonError, ServerError
from antiphon.server.listener import bind_socket
from antiphon.server.process import Server
from antiphon.store.memory.store import MemoryStore
from antiphon.upstream.error_mapping import map_api_error

Script = Mapping[str, Any] | str | Path
"""A script, or the path of its JSON file."""

_START_SECONDS = 30.0


class ScriptedTransport:
    """A transport to a scripted model, through a real engine, without a socket.

    `requests` lists the requests in order. `backend` has the gates of the script. A transport can be used again after
    it was closed, and by several event loops in turn, as `Agent.run_sync` does. The script then continues, but stored
    responses are lost.
    """

    def __init__(self, script: Script) -> None:
        self.requests: list[dict[str, Any]] = []
        self.backend = _make_backend(script)
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def stream(self, request: dict[str, Any]) -> Events:
        self.requests.append(request)
        try:
            return await LocalTransport(await self._start()).stream(request)
        except AntiphonError as error:
            # A scripted error has no class of its own. As over HTTP, its fields decide which class to raise.
            payload = {"message": error.message, "type": error.type, "code": error.code, "param": error.param}
            raise map_api_error(error.status, payload, retry_after=error.retry_after) from None

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
            self._engine = None

    async def _start(self) -> Engine:
        loop = asyncio.get_running_loop()
        if self._engine is None or self._loop is not loop:
            self._engine, self._loop = Engine(backends={"scripted": self.backend}, store=MemoryStore()), loop
            await self._engine.start()
        return self._engine


class ScriptedServer:
    """A server in this process. `base_url` is for agents and SDKs; `url` is the address without a path."""

    def __init__(self, url: str, backend: ScriptedBackend) -> None:
        self.url = url
        self.base_url = f"{url}/v1"
        self.backend = backend


@contextmanager
def serve_script(script: Script) -> Iterator[ScriptedServer]:
    """Run a real server on a free local port, in a thread, with a scripted model and a store in memory."""
    backend = _make_backend(script)
    settings = Settings(port=0, data_dir=Path(), store="memory:", shutdown_grace_seconds=0)
    engine = Engine(backends={"scripted": backend}, store=MemoryStore())
    ready = threading.Event()
    urls: list[str] = []

    def note_url(url: str) -> None:
        urls.append(url)
        ready.set()

    with bind_socket(settings) as listener:
        server = Server(engine, settings, on_ready=note_url)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="scripted", daemon=True)
        thread.start()
        try:
            if not ready.wait(_START_SECONDS):
                raise ServerError("The scripted server did not start in time.")
            yield ScriptedServer(urls[0], backend)
        finally:
            server.should_exit = True
            thread.join(_START_SECONDS)


def _make_backend(script: Script) -> ScriptedBackend:
    source = dict(script) if isinstance(script, Mapping) else str(script)
    return create("scripted", {"script": source}, Path())
