"""Engines for the tests of this folder."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.engine.policy import Policy
from antiphon.store.base import Store
from antiphon.store.memory.store import MemoryStore
from support.engine_harness import Bench


@pytest.fixture
async def make_bench() -> AsyncIterator[Any]:
    """Start an engine on a script; every one is closed at the end."""
    started: list[Bench] = []

    async def make(script: dict[str, Any] | None = None, *, store: Store | None = None, **policy: Any) -> Bench:
        bench = Bench(script or {}, store or MemoryStore(), Policy(**policy))
        await bench.engine.start()
        started.append(bench)
        return bench

    yield make
    for bench in started:
        await bench.engine.close()


@pytest.fixture
async def bench(make_bench: Any) -> Bench:
    made: Bench = await make_bench()
    return made
