"""Tools of an agent that the server runs, over HTTP and with an engine of this process."""

from typing import Any

import pytest

from antiphon import Agent, CodeInterpreter, ConfigError, FileSearch, LocalTransport, Mcp, WebSearch, tool
from antiphon.engine.engine import Engine
from antiphon.store.memory.store import MemoryStore
from antiphon.tools.hosted.registry import HostedTools
from antiphon.tools.server_tools import ServerTool
from support.hosted_tool import RecordingTool
from support.recording_backend import RecordingBackend


@pytest.mark.parametrize(
    ("described", "entry"),
    [
        (
            FileSearch(vector_store_ids=["vs_1"], max_num_results=3),
            {"type": "file_search", "vector_store_ids": ["vs_1"], "max_num_results": 3},
        ),
        (CodeInterpreter(), {"type": "code_interpreter", "container": {"type": "auto"}}),
        (WebSearch(search_context_size="low"), {"type": "web_search", "search_context_size": "low"}),
        (
            Mcp(server_label="notes", authorization="secret"),
            {"type": "mcp", "server_label": "notes", "authorization": "secret", "require_approval": "never"},
        ),
    ],
)
def test_tool_describes_its_entry_in_a_request(described: ServerTool, entry: dict[str, Any]) -> None:
    assert described.describe() == entry


def test_repr_of_an_mcp_server_has_no_secrets() -> None:
    assert repr(Mcp(server_label="notes", authorization="secret")) == "Mcp(server_label='notes')"


async def test_agent_in_process_uses_hosted_tools_and_its_own() -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    search = {"tool_call": {"name": "file_search", "arguments": {"queries": ["cats"]}}}
    total = {"tool_call": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    backend = RecordingBackend({"rules": [{"answers": [[search], [total], "Three cats."]}]}, only_functions=True)
    recording = RecordingTool()
    engine = Engine(backends={"test": backend}, store=MemoryStore(), hosted_tools=HostedTools([recording]))
    await engine.start()
    agent = Agent(
        model="scripted", transport=LocalTransport(engine), tools=[FileSearch(vector_store_ids=["vs_1"]), add]
    )
    outcome = await agent.run("Count the cats.")
    await engine.close()
    assert outcome.output == "Three cats."
    assert recording.effects == ["cats"]
    assert [tool.name for tool in backend.turns[0].request.tools or ()] == ["add", "file_search"]
    outputs = [item.output for item in backend.turns[-1].items if item.type == "function_call_output"]
    assert outputs == ["【1】 a.txt\nText about cats.", "3"]


def test_tool_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a tool"):
        Agent(model="m", base_url="http://localhost/v1", tools=[FileSearch(vector_store_ids=[]), object()])
