"""Servers with a SQLite store, for third-party clients."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.embedded.backend import create
from antiphon.store.location import locate_store
from antiphon.tools.hosted.registry import HostedTools
from support.hosted_tool import RecordingTool
from support.live_server import LiveServer, make_settings
from support.recording_backend import RecordingBackend

Serve = Callable[..., LiveServer]
# No examples of tool calls in the prompt, which is faster: the tests force the tool calls.
EMBEDDED = {"context": 1024, "batch": 256, "tool_examples": False}


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Return a function that starts a server with a script and its own store."""
    started: list[LiveServer] = []

    def start(script: dict[str, Any], **changes: Any) -> LiveServer:
        path: Path = tmp_path_factory.mktemp("data") / "antiphon.db"
        store = locate_store(f"sqlite:///{path}")
        started.append(LiveServer(script, make_settings(**changes), store, backend=RecordingBackend(script)))
        return started[-1]

    yield start
    for running in started:
        running.stop()


@pytest.fixture(scope="session")
def embedded() -> Iterator[LiveServer]:
    """Yield a server with the embedded model, `smollm2-135m`, and a hosted tool for `file_search`."""
    others = {"embedded": create("embedded", EMBEDDED, Path("unused"))}
    running = LiveServer({}, make_settings(), others=others, hosted_tools=HostedTools([RecordingTool()]))
    yield running
    running.stop()
