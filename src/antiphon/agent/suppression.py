"""The executor of the server's tools: it notes what each call came to, and does not let a model go in circles.

The second identical call of a turn is made, with a warning. The third is not: it gets a made-up success, because a
model that reads an error tries once more.
"""

import time
from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from antiphon.agent.guard import STOPPED, STOPPED_AT, WARNED_AT, WARNING, Signature, sign
from antiphon.tools.base import Call, Tool, ToolContext, ToolResult
from antiphon.tools.execute import Executor

SUPPRESSED = msgspec.json.encode({"status": "suppressed", "message": STOPPED}).decode()


class Executed(Struct, frozen=True):
    """What a call came to. One that was not made has taken no time."""

    result: ToolResult
    milliseconds: int | None = None


async def _never(_: str, __: ToolContext) -> ToolResult:
    raise AssertionError("the client runs it")


# Stands for every tool of the client, whatever that calls it: a call of one is not made here, so it waits.
_THEIRS = Tool(name="theirs", description="", parameters={}, invoke=_never, needs_approval=True, repeatable=True)


class SuppressingExecutor(Executor):
    """Runs `tools`, and leaves calls by other names to the client. `executed` are the calls so far, by their ids."""

    def __init__(self, tools: Iterable[Tool], *, left_to_client: Iterable[str] = ()) -> None:
        # The guard against loops is our own, in this format's manner.
        super().__init__(msgspec.structs.replace(tool, repeatable=True) for tool in tools)
        self.tools = dict.fromkeys(left_to_client, _THEIRS) | dict(self.tools)
        self.executed: dict[str, Executed] = {}
        self._asked: Counter[Signature] = Counter()

    async def execute(self, call: Call, context: ToolContext) -> ToolResult:
        signature = sign(call)
        self._asked[signature] += 1
        repeats = self._asked[signature]
        if repeats >= STOPPED_AT:
            return self._note(call, Executed(ToolResult(SUPPRESSED)))
        began = time.perf_counter()
        result = await super().execute(call, context)
        took = round((time.perf_counter() - began) * 1000) if call.name in self.tools else None
        return self._note(call, Executed(_warn(result) if repeats >= WARNED_AT else result, took))

    def _note(self, call: Call, executed: Executed) -> ToolResult:
        self.executed[call.call_id] = executed
        return executed.result


def _warn(result: ToolResult) -> ToolResult:
    if isinstance(result.output, str):
        return ToolResult(f"{result.output}\n\n{WARNING}", result.is_error)
    return ToolResult([*result.output, {"type": "input_text", "text": WARNING}], result.is_error)
