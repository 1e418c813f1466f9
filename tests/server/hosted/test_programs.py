"""Programs over HTTP: the official client, programs in processes, and a server that is killed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("py_mini_racer")
pytest.importorskip("mcp")

from antiphon.engine.serve.hosted.call_runner import UNKNOWN_OUTCOME
from antiphon.protocol.response import FINAL_STATUSES
from antiphon.tools.hosted.base import HostedSetup
from antiphon.tools.hosted.program.tool import ProgramHostedTool
from antiphon.tools.hosted.registry import HostedTools
from support.crashing_server import KillableServer, wait_until
from support.live_server import LiveServer, make_settings
from support.mcp_wire_server import WireServer, serve_mcp
from support.threads import run_in_thread

PROGRAMS: Any = {"type": "programmatic_tool_calling"}
GET: Any = {
    "type": "function",
    "name": "get_stock",
    "parameters": {"type": "object", "properties": {"sku": {"type": "string"}}},
    "output_schema": {"type": "object", "properties": {"units": {"type": "integer"}}},
    "strict": False,
    "allowed_callers": ["programmatic"],
}
CODE = """
const stocks = await Promise.all(["a", "b"].map((sku) => tools.get_stock({sku})));
text(stocks.reduce((sum, stock) => sum + stock.units, 0));
"""
CALLS = """
const first = await tools.quick({}), rest = [];
for (const name of ['slow', 'again']) rest.push(await tools[name]({}).catch((error) => error.message));
text(first, rest);
"""


def make_script(code: str) -> dict[str, Any]:
    call = {"tool_call": {"name": PROGRAMS["type"], "arguments": {"code": code}}}
    rules = [{"last_item": "function_call_output", "answers": ["42 units."]}, {"answers": [[call]]}]
    return {"native_tools": ["function"], "rules": rules}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    settings = make_settings()
    tools = HostedTools([ProgramHostedTool(HostedSetup(settings=settings))])
    live = LiveServer(make_script(CODE), settings, hosted_tools=tools)
    yield live
    live.stop()


def test_client_runs_the_calls_of_a_streamed_program(server: LiveServer) -> None:
    client = server.client()
    tools = [PROGRAMS, GET]
    choice: Any = {"type": "programmatic_tool_calling"}
    with client.responses.stream(model="scripted", input="sum", tools=tools, tool_choice=choice) as stream:
        events = list(stream)
        first = stream.get_final_response()
    types = [event.type.removeprefix("response.") for event in events]
    call_events = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert types[2:] == ["output_item.added", "output_item.done", *call_events * 2, "completed"]
    added, done = (event.item for event in events[2:4])  # type: ignore[union-attr]
    assert (added.type, added.code, done.code, done.fingerprint != added.fingerprint) == ("program", "", CODE, True)
    program, *calls = first.output
    assert (first.status, program.call_id) == ("completed", done.call_id)
    assert [(call.name, call.status, call.caller.to_dict()) for call in calls] == [
        ("get_stock", "in_progress", {"type": "program", "caller_id": program.call_id})
    ] * 2
    units = {'{"sku":"a"}': 40, '{"sku":"b"}': 2}
    outputs: Any = [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "caller": call.caller.to_dict(),
            "output": f'{{"units": {units[call.arguments]}}}',
        }
        for call in calls
    ]
    second = client.responses.create(model="scripted", input=outputs, tools=tools, previous_response_id=first.id)
    result, message = second.output
    assert (result.type, result.call_id, result.result, result.status) == (
        "program_output",
        program.call_id,
        "42",
        "completed",
    )
    assert (message.type, second.output_text) == ("message", "42 units.")
    history: Any = [item.to_dict() for item in first.output]
    history += [*outputs, *(item.to_dict() for item in second.output), {"role": "user", "content": "again"}]
    third = client.responses.create(model="scripted", input=history, tools=tools, store=False)
    assert [item.type for item in third.output] == ["program", "function_call", "function_call"]


class Gate:
    """The answer of slow tools: calls that arrive before the gate is open are never answered."""

    def __init__(self) -> None:
        self.is_open = False

    async def call(self, _: dict[str, Any]) -> str:
        if not self.is_open:
            await asyncio.Event().wait()
        return "done"


def test_killed_server_repeats_no_call_of_a_program(tmp_path: Path) -> None:
    def start() -> KillableServer:
        return KillableServer(tmp_path, make_script(CALLS), outbound_allow=["127.0.0.1"], background_lease_seconds=0.5)

    gate = Gate()
    tools = {"quick": lambda _: "quick", "slow": gate.call, "again": lambda _: "again"}
    with run_in_thread(serve_mcp(tools)) as mcp:
        entry = {
            "type": "mcp",
            "server_label": "s",
            "server_url": mcp.url,
            "require_approval": "never",
            "allowed_callers": ["programmatic"],
        }
        response = _run_until_killed(start, entry, mcp, gate)
    assert [name for name, _ in mcp.calls] == ["quick", "slow", "again"]
    assert [item["type"] for item in response["output"]] == [
        "mcp_list_tools",
        "program",
        *["mcp_call"] * 3,
        "program_output",
        "message",
    ]
    assert [item.get("status") for item in response["output"]][2:] == [
        "completed",
        "failed",
        "completed",
        "completed",
        "completed",
    ]
    assert response["output"][-2]["result"] == f'quick ["{UNKNOWN_OUTCOME}","again"]'


def _run_until_killed(start: Any, entry: dict[str, Any], mcp: WireServer, gate: Gate) -> Any:
    server = start()
    try:
        response_id = server.start_background("go", tools=[entry, PROGRAMS])
        wait_until(lambda: [name for name, _ in mcp.calls] == ["quick", "slow"])
    finally:
        server.kill()
    gate.is_open = True
    server = start()
    try:
        wait_until(lambda: server.status(response_id) in FINAL_STATUSES)
        return server.ask("GET", f"/v1/responses/{response_id}")
    finally:
        server.kill()
