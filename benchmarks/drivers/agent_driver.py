"""The main loop of an agent driver: read the name of a task, run it, write the CPU time and the results.

Uses only the standard library, because the processes of other packages import it.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from benchmarks.tasks import OUTPUT, TASKS, Task


class RunResult(NamedTuple):
    """The text of a run, and the number of its text deltas if it was streamed."""

    text: str
    pieces: int


Run = Callable[[], Awaitable[RunResult]]
Connect = Callable[[str], Coroutine[Any, Any, Callable[[Task], Run]]]
"""Takes the address of the upstream. Returns a function that makes an agent for a task."""


async def look_up(number: int) -> str:
    """Look up a figure.

    Args:
        number: Number of the figure.
    """
    return OUTPUT


def serve_tasks(connect: Connect) -> None:
    """Run the tasks named on standard input until it ends. The first command-line argument is the address."""
    with asyncio.Runner() as runner:
        prepare = runner.run(connect(sys.argv[1]))
        runs = {task.name: prepare(task) for task in TASKS}
        print("ready", flush=True)
        for line in sys.stdin:
            name, count = json.loads(line)
            began = time.process_time()
            results = runner.run(_repeat(runs[name], count))
            print(json.dumps([time.process_time() - began, results]), flush=True)


async def _repeat(run: Run, count: int) -> list[RunResult]:
    return [await run() for _ in range(count)]
