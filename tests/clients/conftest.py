"""A server on an SQLite file, for clients that were not written by us."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.store.location import locate_store
from live_server import Running, make_settings

Serve = Callable[..., Running]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts a server with a script, on a file of its own."""
    started: list[Running] = []

    def start(script: dict[str, Any], **changes: Any) -> Running:
        path: Path = tmp_path_factory.mktemp("data") / "antiphon.db"
        started.append(Running(script, make_settings(**changes), locate_store(f"sqlite:///{path}")))
        return started[-1]

    yield start
    for running in started:
        running.stop()
