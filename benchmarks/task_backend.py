"""The model turns of each task, and a backend that yields them in this process."""

import asyncio
import json
from collections.abc import Sequence

from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.protocol.items import FunctionCallOutput
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import Delta, Deltas, Finish, Text, TokenUsage, ToolCall
from benchmarks.tasks import TASKS, Task

READ_INTERVAL = 0.002
"""Seconds between the reads of a paced answer. A client finishes one read before the next arrives."""

Reads = list[list[Delta]]


def make_turns(task: Task) -> list[Reads]:
    """Return the turns of a task. Turn n follows n tool calls."""
    turns: list[Reads] = [[[_call(number)]] for number in range(task.calls)]
    words: list[Delta] = [Text(piece) for piece in task.pieces]
    turns.append([[word] for word in words] if task.paced else [words])
    for reads in turns:
        reads[-1] = [*reads[-1], TokenUsage(Usage(10, 20, 30)), Finish()]
    return turns


def _call(number: int) -> ToolCall:
    # Calls must differ: agents stop a model that repeats a call.
    return ToolCall(key=0, name="look_up", arguments=json.dumps({"number": number}), call_id=f"call_{number}")


class TaskBackend:
    """A backend with one model per task."""

    capabilities = Capabilities(tools=frozenset({"function"}))

    def __init__(self) -> None:
        self._turns = {task.name: make_turns(task) for task in TASKS}

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def models(self) -> Sequence[Model]:
        return [Model(id=name, created=0, owned_by="benchmarks") for name in self._turns]

    async def stream(self, turn: Turn) -> Deltas:
        calls = sum(isinstance(item, FunctionCallOutput) for item in turn.items)
        return self._emit(self._turns[turn.request.model or ""][calls])

    async def _emit(self, reads: Reads) -> Deltas:
        first, *others = reads
        yield first
        for read in others:
            await asyncio.sleep(READ_INTERVAL)
            yield read

    async def count_tokens(self, turn: Turn) -> int:
        return 0
