"""Agents beside each other on one upstream, each in a process of its own that runs it when it is told to."""

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.client import HOST, BadAnswer
from benchmarks.driving import Driver, drive
from benchmarks.servers import UPSTREAM, run
from benchmarks.tasks import TASKS, Task


class Contestant(NamedTuple):
    """An agent: the driver that runs it, and what its users import: the package, and all that it needs over HTTP."""

    name: str
    driver: str
    imports: tuple[str, ...]


OURS = (
    Contestant("antiphon", "antiphon", ("from antiphon import Agent", "from antiphon import Agent, tool")),
    # What it imports is the same.
    Contestant("in process", "in_process", ()),
)
PEERS = (
    Contestant("openai-agents", "openai_agents", ("import agents", "import agents, openai")),
    Contestant("pydantic-ai", "pydantic_ai", ("import pydantic_ai", "import pydantic_ai.models.openai")),
)

Costs = dict[tuple[str, str], list[float]]
"""Microseconds of CPU that a run took, by the names of the task and the agent; n-th rounds are neighbours."""


async def play(driver: Driver, task: Task, *, scale: float) -> float:
    """Microseconds of the driver's CPU that a run takes."""
    count = max(1, round(task.runs * scale))
    cpu, heard = await driver.ask(task.name, count)
    expected = ["".join(task.pieces), task.deltas if task.streamed else 0]
    if heard != [expected] * count:
        raise BadAnswer(f"{driver.name}, {task.name}: {heard[0]!r} is not {expected!r}")
    return float(cpu) / count * 1e6


async def measure(contestants: Sequence[tuple[Contestant, Path]], folder: Path, *, rounds: int, scale: float) -> Costs:
    """Each contestant comes with the interpreter that has it."""
    found: Costs = defaultdict(list)
    async with run(UPSTREAM, folder / "agents-upstream") as upstream, contextlib.AsyncExitStack() as stack:
        url = f"http://{HOST}:{upstream.port}/v1"
        drivers = [
            await stack.enter_async_context(drive(each.name, python, each.driver, [url], folder))
            for each, python in contestants
        ]
        for number in range(rounds + 1):  # the first one warms up
            for task in TASKS:
                for driver in drivers:
                    cost = await play(driver, task, scale=scale)
                    if number:
                        found[task.name, driver.name].append(cost)
    return dict(found)
