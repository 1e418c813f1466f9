"""Custom tools on a model that only supports functions."""

from typing import Any

import pytest

from support.tool_emulation import call

DRAW = {"type": "custom", "name": "draw", "description": "Draws."}
LINE = DRAW | {"format": {"type": "grammar", "syntax": "regex", "definition": "-+>"}}


def drawing(text: str) -> dict[str, Any]:
    return {"type": "custom_tool_call", "call_id": "call_1", "name": "draw", "input": text, "status": "completed"}


async def test_custom_call_text_streams(emulate: Any) -> None:
    harness = await emulate(call("draw", ['{"input', '": "a c', 'at\\n"}']))
    answer = await harness.ask(tools=[DRAW])
    assert answer.output == [drawing("a cat\n")]
    assert [event["delta"] for event in answer.get_events("custom_tool_call_input.delta")] == ["a c", "at", "\n"]
    assert answer.response["tools"] == [DRAW]


async def test_custom_tool_is_sent_as_a_function_with_one_string(emulate: Any) -> None:
    harness = await emulate(call("draw", {"input": "-->"}))
    answer = await harness.ask(tools=[LINE])
    (tool,) = answer.turns[0].request.tools or ()
    assert (tool.type, tool.name, tool.parameters) == (
        "function",
        "draw",
        {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        },
    )
    assert tool.description.startswith("Draws.\n")
    assert tool.description.endswith("regular expression:\n-+>")


async def test_custom_call_and_output_in_history_become_function_items(emulate: Any) -> None:
    harness = await emulate({"text": "Nice."})
    history = [
        {"role": "user", "content": "draw"},
        drawing("a cat"),
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"},
    ]
    answer = await harness.ask(history, tools=[DRAW])
    assert [{name: item[name] for name in item if name not in ("id", "status")} for item in answer.read[1:]] == [
        {"type": "function_call", "call_id": "call_1", "name": "draw", "arguments": '{"input":"a cat"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "done"},
    ]


async def test_text_that_matches_the_grammar_is_emitted_complete(emulate: Any) -> None:
    harness = await emulate(call("draw", ['{"input": "-', '->"}']))
    answer = await harness.ask(tools=[LINE])
    assert answer.output == [drawing("-->")]
    assert [event["delta"] for event in answer.get_events("custom_tool_call_input.delta")] == ["-->"]


@pytest.mark.parametrize("written", ['{"input": "```\\n-->\\n```"}', '{"input": "{\\"line\\": \\"-->\\"}"}', "-->"])
async def test_wrapping_around_matching_text_is_removed(emulate: Any, written: str) -> None:
    harness = await emulate(call("draw", written))
    assert (await harness.ask(tools=[LINE])).output == [drawing("-->")]


async def test_grammar_mismatch_is_retried_once_with_the_reason(emulate: Any) -> None:
    rules = [{"text": "arguments are wrong", "answers": [[call("draw", {"input": "->"})]]}]
    harness = await emulate({"text": "So: "}, call("draw", {"input": "--"}, "call_0"), rules=rules)
    answer = await harness.ask(tools=[LINE])
    assert [item["type"] for item in answer.output] == ["message", "custom_tool_call"]
    assert answer.output[1] == drawing("->")
    assert [item["type"] for item in answer.read] == ["message", "message", "function_call", "function_call_output"]
    assert "it ends too early, after '--'" in answer.read[-1]["output"]


async def test_usage_includes_the_tokens_of_the_retry(emulate: Any) -> None:
    first = {"usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}}
    second = {
        "usage": {
            "input_tokens": 10,
            "output_tokens": 4,
            "total_tokens": 14,
            "input_tokens_details": {"cached_tokens": 7},
            "output_tokens_details": {"reasoning_tokens": 1},
        }
    }
    rules = [{"text": "arguments are wrong", "answers": [[call("draw", {"input": "->"}), second]]}]
    harness = await emulate(call("draw", {"input": "--"}, "call_0"), first, rules=rules)
    answer = await harness.ask(tools=[LINE], max_output_tokens=20)
    assert [turn.request.max_output_tokens for turn in answer.turns] == [20, 18]
    assert answer.response["usage"] == {
        "input_tokens": 13,
        "output_tokens": 6,
        "total_tokens": 19,
        "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 1},
    }


async def test_grammar_mismatch_after_the_retry_fails_the_response(emulate: Any) -> None:
    harness = await emulate(call("draw", {"input": "--"}))
    answer = await harness.ask(tools=[LINE])
    assert (answer.response["status"], answer.response["error"], answer.output, len(answer.turns)) == (
        "failed",
        {
            "code": "invalid_tool_input",
            "message": "The model called a tool with invalid arguments: it ends too early, after '--'",
            "type": "model_error",
        },
        [],
        2,
    )


async def test_cut_off_custom_call_is_emitted_as_far_as_it_came(emulate: Any) -> None:
    harness = await emulate(call("draw", '{"input": "--'), {"finish": "length"})
    answer = await harness.ask(tools=[LINE])
    assert (answer.response["status"], answer.output) == ("incomplete", [drawing("--") | {"status": "incomplete"}])


async def test_native_custom_tools_are_passed_unchanged(emulate: Any) -> None:
    step = {"custom_tool_call": {"name": "n__draw", "input": "x", "call_id": "call_1"}}
    harness = await emulate(step, native_tools=["function", "custom"])
    answer = await harness.ask(tools=[{"type": "namespace", "name": "n", "description": "d", "tools": [LINE]}])
    (tool,) = answer.turns[0].request.tools or ()
    assert (tool.type, tool.name, tool.format.definition) == ("custom", "n__draw", "-+>")
    assert answer.output == [drawing("x") | {"namespace": "n"}]
