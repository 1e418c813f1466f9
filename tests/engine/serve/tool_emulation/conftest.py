"""Engines on a model that only knows functions."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from support.tool_emulation import EmulationBench


@pytest.fixture
async def emulate() -> AsyncIterator[Callable[..., Awaitable[EmulationBench]]]:
    """Start an engine whose model says these steps, or plays a script."""
    started: list[EmulationBench] = []

    async def make(*steps: Any, policy: dict[str, Any] | None = None, **script: Any) -> EmulationBench:
        if steps:
            script["default"] = list(steps)
        harness = EmulationBench(script, **(policy or {}))
        await harness.engine.start()
        started.append(harness)
        return harness

    yield make
    for harness in started:
        await harness.engine.close()
