"""What the model of a task says, and a backend that says it in this process."""

import asyncio
import json
from collections.abc import Sequence

from antiphon.backends.base import Capabilities, Deltas, Model, Turn
from antiphon.protocol.items import FunctionCallOutput
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import Delta, Finish, Text, Tokens, ToolCall
from benchmarks.tasks import TASKS, Task

PAUSE = 0.002
"""Seconds between the reads of a paced answer: whoever hears it is done with one before the next one comes."""

Reads = list[list[Delta]]


def rehearse(task: Task) -> list[Reads]:
    """The turns of a task: the n-th is for a conversation in which n calls have been made."""
    turns: list[Reads] = [[[_call(number)]] for number in range(task.calls)]
    words: list[Delta] = [Text(piece) for piece in task.pieces]
    turns.append([[word] for word in words] if task.paced else [words])
    for reads in turns:
        reads[-1] = [*reads[-1], Tokens(Usage(10, 20, 30)), Finish()]
    return turns


def _call(number: int) -> ToolCall:
    # No call is like another: that would be taken for a model that has lost its way.
    return ToolCall(key=0, name="look_up", arguments=json.dumps({"number": number}), call_id=f"call_{number}")


class Rehearsal:
    """Serves the models of the tasks."""

    capabilities = Capabilities(tools=frozenset({"function"}))

    def __init__(self) -> None:
        self._turns = {task.name: rehearse(task) for task in TASKS}

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def models(self) -> Sequence[Model]:
        return [Model(id=name, created=0, owned_by="benchmarks") for name in self._turns]

    async def stream(self, turn: Turn) -> Deltas:
        made = sum(isinstance(item, FunctionCallOutput) for item in turn.items)
        return self._play(self._turns[turn.request.model or ""][made])

    async def _play(self, reads: Reads) -> Deltas:
        first, *others = reads
        yield first
        for read in others:
            await asyncio.sleep(PAUSE)
            yield read

    async def count_tokens(self, turn: Turn) -> int:
        return 0
