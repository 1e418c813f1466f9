"""What `tool_choice` and `parallel_tool_calls` let a model do."""

from typing import Any

import pytest

from emulation_bench import call

F = {"type": "function", "name": "f"}
G = {"type": "function", "name": "g"}
C = {"type": "custom", "name": "c"}
N = {"type": "namespace", "name": "n", "description": "d", "tools": [F | {"name": "child"}]}
SHELL = {"type": "shell"}
COMPUTER = {"type": "computer"}
TOOLS = [F, G, C, N, SHELL, {"type": "apply_patch"}, COMPUTER]
EVERY_NAME = ["f", "g", "c", "n__child", "shell", "apply_patch", "computer"]


def allow(*tools: Any, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


@pytest.mark.parametrize(
    ("choice", "lowered"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "function", "name": "child"}, "n__child"),
        ({"type": "custom", "name": "c"}, "c"),
        ({"type": "shell"}, "shell"),
        ({"type": "apply_patch"}, "apply_patch"),
        ({"type": "computer"}, "computer"),
        ({"type": "computer_use"}, "computer"),
        ({"type": "computer_use_preview"}, "computer"),
    ],
)
async def test_every_choice_is_one_of_a_function_to_the_model(emulate: Any, choice: Any, lowered: str) -> None:
    bench = await emulate({"text": "Ok."})
    answer = await bench.ask(tools=TOOLS, tool_choice=choice)
    given = answer.turns[0].request.tool_choice
    assert (getattr(given, "name", given), answer.shown) == (lowered, EVERY_NAME)
    assert answer.response["tool_choice"] == choice


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"type": "function", "name": "g"}, "g"),
        ({"type": "tool", "name": "g"}, "g"),
        ({"type": "function", "name": "child"}, "n__child"),
        ({"type": "function", "name": "child", "namespace": "n"}, "n__child"),
        ({"type": "namespace", "name": "n"}, "n__child"),
        ({"type": "custom", "name": "c"}, "c"),
        ({"type": "shell"}, "shell"),
        ({"type": "computer"}, "computer"),
    ],
)
async def test_only_allowed_tools_are_shown(emulate: Any, entry: Any, name: str) -> None:
    bench = await emulate({"text": "Ok."})
    answer = await bench.ask(tools=TOOLS, tool_choice=allow(entry, mode="required"))
    assert (answer.shown, answer.turns[0].request.tool_choice) == ([name], "required")


async def test_a_call_of_a_tool_that_is_not_allowed_is_left_out(emulate: Any) -> None:
    bench = await emulate(call("f", {"a": 1}), call("g", {}, "call_2"), call("shell", {"commands": []}, "call_3"))
    answer = await bench.ask(tools=TOOLS, tool_choice=allow(G))
    assert [item["call_id"] for item in answer.output] == ["call_2"]


async def test_a_model_that_only_calls_what_it_may_not_is_asked_once_more(emulate: Any) -> None:
    bench = await emulate(call("f", {}), rules=[{"text": "may not be made", "answers": ["Then not."]}])
    answer = await bench.ask(tools=TOOLS, tool_choice="none")
    assert ([item["type"] for item in answer.output], len(answer.turns)) == (["message"], 2)


async def test_a_model_that_still_calls_what_it_may_not_fails_clearly(emulate: Any) -> None:
    bench = await emulate(call("f", {}))
    answer = await bench.ask(tools=TOOLS, tool_choice="none")
    assert (answer.response["status"], answer.output, len(answer.turns)) == ("failed", [], 2)
    assert answer.response["error"] == {
        "code": "tool_not_allowed",
        "message": "The model called nothing but tools that it may not call now.",
        "type": "model_error",
    }


async def test_where_calls_may_not_be_parallel_the_first_is_the_only_one(emulate: Any) -> None:
    bench = await emulate(
        {"tool_call": {"key": 1, "name": "f", "arguments": "{", "call_id": "call_1"}},
        {"tool_call": {"key": 2, "name": "g", "arguments": "{}", "call_id": "call_2"}},
        {"tool_call": {"key": 1, "arguments": "}"}},
        call("shell", {"commands": ["ls"]}, "call_3"),
    )
    answer = await bench.ask(tools=TOOLS, parallel_tool_calls=False)
    assert [(item["call_id"], item["arguments"]) for item in answer.output] == [("call_1", "{}")]
    assert answer.turns[0].request.parallel_tool_calls is False


async def test_a_custom_tool_that_the_model_has_itself_is_held_to_the_same(emulate: Any) -> None:
    steps = [{"custom_tool_call": {"name": name, "input": ["x", "y"]}} for name in ("c", "d")]
    bench = await emulate(*steps, native_tools=["function", "custom"])
    answer = await bench.ask(tools=[C, C | {"name": "d"}], parallel_tool_calls=False)
    assert [(item["name"], item["input"]) for item in answer.output] == [("c", "xy")]


async def test_calls_of_every_kind_come_in_their_order(emulate: Any) -> None:
    bench = await emulate(
        call("shell", {"commands": ["ls"]}, "call_1"),
        call("f", {}, "call_2"),
        call("c", {"input": "x"}, "call_3"),
        call("n__child", {}, "call_4"),
        call("computer", {"actions": [{"type": "wait"}]}, "call_5"),
        call("unheard_of", {}, "call_6"),
    )
    answer = await bench.ask(tools=TOOLS)
    assert [(item["type"], item["call_id"]) for item in answer.output] == [
        ("shell_call", "call_1"),
        ("function_call", "call_2"),
        ("custom_tool_call", "call_3"),
        ("function_call", "call_4"),
        ("computer_call", "call_5"),
        ("function_call", "call_6"),
    ]
