"""Selection of tools, and checks of `tool_choice`."""

from typing import Any

import pytest

from antiphon.backends.base import ALL_CAPABILITIES, Capabilities
from antiphon.engine.prepare.toolset import check_item_tools, select_tools
from antiphon.engine.serve.tool_emulation.emulator import add_emulated_capabilities
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import FunctionTool, NamespaceTool
from antiphon.tools.hosted.registry import HostedTools

FUNCTIONS = add_emulated_capabilities(Capabilities(tools=frozenset({"function"})))
F = {"type": "function", "name": "f"}
G = {"type": "function", "name": "g"}
C = {"type": "custom", "name": "c"}
SHELL = {"type": "shell"}
LOCAL = {"type": "local_shell"}
MCP = {"type": "mcp", "server_label": "l", "server_url": "https://example.org"}


def namespace(*tools: Any, name: str = "n") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "d", "tools": list(tools)}


def request(**fields: Any) -> CreateRequest:
    return codec.decode_request(codec.encode(fields)).body


def choose(*tools: Any, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


def test_functions_stay_in_order() -> None:
    assert select_tools(request(tools=[F, G]), capabilities=FUNCTIONS) == ([FunctionTool("f"), FunctionTool("g")], [])


CLIENT_TOOLS: list[dict[str, Any]] = [
    F,
    C,
    {"type": "custom", "name": "d", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}},
    namespace(F, C),
    {"type": "tool_search"},
    {"type": "local_shell"},
    SHELL,
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "computer"},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
]


@pytest.mark.parametrize("tool", CLIENT_TOOLS, ids=str)
def test_client_tools_are_selected(tool: dict[str, Any]) -> None:
    sent_request = request(tools=[tool])
    assert select_tools(sent_request, capabilities=FUNCTIONS) == (sent_request.tools, [])


def test_backend_with_any_tool_gets_every_tool() -> None:
    sent_request = request(tools=[MCP, {"type": "web_search"}, {"type": "acme:tool"}, namespace(namespace(F))])
    assert select_tools(sent_request, capabilities=ALL_CAPABILITIES, unsupported="refuse") == (sent_request.tools, [])


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview", "web_search_2025_08_26"])
def test_web_search_is_dropped_with_a_warning(kind: str) -> None:
    assert select_tools(request(tools=[F, {"type": kind}]), capabilities=FUNCTIONS) == (
        [FunctionTool("f")],
        [f"tools[1]: {kind} is not available here and was left out"],
    )


def test_drop_policy_drops_every_unsupported_tool() -> None:
    tools = [MCP, F, {"type": "acme:tool"}, namespace(MCP)]
    assert select_tools(request(tools=tools), capabilities=FUNCTIONS, unsupported="drop") == (
        [FunctionTool("f")],
        [
            "tools[0]: mcp is not available here and was left out",
            "tools[2]: acme:tool is not available here and was left out",
            "tools[3]: namespace is not available here and was left out",
        ],
    )


def test_refuse_policy_refuses_web_search() -> None:
    with pytest.raises(InvalidRequest) as caught:
        select_tools(request(tools=[{"type": "web_search"}]), capabilities=FUNCTIONS, unsupported="refuse")
    assert (caught.value.param, caught.value.code) == ("tools[0]", "unsupported_tool")


def test_choice_of_a_tool_without_provider_gets_the_reason() -> None:
    sent = request(tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})
    hosted = HostedTools(unavailable={"web_search": "No search provider is configured."})
    with pytest.raises(InvalidRequest) as caught:
        select_tools(sent, capabilities=FUNCTIONS, hosted=hosted)
    expected = "A choice of type 'web_search' is not supported by this server. No search provider is configured."
    assert (caught.value.message, caught.value.param, caught.value.code) == (
        expected,
        "tool_choice",
        "unsupported_tool",
    )


def test_functions_only_drops_other_tools() -> None:
    assert select_tools(request(tools=[MCP, C, F]), capabilities=FUNCTIONS, functions_only=True) == (
        [FunctionTool("f")],
        [
            "tools[0]: mcp is not available here and was left out",
            "tools[1]: custom is not available here and was left out",
        ],
    )


