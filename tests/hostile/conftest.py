"""Server processes and upstreams for hostile tests.

    def test_large_body_is_refused(victim):
        server = victim(max_body_bytes=1000)
        assert server.ask("POST", "/v1/responses", {...}).status == 413
        assert server.peak_mb() < 200
        assert server.longest_block() < MAX_BLOCK

A test asserts bounds on memory in MB and on blocks in CPU seconds of the loop's thread. It never asserts wall-clock
times, because the machine may be busy.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from support.upstream_server import json_of, serve
from support.upstream_thread import ThreadedServer
from support.victim import Victim

StartVictim = Callable[..., Victim]
StartUpstream = Callable[..., ThreadedServer]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the ANTIPHON_ variables of the environment."""
    for name in [name for name in os.environ if name.startswith("ANTIPHON_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[StartVictim]:
    """Return a function that starts a server process.

    `script` is the script of its scripted model. `backends` replace this model: `backends={"up": {"kind": "responses",
    "base_url": upstream.url, "models": ["m"]}}`, or `{"embedded": {"kind": "embedded"}}`. Other keywords are settings.
    """
    started: list[Victim] = []

    def start(**options: Any) -> Victim:
        started.append(Victim(tmp_path / f"victim-{len(started)}", **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def upstream() -> Iterator[StartUpstream]:
    """Return a function that starts a scripted upstream in a thread.

    Pass replies of support.upstream_server, or a context manager such as `support.raw_server.serve_raw(handler)`.
    """
    started: list[ThreadedServer] = []

    def start(*replies: Any) -> ThreadedServer:
        if len(replies) == 1 and isinstance(replies[0], AbstractAsyncContextManager):
            context = replies[0]
        else:
            context = serve(replies, fixed={"/v1/models": json_of({"data": []})})
        started.append(ThreadedServer(context))
        return started[-1]

    yield start
    for server in started:
        server.close()
