"""The tools of the OpenAI Agents SDK, executed by the SDK, on a model that supports only functions."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from agents import (
    Agent,
    ApplyPatchTool,
    CustomTool,
    LocalShellTool,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    ShellTool,
    ToolSearchTool,
    function_tool,
)
from agents.editor import ApplyPatchOperation, ApplyPatchResult
from openai import AsyncOpenAI

from support.tool_script import SCRIPT

PLAIN = RunConfig(tracing_disabled=True)


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve(SCRIPT)


@pytest.fixture
async def client(server: Any) -> AsyncIterator[AsyncOpenAI]:
    async with server.async_client() as client:
        yield client


class Editor:
    def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        return ApplyPatchResult(status="completed", output=f"created {operation.path}")

    update_file = delete_file = create_file


async def draw(context: Any, text: str) -> str:
    return f"drew {text}"


@function_tool(defer_loading=True)
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return "mild"


TOOLS: dict[str, list[Any]] = {
    "shell": [ShellTool(executor=lambda request: f"ran {' '.join(request.data.action.commands)}")],
    "local_shell": [LocalShellTool(executor=lambda request: f"ran {' '.join(request.data.action.command)}")],
    "apply_patch": [ApplyPatchTool(editor=Editor())],
    "draw": [CustomTool(name="draw", description="Draws.", on_invoke_tool=draw)],
    "search": [ToolSearchTool(), get_weather],
}


@pytest.mark.parametrize("name", TOOLS)
async def test_tool_is_executed_and_its_output_is_read(client: AsyncOpenAI, name: str) -> None:
    model = OpenAIResponsesModel(model="scripted", openai_client=client)
    agent = Agent(name="worker", model=model, tools=TOOLS[name])
    result = await Runner.run(agent, f"use {name}", run_config=PLAIN)
    assert result.final_output.startswith("It said ")