def test_two_namespaces_may_have_one_tool_name() -> None:
    tools, _ = select_tools(request(tools=[F, namespace(F), namespace(F, name="m")]), capabilities=FUNCTIONS)
    assert [tool.name for tool in tools if isinstance(tool, FunctionTool | NamespaceTool)] == ["f", "n", "m"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [F, {"type": "code_interpreter", "container": "c"}]}, "tools[1]", "unsupported_tool"),
        ({"tools": [{"type": "acme:tool"}]}, "tools[0]", "unsupported_tool"),
        ({"tools": [F, F]}, "tools[1].name", "duplicate_tool"),
        ({"tools": [F, {"type": "custom", "name": "f"}]}, "tools[1].name", "duplicate_tool"),
        ({"tools": [SHELL, SHELL]}, "tools[1]", "duplicate_tool"),
        ({"tools": [namespace(F, G, F)]}, "tools[0].tools[2].name", "duplicate_tool"),
        ({"tools": [F, namespace(F, namespace(G))]}, "tools[1].tools[1]", "unsupported_tool"),
        ({"tools": [namespace(MCP)]}, "tools[0].tools[0]", "unsupported_tool"),
        (
            {"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]},
            "tools[0].environment",
            "unsupported_tool",
        ),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [F], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "invalid_value"),
        ({"tools": [F], "tool_choice": {"type": "shell"}}, "tool_choice", "unsupported_tool"),
        ({"tools": [F], "tool_choice": {"type": "acme:choice"}}, "tool_choice", "unsupported_tool"),
        ({"tools": [F, LOCAL], "tool_choice": {"type": "local_shell"}}, "tool_choice", "unsupported_tool"),
        (
            {"tools": [F, {"type": "web_search_preview"}], "tool_choice": {"type": "web_search_preview"}},
            "tool_choice",
            "unsupported_tool",
        ),
        ({"tools": [F], "tool_choice": choose(F, G)}, "tool_choice.tools[1].name", "invalid_value"),
        ({"tools": [F], "tool_choice": choose(MCP)}, "tool_choice.tools[0].type", "unsupported_tool"),
        (
            {"tools": [F], "tool_choice": choose({"type": "namespace", "name": "n"})},
            "tool_choice.tools[0].name",
            "invalid_value",
        ),
        (
            {
                "tools": [namespace(F), namespace(F, name="m")],
                "tool_choice": {"type": "function", "name": "f"},
            },
            "tool_choice.name",
            "invalid_value",
        ),
    ],
)
def test_unsupported_tool_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        select_tools(request(**fields), capabilities=FUNCTIONS)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [F], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [C, MCP], "tool_choice": {"type": "custom", "name": "d"}}, "tool_choice.name"),
        ({"tools": [F, MCP], "tool_choice": choose(MCP, F, G)}, "tool_choice.tools[2].name"),
        ({"tools": [F], "tool_choice": choose({"type": "namespace", "name": "n"})}, "tool_choice.tools[0].name"),
    ],
)
def test_choice_of_an_unknown_name_is_refused_for_any_backend(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        select_tools(request(**fields), capabilities=ALL_CAPABILITIES)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [MCP], "tool_choice": {"type": "mcp", "server_label": "l", "name": "t"}},
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search_preview"}},
        {"tools": [{"type": "web_search"}], "tool_choice": choose({"type": "web_search_preview"})},
        {"tools": [F], "tool_choice": {"type": "acme:choice"}},
        {"tools": [F, {"type": "acme:tool"}], "tool_choice": {"type": "function", "name": "g"}},
        {"tools": [F, {"type": "tool_search"}], "tool_choice": {"type": "function", "name": "g"}},
        {"previous_response_id": "resp_1", "tool_choice": {"type": "function", "name": "g"}},
        {"conversation": "conv_1", "tools": [F], "tool_choice": choose(G)},
    ],
)
def test_choice_for_backend_tools_is_not_checked(fields: dict[str, Any]) -> None:
    assert select_tools(request(**fields), capabilities=ALL_CAPABILITIES)[1] == []


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        "auto",
        "required",
        {"type": "function", "name": "f"},
        {"type": "tool", "name": "f"},
        {"type": "function", "name": "child"},
        {"type": "custom", "name": "c"},
        {"type": "shell"},
        {"type": "computer_use"},
        choose(F, C, SHELL, mode="required"),
        choose({"type": "namespace", "name": "n"}, {"type": "function", "name": "child", "namespace": "n"}),
    ],
)
def test_every_valid_choice_is_accepted(choice: Any) -> None:
    child = {"type": "function", "name": "child"}
    sent_request = request(tools=[F, G, C, SHELL, {"type": "computer"}, namespace(child)], tool_choice=choice)
    assert select_tools(sent_request, capabilities=FUNCTIONS)[1] == []


def test_tool_in_an_input_item_can_be_chosen() -> None:
    brought = {"type": "additional_tools", "role": "developer", "tools": [F]}
    sent_request = request(input=[brought], tool_choice={"type": "function", "name": "f"})
    assert select_tools(sent_request, capabilities=FUNCTIONS) == ([], [])


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "name": "f"}, {"type": "function", "name": "g"}, choose(F, mode="required")],
)
def test_tool_of_an_earlier_turn_can_be_chosen(choice: Any) -> None:
    brought = [{"type": "additional_tools", "role": "developer", "tools": [F, namespace(G)]}]
    earlier = request(input=brought).input
    assert isinstance(earlier, list)
    for fields in {}, {"input": brought}:  # a client may send the same tools with every request
        sent_request = request(tool_choice=choice, **fields)
        assert select_tools(sent_request, capabilities=FUNCTIONS, history=earlier) == ([], [])


def test_tools_in_input_items_are_checked_the_same() -> None:
    items = request(input=[{"type": "additional_tools", "role": "developer", "tools": [F, MCP]}]).input
    assert isinstance(items, list)
    with pytest.raises(InvalidRequest) as caught:
        check_item_tools(items, capabilities=FUNCTIONS)
    assert (caught.value.param, caught.value.code) == ("input[0].tools[1]", "unsupported_tool")
    assert check_item_tools(items, capabilities=FUNCTIONS, unsupported="drop") == [
        "input[0].tools[1]: mcp is not available here and was left out"
    ]
