"""Engines for the tests of this folder."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.engine.policy import Policy
from antiphon.store.base import Store
from antiphon.store.memory.store import MemoryStore
from support.engine_harness import EngineHarness


@pytest.fixture
async def make_harness() -> AsyncIterator[Any]:
    """Start an engine on a script; every one is closed at the end."""
    started: list[EngineHarness] = []

    async def make(script: dict[str, Any] | None = None, *, store: Store | None = None, **policy: Any) -> EngineHarness:
        harness = EngineHarness(script or {}, store or MemoryStore(), Policy(**policy))
        await harness.engine.start()
        started.append(harness)
        return harness

    yield make
    for harness in started:
        await harness.engine.close()


@pytest.fixture
async def harness(make_harness: Any) -> EngineHarness:
    made: EngineHarness = await make_harness()
    return made
