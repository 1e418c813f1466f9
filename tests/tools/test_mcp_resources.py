"""Resources, prompts, annotations and options of a real MCP server."""

import json
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from antiphon.agent.approvals import needs_approval
from antiphon.errors import ConfigError, UpstreamError
from antiphon.tools.base import Tool, ToolContext, ToolInvocation, ToolResult
from antiphon.tools.executor import Executor
from antiphon.tools.mcp import McpServer
from antiphon.tools.mcp_resources import McpPrompt, McpPromptArgument, McpResource, McpResourceTemplate

SUPPORT = Path(__file__).parents[1] / "support"
CONTEXT = ToolContext(run_id="run_1", call_id="call_1", idempotency_key="key_1")
pytestmark = pytest.mark.asyncio(loop_scope="module")


def start(folder: Path, **options: Any) -> McpServer:
    return McpServer.stdio(sys.executable, [str(SUPPORT / "mcp_library.py"), str(folder)], **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[McpServer]:
    options: dict[str, Any] = {"resource_tools": True, "prompt_tools": True, "prefix": "my."}
    async with start(tmp_path_factory.mktemp("library"), **options) as opened:
        yield opened


def configure(server: McpServer, **options: Any) -> dict[str, Tool]:
    """Return the tools that the server would have with other options."""
    other = McpServer("library", server._connect, options)  # type: ignore[arg-type]
    return {tool.name: tool for tool in other._make_tools(server._listed)}


async def call(tools: list[Tool], name: str, arguments: str = "{}") -> ToolResult:
    return await Executor(tools).execute(ToolInvocation("call_1", name, arguments), CONTEXT)


async def test_resources_are_listed_and_read(server: McpServer) -> None:
    assert sorted(await server.list_resources(), key=lambda each: each.uri) == [
        McpResource("dot", "image://dot", description="A picture.", mime_type="image/png"),
        McpResource("today", "note://today", description="The note of the day.", mime_type="text/plain"),
    ]
    assert await server.list_resource_templates() == [
        McpResourceTemplate("note", "note://{name}", description="A note by name.", mime_type="text/plain")
    ]
    assert await server.read_resource("note://today") == [{"type": "input_text", "text": "Buy milk."}]
    assert await server.read_resource("note://x") == [{"type": "input_text", "text": "The note x."}]
    assert await server.read_resource("image://dot") == [
        {"type": "input_image", "image_url": "data:image/png;base64,aW1hZ2U="}
    ]
    with pytest.raises(UpstreamError, match=r"returned no result: .*missing://"):
        await server.read_resource("missing://")


async def test_prompt_is_returned_as_input_items(server: McpServer) -> None:
    arguments = (McpPromptArgument("topic", required=True), McpPromptArgument("tone"))
    assert await server.list_prompts() == [McpPrompt("review", description="Ask for a review.", arguments=arguments)]
    assert await server.get_prompt("review", {"topic": "tea"}) == [
        {"role": "user", "content": [{"type": "input_text", "text": "Review tea, be kind."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Gladly."}]},
    ]
    with pytest.raises(UpstreamError, match="returned no result"):
        await server.get_prompt("review")


async def test_model_reads_resources_and_prompts_with_tools(server: McpServer) -> None:
    tools = server.tools
    listed = await call(tools, "my_list_resources")
    assert [each["uri"] for each in json.loads(str(listed.output))["resources"]] == ["note://today", "image://dot"]
    assert [each["uriTemplate"] for each in json.loads(str(listed.output))["templates"]] == ["note://{name}"]
    read = await call(tools, "my_read_resource", '{"uri": "note://today"}')
    assert read == ToolResult([{"type": "input_text", "text": "Buy milk."}])
    assert (await call(tools, "my_read_resource", '{"uri": "missing://"}')).is_error
    assert json.loads(str((await call(tools, "my_list_prompts")).output))[0]["name"] == "review"
    prompt = await call(tools, "my_get_prompt", '{"name": "review", "arguments": {"topic": "tea"}}')
    assert "Review tea, be kind." in str(prompt.output)
    assert (await call(tools, "my_get_prompt", '{"arguments": {}}')).is_error


async def test_annotations_decide_about_repetition(server: McpServer) -> None:
    tools = configure(server)
    assert {name: (tool.repeatable, tool.on_interrupt) for name, tool in tools.items()} == {
        "read": (True, "retry"),
        "put": (True, "retry"),
        "append": (False, "ask"),
        "delete": (False, "ask"),
        "break_once": (False, "ask"),
    }


async def test_destructive_tools_need_approval_if_configured(server: McpServer) -> None:
    tools = configure(server, needs_approval="destructive")
    assert {name: tool.needs_approval for name, tool in tools.items()} == {
        "read": False,
        "put": True,
        "append": False,
        "delete": True,
        "break_once": True,
    }
    with pytest.raises(ConfigError, match="needs_approval: 'sometimes' is not 'destructive'"):
        configure(server, needs_approval="sometimes")


async def test_approval_can_depend_on_the_call(server: McpServer) -> None:
    def decide(name: str, arguments: Mapping[str, Any]) -> bool:
        return name == "delete" and arguments["name"] != "draft"

    tools = configure(server, needs_approval=decide)
    waiting = {
        text: needs_approval(tools["delete"], ToolInvocation("c", "delete", json.dumps({"name": text})))
        for text in ("draft", "book")
    }
    assert waiting == {"draft": False, "book": True}
    assert not needs_approval(tools["read"], ToolInvocation("c", "read", "{}"))


async def test_options_replace_the_annotations(server: McpServer) -> None:
    tools = configure(server, retries={"read": 2}, on_interrupt={"delete": "tell", "put": "ask"}, repeatable=["append"])
    assert {name: (tool.retries, tool.on_interrupt, tool.repeatable) for name, tool in tools.items()} == {
        "read": (2, "retry", True),
        "put": (0, "ask", True),
        "append": (0, "ask", True),
        "delete": (0, "tell", False),
        "break_once": (0, "ask", False),
    }
    every = configure(server, retries=1, on_interrupt="retry", repeatable=False)
    assert {(tool.retries, tool.on_interrupt, tool.repeatable) for tool in every.values()} == {(1, "retry", False)}


@pytest.mark.parametrize(
    "options", [{"on_interrupt": {"reed": "retry"}}, {"retries": {"reed": 1}}, {"repeatable": ["reed"]}]
)
async def test_option_for_an_unknown_tool_is_rejected(server: McpServer, options: Any) -> None:
    other = McpServer("library", server._connect, options)
    (name,) = options
    with pytest.raises(ConfigError, match=rf"has no tool 'reed' \({name}\)\. It has: append, break_once, delete"):
        other._check_option_names(server._listed)


async def test_call_is_repeated_with_the_same_key_if_configured(tmp_path: Path) -> None:
    async with start(tmp_path, retries=1) as server:
        result = await call(server.tools, "break_once")
    assert (result, (tmp_path / "keys").read_text().split()) == (ToolResult("well"), ["key_1"] * 2)


async def test_request_of_the_server_is_refused_and_the_call_goes_on() -> None:
    async with McpServer.stdio(sys.executable, [str(SUPPORT / "mcp_asking_server.py")]) as server:
        for method, message in (
            ("sampling/createMessage", "Sampling not supported"),
            ("elicitation/create", "Elicitation not supported"),
            ("roots/list", "List roots not supported"),
        ):
            result = await call(server.tools, "ask", json.dumps({"method": method}))
            refusal = {"code": -32600, "message": message}
            assert (result.is_error, msgspec.json.decode(str(result.output))) == (False, refusal)
        assert await server.list_resources() == []
        assert await server.list_prompts() == []
