"""A process that interrupts agent runs at one point, and resumes them: `python interrupted_agents.py`.

It imports everything once and forks for each attempt that is interrupted. It reads the cells of a matrix from its
input, as JSON lines:

    {"folder": "...", "structure": "direct", "policy": "ask", "way": "kill", "point": "after intent"}

For each it runs an attempt in a child process, which is interrupted, and then resumes the run itself. Each effect of
the tool is a line in the file `effects`. The answer is a line with the number of effects of the first attempt and the
outcome of the second. The tool is one of the agent, of a subagent, of an agent to which the run is handed over, or of
an MCP server in another process.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from msgspec import structs

from antiphon.agent.agent import Agent
from antiphon.ledger import RunTaken
from antiphon.store.ledger import SqliteLedger
from antiphon.tools.base import Tool, ToolContext, ToolResult
from antiphon.tools.function import tool
from antiphon.tools.mcp import McpServer
from support.crashing_agent import RUN_ID, Script, make_calls
from support.ports import port_of, reserve_port

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


def make_agent(cell: dict[str, str], interrupt: Interrupt | None, server: McpServer | None) -> Agent:
    act = make_act(cell, interrupt) if server is None else make_mcp_act(cell, interrupt, server)
    worker = Agent(model="m", transport=Script(make_calls(1)), tools=[act])
    match cell["structure"]:
        case "subagent":
            ask = {"type": "function_call", "call_id": "call_e", "name": "expert", "arguments": '{"input":"Act."}'}
            return Agent(model="m", transport=Script([ask]), tools=[worker.as_tool("expert", "Acts.")])
        case "handoff":
            transfer = {"type": "function_call", "call_id": "call_t", "name": "transfer_to_worker", "arguments": "{}"}
            script = Script([transfer, *make_calls(1)], at_once=1)
            second = Agent(model="m", name="worker", transport=script, tools=[act])
            return Agent(model="m", name="triage", transport=Script([transfer]), handoffs=[second])
        case _:
            return worker


def find_policy(cell: dict[str, str]) -> Any:
    return "ask" if cell["policy"] == "approval" else cell["policy"]


@contextlib.asynccontextmanager
async def connect(url: str | None) -> AsyncIterator[McpServer | None]:
    if url is None:
        yield None
    else:
        async with McpServer.http(url) as server:
            yield server


def make_mcp_act(cell: dict[str, str], interrupt: Interrupt | None, server: McpServer) -> Tool:
    (act,) = server.tools

    async def invoke(arguments: str, context: ToolContext) -> ToolResult:
        result = await act.invoke(arguments, context)
        if interrupt is not None and cell["point"] == "after effect":
            await interrupt()
        return result

    approval = cell["policy"] == "approval"
    return structs.replace(act, invoke=invoke, on_interrupt=find_policy(cell), needs_approval=approval)


def serve_mcp(port: int, current: Path) -> None:
    """Serve a tool that has its effect in the folder that the file `current` names."""
    from mcp.server.mcpserver import Context, MCPServer

    server = MCPServer("effects", log_level="CRITICAL")

    @server.tool()
    def act(number: int, context: Context) -> str:
        """Have an effect."""
        with (Path(current.read_text()) / "effects").open("a") as file:
            file.write(f"{(context.request_context.meta or {}).get('antiphon/idempotency-key')}\n")
        return f"acted {number}"

    asyncio.run(server.run_streamable_http_async(port=port, json_response=True, stateless_http=True))


@contextlib.contextmanager
def running_mcp_server(current: Path) -> Iterator[str]:
    """Serve the tool in a process of its own and yield its URL."""
    with reserve_port() as reserved:
        port = port_of(reserved)
        child = os.fork()
        if not child:
            serve_mcp(port, current)
            os._exit(0)
        try:
            wait_for_port(port)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def make_act(cell: dict[str, str], interrupt: Interrupt | None) -> Tool:
    policy = find_policy(cell)

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


async def interrupt_run(cell: dict[str, str], url: str | None) -> None:
    task = asyncio.current_task()
    assert task is not None
    interrupt = choose_interrupt(cell, task)
    ledger = WatchedLedger(Path(cell["folder"]) / "runs.db", cell["point"], interrupt)
    with contextlib.suppress(RunTaken, asyncio.CancelledError, KeyboardInterrupt):
        async with connect(url) as server:
            agent = make_agent(cell, interrupt, server)
            outcome = await agent.run("Act.", ledger=ledger, run_id=RUN_ID)
            if outcome.kind == "needs_approval":
                await agent.resume(RUN_ID, approvals={outcome.pending[0].call_id: True}, ledger=ledger)


async def resume_run(cell: dict[str, str], server: McpServer | None) -> str:
    """Resume the run and return its outcome. A person who is asked permits the call if it has not had its effect."""
    ledger = SqliteLedger(Path(cell["folder"]) / "runs.db")
    agent = make_agent(cell, None, server)
    outcome = await agent.resume(RUN_ID, ledger=ledger)
    while outcome.kind == "needs_approval":
        approvals = {outcome.pending[0].call_id: not count_effects(cell)}
        outcome = await agent.resume(RUN_ID, approvals=approvals, ledger=ledger)
    await ledger.close()
    return outcome.kind


def count_effects(cell: dict[str, str]) -> int:
    path = Path(cell["folder"]) / "effects"
    return len(path.read_text().splitlines()) if path.exists() else 0


def interrupt_in_child(cell: dict[str, str], url: str | None) -> None:
    child = os.fork()
    if not child:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(interrupt_run(cell, url))
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    cells = [json.loads(line) for line in sys.stdin]
    with tempfile.TemporaryDirectory() as folder:
        current = Path(folder) / "current"
        current.write_text(folder)
        if any(cell["structure"] == "mcp" for cell in cells):
            with running_mcp_server(current) as url:
                run_cells(cells, current, url)
        else:
            run_cells(cells, current, None)


def run_cells(cells: list[dict[str, str]], current: Path, url: str | None) -> None:
    # The loop does not run while the process forks.
    with asyncio.Runner() as runner:
        connection = connect(url)
        server = runner.run(connection.__aenter__())
        # A run without an interruption imports and builds everything before the first fork.
        agent = make_agent(cells[0] | {"folder": str(current.parent), "policy": "retry"}, None, server)
        assert runner.run(agent.run("Act.")).kind == "final"
        for cell in cells:
            current.write_text(cell["folder"])
            interrupt_in_child(cell, url)
            first = count_effects(cell)
            sys.stdout.write(f"{first} {runner.run(resume_run(cell, server))}\n")
            sys.stdout.flush()
        runner.run(connection.__aexit__(None, None, None))


if __name__ == "__main__":
    main()
