"""A server on an SQLite file, for clients that were not written by us."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.embedded.backend import create
from antiphon.store.location import locate_store
from clients.recorder import Recorder
from support.live_server import LiveServer, make_settings

Serve = Callable[..., LiveServer]
# Quick: no examples of calls are read, since the tools that clients offer it have to be called.
EMBEDDED = {"context": 1024, "batch": 256, "tool_examples": False}


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts a server with a script, on a file of its own."""
    started: list[LiveServer] = []

    def start(script: dict[str, Any], **changes: Any) -> LiveServer:
        path: Path = tmp_path_factory.mktemp("data") / "antiphon.db"
        store = locate_store(f"sqlite:///{path}")
        started.append(LiveServer(script, make_settings(**changes), store, backend=Recorder(script)))
        return started[-1]

    yield start
    for running in started:
        running.stop()


@pytest.fixture(scope="session")
def embedded() -> Iterator[LiveServer]:
    """A server with the embedded model, `smollm2-135m`."""
    running = LiveServer({}, make_settings(), others={"embedded": create("embedded", EMBEDDED, Path("unused"))})
    yield running
    running.stop()
