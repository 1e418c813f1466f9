"""Tool lists that requests share: the same results as for a list of one's own, and nothing changes them."""

from typing import Any

import pytest

from antiphon.backends.base import Capabilities, Turn
from antiphon.config.settings import UnsupportedTools
from antiphon.engine.engine import Engine
from antiphon.engine.prepare.toolset import select_tools
from antiphon.engine.serve.tool_emulation.emulator import Emulator
from antiphon.engine.serve.tool_emulation.translate_request import needs_translation
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tool_lists import SharedTools
from antiphon.store.memory.store import MemoryStore
from support.recording_backend import RecordingBackend

FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    "strict": False,
}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "c"}
LISTS = [[FUNCTION], [FUNCTION, CUSTOM], [CUSTOM], [FUNCTION, FUNCTION], [FUNCTION | {"name": "g"}, FUNCTION]]
CAPABILITIES = [
    Capabilities(),
    Capabilities(tools=frozenset({"function"})),
    Capabilities(tools=frozenset({"function", "custom"})),
    Capabilities(any_tool=True),
]


def decode(tools: list[dict[str, Any]]) -> CreateRequest:
    return codec.decode_request(codec.encode({"model": "scripted", "input": "hi", "tools": tools})).body


def decode_alone(tools: list[dict[str, Any]]) -> CreateRequest:
    request = decode(tools)
    request.tools = list(request.tools or ())
    return request


def plan(request: CreateRequest, capabilities: Capabilities, **options: Any) -> Any:
    """Return everything that is derived from the tools of a request, or the error."""
    backend = RecordingBackend({"default": "hi"})
    backend.capabilities = capabilities
    emulator = Emulator(backend)
    try:
        selected = select_tools(request, capabilities=emulator.capabilities, **options)
    except InvalidRequest as error:
        return error.param, error.message
    turn = Turn(request=request, items=[])
    return selected, emulator.describe_emulation(request), needs_translation(turn, capabilities)


@pytest.mark.parametrize("tools", LISTS)
@pytest.mark.parametrize("unsupported", ["default", "drop", "refuse"])
@pytest.mark.parametrize("functions_only", [False, True])
def test_shared_list_has_the_plan_of_a_list_of_its_own(
    tools: list[dict[str, Any]], unsupported: UnsupportedTools, functions_only: bool
) -> None:
    shared = decode(tools)
    assert isinstance(shared.tools, SharedTools)
    for capabilities in [*CAPABILITIES, *reversed(CAPABILITIES)]:  # the second time from the cache
        options = {"unsupported": unsupported, "functions_only": functions_only}
        assert plan(shared, capabilities, **options) == plan(decode_alone(tools), capabilities, **options)


@pytest.mark.parametrize("tools", LISTS[:3])
@pytest.mark.parametrize("only_functions", [False, True])
async def test_serving_a_request_changes_no_shared_tool(tools: list[dict[str, Any]], only_functions: bool) -> None:
    backend = RecordingBackend({"default": [{"text": "hi"}]}, only_functions=only_functions)
    engine = Engine(backends={"test": backend}, store=MemoryStore())
    await engine.start()
    before = codec.encode(decode(tools).tools)
    served: list[tuple[Any, bytes]] = []
    for project in ("one", "two"):
        run = await engine.create(decode(tools), project=project)
        served.append(((await run.drain()).tools, codec.encode(backend.turns[-1].request)))
    await engine.close()
    assert served[0] == served[1] == (decode_alone(tools).tools, served[0][1])
    assert codec.encode(decode(tools).tools) == before
