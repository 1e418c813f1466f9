"""Tools and tool choice."""

from typing import Any

import pytest

HELLO = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA, **more}


def test_a_tool_is_described(write: Any) -> None:
    body = write(HELLO, tools=[tool(description="The weather"), {"type": "function", "name": "bare"}])
    assert body["tools"] == [
        {"name": "weather", "description": "The weather", "input_schema": SCHEMA},
        {"name": "bare", "input_schema": {"type": "object", "properties": {}}},
    ]
    assert "tool_choice" not in body


def test_a_strict_tool_is_enforced_where_the_model_can(write: Any) -> None:
    (new,) = write(HELLO, tools=[tool(strict=True)])["tools"]
    (old,) = write(HELLO, tools=[tool(strict=True)], model="claude-sonnet-4-0")["tools"]
    assert new == {"name": "weather", "strict": True, "input_schema": SCHEMA | {"additionalProperties": False}}
    assert old == {"name": "weather", "input_schema": SCHEMA}


def test_more_strict_tools_than_the_api_takes_are_told_as_usual(write: Any) -> None:
    body = write(HELLO, tools=[tool(f"t{number}", strict=True) for number in range(21)])
    assert [each.get("strict") for each in body["tools"]] == [None] * 21


def test_a_name_that_the_api_does_not_take_gets_a_substitute(write: Any) -> None:
    long = "x" * 200
    body = write(HELLO, tools=[tool("files.read"), tool(long)], tool_choice={"type": "function", "name": "files.read"})
    assert [each["name"] for each in body["tools"]] == ["files_read_601e4eb6", f"{'x' * 100}_aa20c23e"]
    assert body["tool_choice"] == {"type": "tool", "name": "files_read_601e4eb6"}


@pytest.mark.parametrize(
    ("choice", "written"),
    [
        ("auto", None),
        ("none", {"type": "none"}),
        ("required", {"type": "any"}),
        ({"type": "function", "name": "weather"}, {"type": "tool", "name": "weather"}),
    ],
)
def test_a_choice_is_told(write: Any, choice: Any, written: Any) -> None:
    assert write(HELLO, tools=[tool()], tool_choice=choice).get("tool_choice") == written


@pytest.mark.parametrize(
    ("choice", "written"),
    [
        ("auto", {"type": "auto", "disable_parallel_tool_use": True}),
        ("required", {"type": "any", "disable_parallel_tool_use": True}),
        ("none", {"type": "none"}),
    ],
)
def test_one_call_at_a_time_is_part_of_the_choice(write: Any, choice: str, written: Any) -> None:
    body = write(HELLO, tools=[tool()], tool_choice=choice, parallel_tool_calls=False)
    assert body["tool_choice"] == written


def test_tools_of_earlier_calls_are_known_but_not_to_be_called(write: Any) -> None:
    body = write(HELLO, {"type": "function_call", "call_id": "1", "name": "old", "arguments": "{}"})
    assert body["tools"] == [{"name": "old", "input_schema": {"type": "object", "properties": {}}}]
    assert body["tool_choice"] == {"type": "none"}
