"""Credentials of MCP servers: they are in no error, log line or output."""

import logging
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("mcp")

from antiphon.config.tools import McpServerSettings
from antiphon.errors import ConnectorError
from antiphon.tools.hosted.base import HostedSession, HostedSetup
from antiphon.tools.hosted.mcp.tool import McpHostedTool
from support.hosted_sessions import compose, list_types, make_context, make_settings, run_call
from support.mcp_wire_server import RpcError, serve_mcp
from support.upstream_server import Reply, serve


@asynccontextmanager
async def hosting(tools: list[dict[str, Any]], **settings: Any) -> AsyncIterator[HostedSession]:
    tool = McpHostedTool(HostedSetup(settings=make_settings(**settings)))
    context = make_context(tools)
    assert context.request.tools is not None
    try:
        yield await tool.open(context.request.tools[0], context)
    finally:
        await tool.close()


@pytest.mark.parametrize("status", [302, 401, 500])
async def test_credentials_of_a_url_are_in_no_error(status: int, caplog: pytest.LogCaptureFixture) -> None:
    reply = Reply(status=status, headers={"Location": "/v1/other?key=key-123456"} if status == 302 else {}, body=b"no")
    async with serve([reply] * 40) as server:
        url = server.url.replace("http://", "http://ada:pass-123456@") + "?key=key-123456"
        with pytest.raises(ConnectorError) as raised:
            async with hosting([{"type": "mcp", "server_label": "s", "server_url": url}]):
                pass
    logged = "".join(traceback.format_exception(raised.value)) + caplog.text
    assert ("pass-123456" in logged, "key-123456" in logged) == (False, False)


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_malformed_answer_is_one_log_line(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    reply = Reply(headers={"Content-Type": kind}, body=b"data: key-123456\n\n")
    async with serve([reply] * 40) as server:
        url = server.url.replace("http://", "http://ada:pass-123456@")
        with pytest.raises(ConnectorError):
            async with hosting([{"type": "mcp", "server_label": "s", "server_url": url}]):
                pass
    lines = [logging.Formatter().format(record) for record in caplog.records if record.levelno >= logging.WARNING]
    assert {line.partition(": ")[2].partition(":")[0] for line in lines} == {"The answer of the server is invalid"}
    assert all("\n" not in line and "123456" not in line for line in lines)


@pytest.mark.parametrize("options", [{"authorization": "key-123456"}, {"headers": {"X-Key": "Token key-123456"}}])
async def test_key_of_an_operators_server_is_masked_without_its_scheme(options: dict[str, Any]) -> None:
    async with serve_mcp({"run": lambda _: "the key is key-123456"}) as server:
        servers = {"s": McpServerSettings(url=server.url, **options)}
        tools = [{"type": "mcp", "server_label": "s", "require_approval": "never"}]
        async with hosting(tools, mcp_servers=servers) as session:
            _, output = compose(await run_call(session, "run", "{}"))
    assert output[0]["output"] == "the key is ***"


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (
            {"isError": True, "content": [{"type": "text", "text": "no key-123456"}]},
            {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "no ***"}]},
        ),
        (
            RpcError(-32001, "token key-123456 is bad"),
            {"type": "mcp_protocol_error", "code": -32001, "message": "token *** is bad"},
        ),
        (RpcError(-32000, "busy"), {"type": "mcp_protocol_error", "code": -32000, "message": "busy"}),
        (
            {"content": [{"type": "text"}]},
            {
                "type": "mcp_protocol_error",
                "code": -32603,
                "message": "The answer of the server is invalid: content.0.TextContent.text: Field required",
            },
        ),
    ],
)
async def test_failure_of_a_tool_is_a_failed_item_without_secrets(result: Any, error: dict[str, Any]) -> None:
    def run(_: dict[str, Any]) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    async with serve_mcp({"run": run}) as server:
        tools = [{"type": "mcp", "server_label": "s", "server_url": server.url, "require_approval": "never"}]
        async with hosting([tools[0] | {"authorization": "key-123456"}]) as session:
            events, output = compose(await run_call(session, "run", "{}"))
    assert list_types(events)[-2:] == ["mcp_call.failed", "output_item.done"]
    assert output == [
        {
            "type": "mcp_call",
            "id": "mcp_1",
            "arguments": "{}",
            "name": "run",
            "server_label": "s",
            "error": error,
            "output": None,
            "status": "failed",
        }
    ]
    assert {headers.get("authorization") for headers in server.headers} == {"Bearer key-123456"}
