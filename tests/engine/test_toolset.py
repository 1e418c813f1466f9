"""Which tools reach the model, and which `tool_choice` fits them."""

from typing import Any

import pytest

from antiphon.engine.toolset import select_tools
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import FunctionTool

F = {"type": "function", "name": "f"}
G = {"type": "function", "name": "g"}


def request(**fields: Any) -> CreateRequest:
    return codec.decode_request(codec.encode(fields)).request


def test_functions_are_kept_in_order() -> None:
    assert select_tools(request(tools=[F, G])) == ([FunctionTool("f"), FunctionTool("g")], [])


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview", "web_search_2025_08_26"])
def test_web_search_is_left_out_with_a_warning(kind: str) -> None:
    assert select_tools(request(tools=[F, {"type": kind}])) == (
        [FunctionTool("f")],
        [f"tools[1]: {kind} is not available here and was left out"],
    )


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [F, {"type": "code_interpreter", "container": "c"}]}, "tools[1]", "unsupported_tool"),
        ({"tools": [{"type": "acme:tool"}]}, "tools[0]", "unsupported_tool"),
        ({"tools": [F, F]}, "tools[1].name", "duplicate_tool"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [F], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "invalid_value"),
        ({"tools": [F], "tool_choice": {"type": "shell"}}, "tool_choice", "unsupported_tool"),
        ({"tools": [F], "tool_choice": {"type": "acme:choice"}}, "tool_choice", "unsupported_tool"),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [F, G]}},
            "tool_choice.tools[1].name",
            "invalid_value",
        ),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            "tool_choice.tools[0].type",
            "unsupported_tool",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        select_tools(request(**fields))
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        "auto",
        "required",
        {"type": "function", "name": "f"},
        {"type": "tool", "name": "f"},
        {"type": "allowed_tools", "mode": "required", "tools": [F]},
    ],
)
def test_every_choice_that_fits_is_accepted(choice: Any) -> None:
    assert select_tools(request(tools=[F, G], tool_choice=choice))[1] == []
