"""MCP servers that forget a session, or return results that do not match their schemas or requests."""

from typing import Any

import pytest

pytest.importorskip("mcp")

from antiphon.errors import ConnectorError
from antiphon.tools.hosted.base import HostedSetup
from antiphon.tools.hosted.mcp.tool import McpHostedTool
from support.hosted_sessions import compose, make_context, make_settings, run_call
from support.mcp_wire_server import WireServer, serve_mcp


def make_tools(server: WireServer) -> list[dict[str, Any]]:
    return [{"type": "mcp", "server_label": "s", "server_url": server.url, "require_approval": "never"}]


async def call(tool: McpHostedTool, server: WireServer) -> dict[str, Any]:
    """List the tools of the server and call the first one. Return its item."""
    context = make_context(make_tools(server))
    assert context.request.tools is not None
    session = await tool.open(context.request.tools[0], context)
    _, (item,) = compose(await run_call(session, session.functions[0].name, "{}"))
    return item


async def test_forgotten_session_is_opened_again_for_a_list() -> None:
    tool = McpHostedTool(HostedSetup(settings=make_settings()))
    async with serve_mcp({"run": lambda _: "done"}) as server:
        for server.session in ("first", "second"):
            assert (await call(tool, server))["output"] == "done"
        await tool.close()
    assert (server.methods.count("initialize"), len(server.calls)) == (2, 2)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"n": "one"}, "Invalid structured content returned by tool run: 'one' is not of type 'integer'"),
        (None, "Tool run has an output schema but did not return structured content"),
    ],
)
async def test_result_that_does_not_match_its_schema_fails_the_call(content: Any, reason: str) -> None:
    tool = McpHostedTool(HostedSetup(settings=make_settings()))
    result = {"content": [{"type": "text", "text": "x"}]} | ({"structuredContent": content} if content else {})
    async with serve_mcp({"run": lambda _: result}) as server:
        server.output_schemas["run"] = {"type": "object", "properties": {"n": {"type": "integer"}}}
        item = await call(tool, server)
        await tool.close()
    assert item["error"] == {"type": "mcp_protocol_error", "code": -32603, "message": reason}


@pytest.mark.parametrize("answer", [None, 5])
async def test_answer_that_is_no_message_fails_the_call_without_its_data(answer: Any) -> None:
    tool = McpHostedTool(HostedSetup(settings=make_settings()))
    async with serve_mcp({"run": lambda _: "done"}) as server:
        server.results["run"] = answer
        item = await call(tool, server)
        await tool.close()
    message = "The answer of the server is not a valid message of JSON-RPC."
    assert item["error"] == {"type": "mcp_protocol_error", "code": -32700, "message": message}


WRONG_ANSWER = "The server's HTTP response is not the answer to the request: its id is another one, or missing."


@pytest.mark.parametrize("fields", [{"id": 1000}, {"id": "other"}, {"id": None}, {"method": "ping"}])
async def test_answer_to_another_request_fails_the_call_at_once(fields: dict[str, Any]) -> None:
    tool = McpHostedTool(HostedSetup(settings=make_settings()))
    async with serve_mcp({"run": lambda _: "done"}) as server:
        server.replies["tools/call"] = fields
        failed = await call(tool, server)
        del server.replies["tools/call"]
        item = await call(tool, server)
        await tool.close()
    assert failed["error"] == {"type": "mcp_protocol_error", "code": -32603, "message": WRONG_ANSWER}
    assert item["output"] == "done"


async def test_error_without_an_id_fails_the_call_with_its_message() -> None:
    tool = McpHostedTool(HostedSetup(settings=make_settings()))
    async with serve_mcp({"run": lambda _: "done"}) as server:
        server.replies["tools/call"] = {"id": None, "error": {"code": -32700, "message": "Too large."}}
        item = await call(tool, server)
        await tool.close()
    assert item["error"] == {"type": "mcp_protocol_error", "code": -32700, "message": "Too large."}


@pytest.mark.parametrize("method", ["initialize", "tools/list"])
async def test_answer_to_another_request_fails_the_list_at_once(method: str) -> None:
    tool = McpHostedTool(HostedSetup(settings=make_settings()))
    async with serve_mcp({"run": lambda _: "done"}) as server:
        server.replies[method] = {"id": 1000}
        with pytest.raises(ConnectorError, match="its id is another one, or missing"):
            await call(tool, server)
        await tool.close()
