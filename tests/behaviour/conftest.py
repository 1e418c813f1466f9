"""Servers and agent stages for the behaviour tests, and the collected test ids for the manifest."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.settings import ApiKey
from antiphon.store.location import locate_store
from behaviour.wire import SCRIPT
from support.live_server import LiveServer, make_settings
from support.scripted_model import AntiphonModel, UpstreamModel, open_scripted

COLLECTED = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)  # before -k and -m deselect tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = {item.nodeid for item in items}


@pytest.fixture(scope="session")
def collected(request: pytest.FixtureRequest) -> dict[str, set[str]]:
    """Return the ids of all collected tests by file, with and without parameters. None if tests were requested."""
    by_file: dict[str, set[str]] = {}
    if not any("::" in argument for argument in request.config.args):
        for test in request.config.stash[COLLECTED]:
            by_file.setdefault(test.partition("::")[0], set()).update((test, test.partition("[")[0]))
    return by_file


@pytest.fixture(scope="package")
def server() -> Iterator[LiveServer]:
    """A shared server. Tests that use it leave nothing running on it."""
    running = LiveServer(SCRIPT, make_settings())
    yield running
    running.stop()


@pytest.fixture(scope="package")
def guarded() -> Iterator[LiveServer]:
    """A server with keys for two projects."""
    running = LiveServer(SCRIPT, make_settings(api_keys=(ApiKey("sk-ada", "a"), ApiKey("sk-bob", "b"))))
    yield running
    running.stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    """Start servers with a script. All servers of one test share one SQLite file."""
    started: list[LiveServer] = []

    def start(script: dict[str, Any] | None = None, **changes: Any) -> LiveServer:
        store = locate_store(f"sqlite:///{tmp_path}/antiphon.db")
        started.append(LiveServer(script or {}, make_settings(**changes), store))
        return started[-1]

    yield start
    for running in started:
        running.stop()


@pytest.fixture
async def scripted() -> AsyncIterator[AntiphonModel]:
    """A scripted model in this process, for agents."""
    async with open_scripted("in process") as opened:
        assert isinstance(opened, AntiphonModel)
        yield opened


@pytest.fixture
async def upstream() -> AsyncIterator[UpstreamModel]:
    """A scripted model on a minimal server, for agents."""
    async with open_scripted("upstream") as opened:
        assert isinstance(opened, UpstreamModel)
        yield opened
