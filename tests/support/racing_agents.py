"""A process for tests in which several processes resume the same run at once: `python racing_agents.py`.

It imports everything once and forks for each attempt. It reads the folder and the number of processes of each round
from its input, as JSON lines. A round prepares a run whose process died in the middle of a call, and then lets the
processes resume it. Each writes its outcome, or the name of its error, to a file of its own; each effect of the tool is
a line in the file `effects`. The answer is a line when all have ended.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from antiphon.agent.agent import Agent
from antiphon.store.ledger import SqliteLedger
from antiphon.tools.base import Tool, ToolContext
from antiphon.tools.function import tool
from support.crashing_agent import RUN_ID, Script, make_calls

CALLS = 3


def make_act(folder: Path, *, dies: bool) -> Tool:
    @tool(on_interrupt="retry")
    async def act(number: int, context: ToolContext) -> str:
        """Have an effect."""
        with (folder / "effects").open("a") as file:
            file.write(f"{os.getpid()} {number} {context.idempotency_key}\n")
        if dies:
            os._exit(0)
        # Let the others run while this process is in the middle of its run.
        await asyncio.sleep(0.005)
        return f"acted {number}"

    return act


def make_agent(folder: Path, *, dies: bool) -> Agent:
    # One call in a turn.
    return Agent(model="m", transport=Script(make_calls(CALLS), at_once=1), tools=[make_act(folder, dies=dies)])


async def begin(folder: Path) -> None:
    await make_agent(folder, dies=True).run("Act.", ledger=SqliteLedger(folder / "runs.db"), run_id=RUN_ID)


async def resume(folder: Path, number: int) -> None:
    ledger = SqliteLedger(folder / "runs.db")
    try:
        outcome = (await make_agent(folder, dies=False).resume(RUN_ID, ledger=ledger)).kind
    except Exception as error:
        outcome = type(error).__name__  # type: ignore[assignment]
    await ledger.close()
    (folder / f"outcome-{number}").write_text(f"{os.getpid()} {outcome}")


def fork(work: Any) -> int:
    child = os.fork()
    if not child:
        asyncio.run(work)
        os._exit(0)
    work.close()
    return child


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        folder = Path(order["folder"])
        os.waitpid(fork(begin(folder)), 0)
        for child in [fork(resume(folder, number)) for number in range(order["processes"])]:
            os.waitpid(child, 0)
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
