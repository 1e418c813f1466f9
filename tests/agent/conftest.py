"""The three ways to a model, on which the same tests are played."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from antiphon.ledger import Ledger
from antiphon.store.ledger import MemoryLedger, SqliteLedger
from support.agent_stage import WAYS, Stage, Theatre, open_stage


@pytest.fixture(scope="package")
def theatre() -> Iterator[Theatre]:
    opened = Theatre()
    yield opened
    opened.close()


@pytest.fixture(params=WAYS)
async def stage(request: pytest.FixtureRequest, theatre: Theatre) -> AsyncIterator[Stage]:
    async with open_stage(request.param, theatre) as opened:
        yield opened


@pytest.fixture
async def here() -> AsyncIterator[Stage]:
    """In process, for what does not depend on the way."""
    async with open_stage("in process") as opened:
        yield opened


@pytest.fixture(params=["memory", "sqlite"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    kept = MemoryLedger() if request.param == "memory" else SqliteLedger(tmp_path / "runs.db")
    yield kept
    await kept.close()
