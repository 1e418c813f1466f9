"""A process for crash tests. It runs attempts at a run and kills them.

It imports everything once and forks for each attempt. It reads the attempts from its input, one JSON object per line:

    {"directory": "...", "policy": "retry", "kill_at": 7, "kill_after": null, "verdict": null, "nested": false}

An attempt starts the run in the directory, or resumes it. It is killed at its step number `kill_at` (before or after an
entry is written, before or after the effect of a tool), or after `kill_after` seconds. The outcome is written to the
file `outcome`; each effect is a line in the file `effects`. The answer to an attempt is a line with the exit status.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.agent.agent import Agent
from antiphon.agent.outcome import Outcome
from antiphon.agent.transports.base import Events
from antiphon.ledger import RunSummary
from antiphon.protocol import codec
from antiphon.store.ledger import SqliteLedger
from antiphon.tools.base import Tool, ToolContext
from antiphon.tools.function import tool

RUN_ID = "run_1"
CALLS = 12
AT_ONCE = 3


class CrashPoint:
    """Counts the steps and kills the process at step `kill_at`."""

    def __init__(self, kill_at: int | None) -> None:
        self._left = kill_at

    def step(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class CrashingLedger:
    def __init__(self, inner: SqliteLedger, crash_point: CrashPoint) -> None:
        self._inner = inner
        self._crash_point = crash_point

    async def append(
        self, run_id: str, number: int, entry: bytes, *, status: str | None = None, title: str = ""
    ) -> None:
        self._crash_point.step()
        await self._inner.append(run_id, number, entry, status=status, title=title)
        self._crash_point.step()

    async def read(self, run_id: str) -> Sequence[bytes]:
        return await self._inner.read(run_id)

    async def runs(self, *, limit: int = 100) -> Sequence[RunSummary]:
        return await self._inner.runs(limit=limit)

    async def close(self) -> None:
        await self._inner.close()


class Script:
    """A model that makes its calls, some in each turn, and then answers. Its position follows from the input."""

    def __init__(self, calls: list[dict[str, Any]], *, at_once: int = AT_ONCE) -> None:
        self._calls = calls
        self._at_once = at_once

    async def stream(self, request: dict[str, Any]) -> Events:
        made = sum(item.get("type") == "function_call_output" for item in request["input"])
        output = self._calls[made : made + self._at_once] or [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}
        ]
        response = {"id": f"resp_{made}", "status": "completed", "output": output}
        event = codec.decode_event(json.dumps({"type": "response.completed", "response": response}).encode())

        async def events() -> Events:
            yield [event]

        return events()

    async def close(self) -> None:
        """There is nothing to close."""


def make_calls(count: int) -> list[dict[str, Any]]:
    return [
        {"type": "function_call", "call_id": f"call_{number}", "name": "act", "arguments": f'{{"number":{number}}}'}
        for number in range(count)
    ]


def make_act(directory: Path, policy: Any, crash_point: CrashPoint) -> Tool:
    @tool(on_interrupt=policy)
    async def act(number: int, context: ToolContext) -> str:
        """Have an effect."""
        crash_point.step()
        with (directory / "effects").open("a") as file:
            file.write(f"{number} {context.idempotency_key}\n")
        crash_point.step()
        await asyncio.sleep(0)
        return f"acted {number}"

    return act


def make_agent(order: dict[str, Any], directory: Path, crash_point: CrashPoint) -> Agent:
    act = make_act(directory, order["policy"], crash_point)
    if not order["nested"]:
        return Agent(model="m", transport=Script(make_calls(CALLS)), tools=[act])
    expert = Agent(model="m", name="expert", transport=Script(make_calls(AT_ONCE)), tools=[act])
    ask = {"type": "function_call", "call_id": "call_e", "name": "expert", "arguments": '{"input":"Act."}'}
    return Agent(model="m", transport=Script([ask]), tools=[expert.as_tool("expert", "Acts.")])


async def attempt(order: dict[str, Any]) -> None:
    directory, crash_point = Path(order["directory"]), CrashPoint(order["kill_at"])
    ledger = CrashingLedger(SqliteLedger(directory / "runs.db"), crash_point)
    agent = make_agent(order, directory, crash_point)
    if not await ledger.read(RUN_ID):
        outcome = await agent.run("Act.", ledger=ledger, run_id=RUN_ID)
    else:
        outcome = await agent.resume(RUN_ID, ledger=ledger)
    while outcome.kind == "needs_approval":
        verdicts = {call.call_id: order["verdict"] for call in outcome.pending}
        outcome = await agent.resume(RUN_ID, approvals=verdicts, ledger=ledger)
    (directory / "outcome").write_text(describe(outcome))


def describe(outcome: Outcome) -> str:
    outputs = [item["output"] for item in outcome.history if item.get("type") == "function_call_output"]
    return json.dumps({"kind": outcome.kind, "text": outcome.text, "outputs": outputs})


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            asyncio.run(attempt(order))
            # Skip the exit handlers of the parent.
            os._exit(0)
        if order["kill_after"] is not None:
            time.sleep(order["kill_after"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
