"""A process that interrupts agent runs at one point, and resumes them: `python interrupted_agents.py`.

It imports everything once and forks for each attempt. It reads the cells of a matrix from its input, as JSON lines:

    {"folder": "...", "structure": "direct", "policy": "ask", "way": "kill", "point": "after intent"}

For each it runs an attempt that is interrupted, and one that resumes the run. Each effect of the tool is a line in the
file `effects`. The answer is a line with the number of effects of the first attempt and the outcome of the second.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from antiphon.agent.agent import Agent
from antiphon.ledger import RunTaken
from antiphon.store.ledger import SqliteLedger
from antiphon.tools.base import Tool, ToolContext
from antiphon.tools.function import tool
from support.crashing_agent import RUN_ID, Script, make_calls

Interrupt = Callable[[], Coroutine[Any, Any, None]]


class WatchedLedger(SqliteLedger):
    """A ledger that interrupts its process before or after the entry that announces a call of the tool."""

    def __init__(self, path: Path, point: str, interrupt: Interrupt | None) -> None:
        super().__init__(path)
        self._point = point
        self._interrupt = interrupt

    async def append(self, run_id: str, number: int, entry: bytes, **options: Any) -> None:
        is_intent = json.loads(entry)["entry"] == "Intended" and json.loads(entry)["call_id"] == "call_0"
        if is_intent and self._point == "before intent":
            await self._interrupt_once()
        await super().append(run_id, number, entry, **options)
        if is_intent and self._point == "after intent":
            await self._interrupt_once()

    async def _interrupt_once(self) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            await interrupt()


def make_agent(cell: dict[str, str], interrupt: Interrupt | None) -> Agent:
    act = make_act(cell, interrupt)
    worker = Agent(model="m", transport=Script(make_calls(1)), tools=[act])
    if cell["structure"] == "direct":
        return worker
    ask = {"type": "function_call", "call_id": "call_e", "name": "expert", "arguments": '{"input":"Act."}'}
    return Agent(model="m", transport=Script([ask]), tools=[worker.as_tool("expert", "Acts.")])


def make_act(cell: dict[str, str], interrupt: Interrupt | None) -> Tool:
    policy: Any = "ask" if cell["policy"] == "approval" else cell["policy"]

    @tool(needs_approval=cell["policy"] == "approval", on_interrupt=policy)
    async def act(number: int, context: ToolContext) -> str:
        """Have an effect."""
        with (Path(cell["folder"]) / "effects").open("a") as file:
            file.write(f"{context.idempotency_key}\n")
        if interrupt is not None and cell["point"] == "after effect":
            await interrupt()
        await asyncio.sleep(0)
        return f"acted {number}"

    return act


def choose_interrupt(cell: dict[str, str], task: "asyncio.Task[Any]") -> Interrupt:
    async def interrupt() -> None:
        match cell["way"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "SIGINT":
                os.kill(os.getpid(), signal.SIGINT)
            case "cancellation":
                task.cancel()
            case "lease lost":
                other = SqliteLedger(Path(cell["folder"]) / "runs.db")
                lease = await other.find_lease(RUN_ID)
                assert lease is not None
                assert await other.hold(RUN_ID, "another", 0, instead_of=lease.owner)
                await other.close()
        await asyncio.sleep(0)

    return interrupt


async def interrupt_run(cell: dict[str, str]) -> None:
    task = asyncio.current_task()
    assert task is not None
    interrupt = choose_interrupt(cell, task)
    ledger = WatchedLedger(Path(cell["folder"]) / "runs.db", cell["point"], interrupt)
    agent = make_agent(cell, interrupt)
    with contextlib.suppress(RunTaken, asyncio.CancelledError, KeyboardInterrupt):
        outcome = await agent.run("Act.", durable=ledger, run_id=RUN_ID)
        if outcome.kind == "needs_approval":
            await agent.resume(RUN_ID, approvals={outcome.pending[0].call_id: True}, durable=ledger)


async def resume_run(cell: dict[str, str]) -> None:
    """Resume the run. A person who is asked permits the call if it has not had its effect."""
    ledger = SqliteLedger(Path(cell["folder"]) / "runs.db")
    agent = make_agent(cell, None)
    outcome = await agent.resume(RUN_ID, durable=ledger)
    while outcome.kind == "needs_approval":
        approvals = {outcome.pending[0].call_id: not count_effects(cell)}
        outcome = await agent.resume(RUN_ID, approvals=approvals, durable=ledger)
    await ledger.close()
    (Path(cell["folder"]) / "outcome").write_text(outcome.kind)


def count_effects(cell: dict[str, str]) -> int:
    path = Path(cell["folder"]) / "effects"
    return len(path.read_text().splitlines()) if path.exists() else 0


def attempt(work: Callable[[dict[str, str]], Coroutine[Any, Any, None]], cell: dict[str, str]) -> None:
    child = os.fork()
    if not child:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(work(cell))
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    for line in sys.stdin:
        cell = json.loads(line)
        attempt(interrupt_run, cell)
        first = count_effects(cell)
        attempt(resume_run, cell)
        sys.stdout.write(f"{first} {(Path(cell['folder']) / 'outcome').read_text()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
