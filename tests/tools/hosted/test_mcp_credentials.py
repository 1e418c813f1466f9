"""Credentials of MCP servers: they are in no error, log line or output."""

import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("mcp")

from antiphon.errors import ConnectorError
from antiphon.tool_settings import McpServerSettings
from antiphon.tools.hosted.base import HostedSession, HostedSetup
from antiphon.tools.hosted.mcp.tool import McpHostedTool
from support.hosted_sessions import compose, make_context, make_settings, run_call
from support.mcp_wire_server import serve_mcp
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


@pytest.mark.parametrize("options", [{"authorization": "key-123456"}, {"headers": {"X-Key": "Token key-123456"}}])
async def test_key_of_an_operators_server_is_masked_without_its_scheme(options: dict[str, Any]) -> None:
    async with serve_mcp({"run": lambda _: "the key is key-123456"}) as server:
        servers = {"s": McpServerSettings(url=server.url, **options)}
        tools = [{"type": "mcp", "server_label": "s", "require_approval": "never"}]
        async with hosting(tools, mcp_servers=servers) as session:
            _, output = compose(await run_call(session, "run", "{}"))
    assert output[0]["output"] == "the key is ***"
