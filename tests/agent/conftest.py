"""The three transports to a scripted model, on which the same tests run."""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from antiphon.ledger import Ledger
from antiphon.store.ledger import MemoryLedger, SqliteLedger
from support.scripted_model import TRANSPORTS, ScriptedModel, SharedServer, open_scripted


@pytest.fixture(scope="package")
def shared_server() -> Iterator[SharedServer]:
    opened = SharedServer()
    yield opened
    opened.close()


@pytest.fixture(params=TRANSPORTS)
async def scripted(request: pytest.FixtureRequest, shared_server: SharedServer) -> AsyncIterator[ScriptedModel]:
    async with open_scripted(request.param, shared_server) as opened:
        yield opened


@pytest.fixture
async def in_process() -> AsyncIterator[ScriptedModel]:
    """The scripted model in process, for tests that do not depend on the transport."""
    async with open_scripted("in process") as opened:
        yield opened


@pytest.fixture(params=["memory", "sqlite"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    opened = MemoryLedger() if request.param == "memory" else SqliteLedger(tmp_path / "runs.db")
    yield opened
    await opened.close()


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one. A killed process loses no writes, so a disk would show nothing more."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="antiphon-", dir=shared) as folder:
        yield Path(folder)
