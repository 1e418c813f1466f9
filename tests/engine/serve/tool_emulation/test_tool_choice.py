"""Enforcement of `tool_choice` and `parallel_tool_calls`."""

from typing import Any

import pytest

from antiphon.errors import InvalidRequest
from support.tool_emulation import call

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
    ("choice", "translated"),
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
async def test_every_choice_is_sent_as_a_function_choice(emulate: Any, choice: Any, translated: str) -> None:
    harness = await emulate({"refusal": "No."})
    answer = await harness.ask(tools=TOOLS, tool_choice=choice)
    given = answer.turns[0].request.tool_choice
    assert (getattr(given, "name", given), answer.shown) == (translated, EVERY_NAME)
    assert (answer.response["tool_choice"], answer.response["status"]) == (choice, "completed")


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
async def test_only_allowed_tools_are_sent_to_the_model(emulate: Any, entry: Any, name: str) -> None:
    harness = await emulate({"refusal": "No."})
    answer = await harness.ask(tools=TOOLS, tool_choice=allow(entry, mode="required"))
    assert (answer.shown, answer.turns[0].request.tool_choice) == ([name], "required")


async def test_call_of_a_tool_that_is_not_allowed_is_dropped(emulate: Any) -> None:
    harness = await emulate(call("f", {"a": 1}), call("g", {}, "call_2"), call("shell", {"commands": []}, "call_3"))
    answer = await harness.ask(tools=TOOLS, tool_choice=allow(G))
    assert [item["call_id"] for item in answer.output] == ["call_2"]


async def test_only_forbidden_calls_are_retried_once(emulate: Any) -> None:
    harness = await emulate(call("f", {}), rules=[{"text": "may not be made", "answers": ["Then not."]}])
    answer = await harness.ask(tools=TOOLS, tool_choice="none")
    assert ([item["type"] for item in answer.output], len(answer.turns)) == (["message"], 2)


async def test_forbidden_calls_after_the_retry_fail_the_response(emulate: Any) -> None:
    harness = await emulate(call("f", {}))
    answer = await harness.ask(tools=TOOLS, tool_choice="none")
    assert (answer.response["status"], answer.output, len(answer.turns)) == ("failed", [], 2)
    assert answer.response["error"] == {
        "code": "tool_not_allowed",
        "message": "The model called only tools that 'tool_choice' does not allow.",
        "type": "model_error",
    }


@pytest.mark.parametrize(
    ("choice", "retained"),
    [
        (F, "call_1"),
        ({"type": "function", "name": "child"}, "call_2"),
        (C, "call_3"),
        (SHELL, "call_4"),
        ({"type": "computer_use"}, "call_5"),
    ],
)
async def test_calls_beside_the_required_tool_are_dropped(emulate: Any, choice: Any, retained: str) -> None:
    harness = await emulate(
        call("f", {}, "call_1"),
        call("n__child", {}, "call_2"),
        call("c", {"input": "x"}, "call_3"),
        call("shell", {"commands": ["ls"]}, "call_4"),
        call("computer", {"actions": [{"type": "wait"}]}, "call_5"),
        call("unheard_of", {}, "call_6"),
    )
    answer = await harness.ask(tools=TOOLS, tool_choice=choice)
    assert ([item["call_id"] for item in answer.output], len(answer.turns)) == ([retained], 1)


async def test_call_of_another_than_the_required_tool_is_retried_once(emulate: Any) -> None:
    harness = await emulate(call("f", {}), rules=[{"text": "Call g now", "answers": [[call("g", {}, "call_2")]]}])
    answer = await harness.ask(tools=[F, G], tool_choice=G)
    assert (answer.response["status"], [item["call_id"] for item in answer.output]) == ("completed", ["call_2"])
    assert ([item["type"] for item in answer.read], answer.shown) == (
        ["message", "function_call", "function_call_output", "message"],
        ["g"],
    )


async def test_second_call_of_another_than_the_required_tool_fails(emulate: Any) -> None:
    harness = await emulate(call("f", {}))
    answer = await harness.ask(tools=[F, G], tool_choice=G)
    assert (answer.response["status"], answer.response["error"]["code"], answer.output, len(answer.turns)) == (
        "failed",
        "tool_not_allowed",
        [],
        2,
    )


MUST_CALL = [("required", "one of the tools"), (G, "g"), (allow(G, F, mode="required"), "f or g")]


@pytest.mark.parametrize(("choice", "wanted"), MUST_CALL)
async def test_missing_required_call_is_requested_once_more(emulate: Any, choice: Any, wanted: str) -> None:
    rules = [{"user": f"Call {wanted} now", "answers": [[call("g", {})]]}]
    harness = await emulate({"text": "Let me see."}, rules=rules)
    answer = await harness.ask(tools=[F, G], tool_choice=choice)
    assert (answer.response["status"], [item["type"] for item in answer.output], len(answer.turns)) == (
        "completed",
        ["message", "function_call"],
        2,
    )


