"""MCP servers whose tools are listed by the first search, or were listed by an earlier attempt at the response."""

import msgspec
import pytest

pytest.importorskip("mcp")

from antiphon.protocol.hosted import McpListTools, McpToolInfo
from antiphon.tools.hosted.base import HostedSetup
from antiphon.tools.hosted.mcp.tool import McpHostedTool
from support.hosted_sessions import collect, compose, list_types, make_context, make_settings
from support.mcp_wire_server import serve_mcp


async def test_deferred_list_is_loaded_later_and_may_fail() -> None:
    tool = McpHostedTool(HostedSetup(settings=make_settings()))
    async with serve_mcp({"add": lambda _: "1"}) as server:
        entry = {"type": "mcp", "server_label": "s", "server_url": server.url, "defer_loading": True}
        context = msgspec.structs.replace(make_context([entry]), can_defer=True)
        assert context.request.tools is not None
        session = await tool.open(context.request.tools[0], context)
        assert (session.is_deferred, session.functions, await collect(session.introduce())) == (True, [], [])
        assert server.methods == []
        loaded = await session.load()
        other = await tool.open(context.request.tools[0], context)
        server.status = 503
        events, output = compose(await other.load())
        await tool.close()
    assert [function.name for function in session.functions] == ["add"]
    assert (session.is_deferred, compose(loaded)[1][0]["type"]) == (False, "mcp_list_tools")
    assert list_types(events)[2:] == ["mcp_list_tools.failed", "output_item.done"]
    assert (other.functions, output[0]["error"]["code"]) == ([], 503)


async def test_resumed_response_takes_its_list_from_the_earlier_attempt() -> None:
    tool = McpHostedTool(HostedSetup(settings=make_settings()))
    async with serve_mcp({"add": lambda _: "1"}) as server:
        server.status = 503
        entry = {"type": "mcp", "server_label": "s", "server_url": server.url, "server_description": "Sums."}
        context = msgspec.structs.replace(make_context([entry]), resumed=True)
        assert context.request.tools is not None
        session = await tool.open(context.request.tools[0], context)
        session.observe(McpListTools("s", [], "mcpl_1", error={"type": "http_error", "code": 500, "message": "x"}))
        session.observe(McpListTools("s", [McpToolInfo("add", {"type": "object"})], "mcpl_2"))
        await tool.close()
    assert [function.name for function in session.functions] == ["add"]
    assert (session.instructions, server.headers) == ("The tools of the MCP server 's': Sums.", [])
