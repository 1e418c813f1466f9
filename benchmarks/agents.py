"""CPU time of agents on one upstream. Each agent runs in a driver process of its own."""

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.client import HOST, InvalidAnswer
from benchmarks.driver_process import DriverProcess, start_driver
from benchmarks.servers import UPSTREAM, start_server
from benchmarks.tasks import TASKS, Task


class Implementation(NamedTuple):
    """An agent implementation.

    `imports` are the import statements of its users: of the package, and of everything an agent over HTTP needs.
    """

    name: str
    driver: str
    imports: tuple[str, ...]


OURS = (
    Implementation("antiphon", "antiphon", ("from antiphon import Agent", "from antiphon import Agent, tool")),
    # Its imports are the same.
    Implementation("in process", "in_process", ()),
)
PEERS = (
    Implementation("openai-agents", "openai_agents", ("import agents", "import agents, openai")),
    Implementation("pydantic-ai", "pydantic_ai", ("import pydantic_ai", "import pydantic_ai.models.openai")),
)

Costs = dict[tuple[str, str], list[float]]
"""CPU time of a run in microseconds, by task and agent name. Entries of the same index are from the same round."""


async def run_round(driver: DriverProcess, task: Task, *, scale: float) -> float:
    """Return the CPU time of the driver per run, in microseconds."""
    count = max(1, round(task.runs * scale))
    cpu, results = await driver.send(task.name, count)
    expected = ["".join(task.pieces), task.deltas if task.streamed else 0]
    if results != [expected] * count:
        raise InvalidAnswer(f"{driver.name}, {task.name}: {results[0]!r} is not {expected!r}")
    return float(cpu) / count * 1e6


async def measure(
    implementations: Sequence[tuple[Implementation, Path]], folder: Path, *, rounds: int, scale: float
) -> Costs:
    """Measure each implementation with its interpreter."""
    found: Costs = defaultdict(list)
    async with start_server(UPSTREAM, folder / "agents-upstream") as upstream, contextlib.AsyncExitStack() as stack:
        url = f"http://{HOST}:{upstream.port}/v1"
        drivers = [
            await stack.enter_async_context(start_driver(each.name, python, each.driver, [url], folder))
            for each, python in implementations
        ]
        for number in range(rounds + 1):  # the first round is a warm-up
            for task in TASKS:
                for driver in drivers:
                    cost = await run_round(driver, task, scale=scale)
                    if number:
                        found[task.name, driver.name].append(cost)
    return dict(found)
