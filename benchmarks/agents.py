"""Agents beside each other on one upstream, each in a process of its own that runs it when it is told to."""

import asyncio
import contextlib
import json
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks.client import HOST, BadAnswer
from benchmarks.servers import UPSTREAM, DidNotStart, make_environment, run
from benchmarks.tasks import TASKS, Task

_SECONDS = 60.0


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


class Driver:
    """A started process that runs one agent."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._log = log

    async def play(self, task: Task, *, scale: float) -> float:
        """Microseconds of its CPU that a run takes."""
        assert self._process.stdin is not None
        count = max(1, round(task.runs * scale))
        self._process.stdin.write(json.dumps([task.name, count]).encode() + b"\n")
        cpu, heard = json.loads(await self.read())
        expected = ["".join(task.pieces), task.deltas if task.streamed else 0]
        if heard != [expected] * count:
            raise BadAnswer(f"{self.name}, {task.name}: {heard[0]!r} is not {expected!r}")
        return float(cpu) / count * 1e6

    async def read(self) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_SECONDS):
                line = await self._process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            self._log.seek(0)
            raise DidNotStart(f"{self.name} fell silent:\n{self._log.read()[-4000:].decode(errors='replace')}")
        return line


async def measure(contestants: Sequence[tuple[Contestant, Path]], folder: Path, *, rounds: int, scale: float) -> Costs:
    """Each contestant comes with the interpreter that has it."""
    found: Costs = defaultdict(list)
    async with run(UPSTREAM, folder / "agents-upstream") as upstream, contextlib.AsyncExitStack() as stack:
        url = f"http://{HOST}:{upstream.port}/v1"
        drivers = [await stack.enter_async_context(_drive(each, python, url, folder)) for each, python in contestants]
        for number in range(rounds + 1):  # the first one warms up
            for task in TASKS:
                for driver in drivers:
                    cost = await driver.play(task, scale=scale)
                    if number:
                        found[task.name, driver.name].append(cost)
    return dict(found)


@contextlib.asynccontextmanager
async def _drive(contestant: Contestant, python: Path, url: str, folder: Path) -> AsyncIterator[Driver]:
    """Start a driver; stop it on the way out, whatever happens."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-m", f"benchmarks.drivers.{contestant.driver}", url),
            cwd=folder,
            env=make_environment(folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        try:
            driver = Driver(contestant.name, process, log)
            await driver.read()
            yield driver
        finally:
            # It holds nothing that it would have to put away.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
