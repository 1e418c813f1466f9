"""Runs an agent whenever it is told to: a line with a task's name comes in, a line with what that took goes out.

Nothing here needs more than the standard library: the processes of others run it too.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from benchmarks.tasks import OUTPUT, TASKS, Task


class Heard(NamedTuple):
    """What came of a run: its text, and in how many pieces it was heard, if it was streamed."""

    text: str
    pieces: int


Run = Callable[[], Awaitable[Heard]]
Connect = Callable[[str], Coroutine[Any, Any, Callable[[Task], Run]]]
"""From the address of the upstream to what makes an agent for a task."""


async def look_up(number: int) -> str:
    """Look up a figure.

    Args:
        number: Which of the figures.
    """
    return OUTPUT


def perform(connect: Connect) -> None:
    """Take tasks from the standard input until it ends. The first argument of the command is the address."""
    with asyncio.Runner() as runner:
        prepare = runner.run(connect(sys.argv[1]))
        runs = {task.name: prepare(task) for task in TASKS}
        print("ready", flush=True)
        for line in sys.stdin:
            name, count = json.loads(line)
            began = time.process_time()
            heard = runner.run(_repeat(runs[name], count))
            print(json.dumps([time.process_time() - began, heard]), flush=True)


async def _repeat(run: Run, count: int) -> list[Heard]:
    return [await run() for _ in range(count)]
