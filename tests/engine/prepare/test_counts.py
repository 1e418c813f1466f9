"""Limits on the numbers of items, parts and tools."""

from typing import Any

import pytest

from antiphon.engine.policy import Policy
from antiphon.engine.prepare.counts import check_counts, check_parts
from antiphon.errors import InvalidRequest
from antiphon.protocol.content import InputText, ReasoningText, SummaryText
from antiphon.protocol.items import CustomToolCallOutput, FunctionCallOutput, Message, Reasoning
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import FunctionTool, NamespaceTool
from antiphon.protocol.unions import Unknown

POLICY = Policy(max_input_items=3, max_content_parts=4, max_tools=2)
TEXT = InputText("x")


def tool(name: str) -> FunctionTool:
    return FunctionTool(name)


@pytest.mark.parametrize(
    ("fields", "param", "setting", "limit"),
    [
        ({"input": [Unknown(b"{}")] * 4}, "input", "max_input_items", 3),
        ({"input": [Message("user", [TEXT] * 5)]}, "input[0]", "max_content_parts", 4),
        ({"input": [Message("user", [TEXT] * 3), Message("user", [TEXT] * 2)]}, "input[1]", "max_content_parts", 4),
        ({"input": [FunctionCallOutput([TEXT] * 5, "c")]}, "input[0]", "max_content_parts", 4),
        ({"input": [CustomToolCallOutput("c", [TEXT] * 5)]}, "input[0]", "max_content_parts", 4),
        ({"input": [Reasoning([SummaryText("x")] * 2, content=[ReasoningText("x")] * 3)]}, "input[0]",
         "max_content_parts", 4),
        ({"tools": [tool("a"), tool("b"), tool("c")]}, "tools", "max_tools", 2),
        ({"tools": [NamespaceTool("n", "", [tool("a"), tool("b")])]}, "tools", "max_tools", 2),
    ],
)  # fmt: skip
def test_too_many_are_refused(fields: dict[str, Any], param: str, setting: str, limit: int) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_counts(CreateRequest(**fields), POLICY)
    assert (raised.value.param, raised.value.code) == (param, "array_above_max_length")
    assert f"at most {limit} (setting {setting})" in raised.value.message


def test_as_many_as_allowed_are_accepted() -> None:
    items = [Message("user", [TEXT] * 2), Message("user", "x"), FunctionCallOutput("x", "c")]
    check_counts(CreateRequest(input=items, tools=[tool("a"), tool("b")]), POLICY)
    check_counts(CreateRequest(input="x" * 1000), POLICY)
    check_counts(CreateRequest(), POLICY)


def test_error_names_the_field_of_the_items() -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_parts([Message("user", [TEXT] * 5)], POLICY, param="items")
    assert raised.value.param == "items[0]"