@pytest.mark.parametrize(("choice", "_"), MUST_CALL)
@pytest.mark.parametrize("beside", [[], [call("h", {})]])
async def test_missing_required_call_after_the_retry_fails_the_response(
    emulate: Any, choice: Any, _: str, beside: list[Any]
) -> None:
    harness = await emulate({"text": "No need."}, *(beside if choice != "required" else []))
    answer = await harness.ask(tools=[F, G, F | {"name": "h"}], tool_choice=choice)
    assert [(item["status"], item["content"][0]["text"]) for item in answer.output] == [("completed", "No need.")] * 2
    assert (answer.response["status"], len(answer.turns)) == ("failed", 2)
    assert answer.response["error"] == {
        "code": "tool_not_called",
        "message": "'tool_choice' requires a call, but the model made none.",
        "type": "model_error",
    }


async def test_empty_answers_instead_of_a_required_call_fail_the_response(emulate: Any) -> None:
    harness = await emulate({"reasoning": "Hm."})
    answer = await harness.ask(tools=[F], tool_choice="required")
    assert (answer.response["error"]["code"], [item["type"] for item in answer.output]) == (
        "tool_not_called",
        ["reasoning", "reasoning"],
    )


@pytest.mark.parametrize(
    ("steps", "status"),
    [([{"text": "So"}, {"finish": "length"}], "incomplete"), ([{"refusal": "I will not."}], "completed")],
)
async def test_cut_off_answer_or_refusal_needs_no_required_call(emulate: Any, steps: Any, status: str) -> None:
    harness = await emulate(*steps)
    answer = await harness.ask(tools=[F], tool_choice="required")
    assert (answer.response["status"], len(answer.turns)) == (status, 1)


async def test_text_instead_of_a_required_call_need_not_be_json(emulate: Any) -> None:
    rules = [{"user": "A call was asked for", "answers": [[call("f", {})]]}]
    harness = await emulate({"text": "I look it up."}, lacks=["json_schema"], rules=rules)
    answer = await harness.ask(tools=[F], tool_choice="required", text={"format": {"type": "json_object"}})
    assert [(item["type"], item.get("phase")) for item in answer.output] == [
        ("message", "commentary"),
        ("function_call", None),
    ]


async def test_valid_call_beside_an_invalid_one_satisfies_required(emulate: Any) -> None:
    """The invalid call beside it is not made again."""
    harness = await emulate(
        call("f", {}), call("shell", {}, "call_2"), rules=[{"text": "Call the tool again", "answers": ["Done."]}]
    )
    answer = await harness.ask(tools=TOOLS, tool_choice="required")
    assert (answer.response["status"], [item["type"] for item in answer.output]) == (
        "completed",
        ["function_call", "message"],
    )


async def test_required_call_without_a_callable_tool_is_refused(emulate: Any) -> None:
    harness = await emulate({"text": "Ok."})
    with pytest.raises(InvalidRequest) as caught:
        await harness.ask(tools=[{"type": "tool_search"}], tool_choice="required")
    assert (caught.value.param, caught.value.code, harness.backend.turns) == ("tool_choice", "invalid_value", [])


async def test_only_the_first_call_stays_without_parallel_tool_calls(emulate: Any) -> None:
    harness = await emulate(
        {"tool_call": {"key": 1, "name": "f", "arguments": "{", "call_id": "call_1"}},
        {"tool_call": {"key": 2, "name": "g", "arguments": "{}", "call_id": "call_2"}},
        {"tool_call": {"key": 1, "arguments": "}"}},
        call("shell", {"commands": ["ls"]}, "call_3"),
    )
    answer = await harness.ask(tools=TOOLS, parallel_tool_calls=False)
    assert [(item["call_id"], item["arguments"]) for item in answer.output] == [("call_1", "{}")]
    assert answer.turns[0].request.parallel_tool_calls is False


async def test_native_custom_tool_obeys_tool_choice(emulate: Any) -> None:
    steps = [{"custom_tool_call": {"name": name, "input": ["x", "y"]}} for name in ("c", "d")]
    harness = await emulate(*steps, native_tools=["function", "custom"])
    answer = await harness.ask(tools=[C, C | {"name": "d"}], parallel_tool_calls=False)
    assert [(item["name"], item["input"]) for item in answer.output] == [("c", "xy")]


async def test_calls_of_all_types_stay_in_order(emulate: Any) -> None:
    harness = await emulate(
        call("shell", {"commands": ["ls"]}, "call_1"),
        call("f", {}, "call_2"),
        call("c", {"input": "x"}, "call_3"),
        call("n__child", {}, "call_4"),
        call("computer", {"actions": [{"type": "wait"}]}, "call_5"),
        call("unheard_of", {}, "call_6"),
    )
    answer = await harness.ask(tools=TOOLS)
    assert [(item["type"], item["call_id"]) for item in answer.output] == [
        ("shell_call", "call_1"),
        ("function_call", "call_2"),
        ("custom_tool_call", "call_3"),
        ("function_call", "call_4"),
        ("computer_call", "call_5"),
        ("function_call", "call_6"),
    ]
