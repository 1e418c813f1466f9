"""MCP calls after SIGKILL: no call is repeated unless its tool is idempotent, and no approval is used twice."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from antiphon.engine.serve.hosted.call_runner import UNKNOWN_OUTCOME
from antiphon.protocol.response import FINAL_STATUSES
from support.crashing_server import KillableServer, wait_until
from support.mcp_wire_server import WireServer, serve_mcp
from support.threads import run_in_thread

SECRET = "secret-token-123"
TOOLS = ("once", "again", "approved", "deferred")


class Gate:
    """The answers of all tools: calls that arrive before the gate is open are never answered."""

    def __init__(self) -> None:
        self.is_open = False

    async def call(self, _: dict[str, Any]) -> str:
        if not self.is_open:
            await asyncio.Event().wait()
        return "done"


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def mcp(gate: Gate) -> Iterator[WireServer]:
    with run_in_thread(serve_mcp(dict.fromkeys(TOOLS, gate.call))) as wire:
        wire.annotations = {"again": {"idempotentHint": True}}
        yield wire


def make_script() -> dict[str, Any]:
    search = {"tool_call": {"name": "tool_search", "arguments": {"query": "deferred"}}}
    found = {"tool_call": {"name": "s__deferred", "arguments": {}}}
    rules: list[dict[str, Any]] = [
        {"last_item": "function_call_output", "text": "outcome is unknown", "answers": ["Done."]},
        {"last_item": "function_call_output", "text": "can be called now", "answers": [[found]]},
        {"last_item": "function_call_output", "answers": ["Done."]},
        {"user": "deferred", "answers": [[search]]},
        {"user": "labelled", "answers": [[{"tool_call": {"name": "s__once", "arguments": {}}}]]},
        {"user": "hello", "answers": ["Hello."]},
    ]
    rules += [{"user": name, "answers": [[{"tool_call": {"name": name, "arguments": {}}}]]} for name in TOOLS]
    return {"native_tools": ["function"], "rules": rules}


def start(folder: Path) -> KillableServer:
    return KillableServer(folder, make_script(), outbound_allow=["127.0.0.1"], background_lease_seconds=0.5)


def test_killed_server_repeats_no_call_and_no_approval(tmp_path: Path, mcp: WireServer, gate: Gate) -> None:
    never: Any = {"type": "mcp", "server_label": "s", "server_url": mcp.url, "require_approval": "never"}
    always = never | {"require_approval": "always"}
    server = start(tmp_path)
    try:
        first = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "approved", "tools": [always]})
        request_id = first["output"][-1]["id"]
        approval = [{"type": "mcp_approval_response", "approval_request_id": request_id, "approve": True}]
        approving: Any = {"input": approval, "tools": [always], "previous_response_id": first["id"]}
        ids = {name: server.start_background(name, tools=[never | {"authorization": SECRET}]) for name in TOOLS[:2]}
        ids["approved"] = server.start_background("", **approving)
        ids["deferred"] = server.start_background(
            "deferred", tools=[{"type": "tool_search"}, never | {"defer_loading": True}]
        )
        wait_until(lambda: {name for name, _ in mcp.calls} == set(TOOLS))
    finally:
        server.kill()
    gate.is_open = True
    listed = mcp.methods.count("tools/list")
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())

    server = start(tmp_path)
    try:
        for response_id in ids.values():
            wait_until(lambda response_id=response_id: server.status(response_id) in FINAL_STATUSES)  # type: ignore[misc]
        responses = {name: server.ask("GET", f"/v1/responses/{ids[name]}") for name in TOOLS}
        refused = server.ask("POST", "/v1/responses", {"model": "scripted"} | approving)
    finally:
        server.kill()
    assert {name: response["status"] for name, response in responses.items()} == dict.fromkeys(TOOLS, "completed")
    calls = {name: next(item for item in responses[name]["output"] if item["type"] == "mcp_call") for name in TOOLS}
    names = [name for name, _ in mcp.calls]
    assert {name: names.count(name) for name in TOOLS} == {"once": 1, "again": 2, "approved": 1, "deferred": 1}
    assert (calls["again"]["status"], calls["again"]["output"]) == ("completed", "done")
    for name in ("once", "approved", "deferred"):
        assert (calls[name]["status"], calls[name]["error"]["message"]) == ("failed", UNKNOWN_OUTCOME)
    assert calls["approved"]["approval_request_id"] == request_id
    assert mcp.methods.count("tools/list") == listed
    assert refused["error"]["code"] == "approval_already_used"


def test_names_of_two_servers_with_one_list_in_the_context_survive_a_kill(
    tmp_path: Path, mcp: WireServer, gate: Gate
) -> None:
    """Both servers have a tool of the same name, so that its name for the model begins with the label."""
    tools: Any = [
        {"type": "mcp", "server_label": label, "server_url": mcp.url, "require_approval": "never"} for label in "st"
    ]
    server = start(tmp_path)
    try:
        first = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hello", "tools": tools[:1]})
        response_id = server.start_background("labelled", tools=tools, previous_response_id=first["id"])
        wait_until(lambda: mcp.calls == [("once", {})])
    finally:
        server.kill()
    gate.is_open = True

    server = start(tmp_path)
    try:
        wait_until(lambda: server.status(response_id) in FINAL_STATUSES)
        response = server.ask("GET", f"/v1/responses/{response_id}")
    finally:
        server.kill()
    assert [item["type"] for item in response["output"]] == ["mcp_list_tools", "mcp_call", "message"]
    assert (response["error"], response["output"][1]["error"]["message"]) == (None, UNKNOWN_OUTCOME)
