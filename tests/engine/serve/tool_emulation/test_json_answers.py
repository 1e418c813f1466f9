"""Answers in JSON from a model that cannot be held to it."""

from typing import Any

import pytest

from support.tool_emulation import call

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"format": {"type": "json_schema", "name": "number", "schema": SCHEMA, "strict": True}, "verbosity": "low"}
OBJECT = {"format": {"type": "json_object"}}
LACKS = ["json_schema"]


def texts(answer: Any) -> list[str]:
    return [part["text"] for item in answer.output if item["type"] == "message" for part in item["content"]]


async def test_the_model_is_told_the_schema(emulate: Any) -> None:
    bench = await emulate({"text": '{"n": 1}'}, lacks=LACKS)
    answer = await bench.ask(text=FORMAT, instructions="Be brief.")
    request = answer.turns[0].request
    assert (request.text.format, request.text.verbosity) == (None, "low")
    assert request.instructions.startswith("Be brief.\n\n")
    assert '"required": ["n"]' in request.instructions
    assert (texts(answer), answer.response["instructions"]) == (['{"n": 1}'], "Be brief.")
    assert answer.response["text"]["format"]["type"] == "json_schema"


async def test_a_model_that_can_be_held_to_a_schema_is(emulate: Any) -> None:
    bench = await emulate({"text": "whatever"})
    answer = await bench.ask(text=FORMAT)
    assert (answer.turns[0].request.text.format.name, texts(answer)) == ("number", ["whatever"])


@pytest.mark.parametrize("form", [FORMAT, OBJECT])
async def test_a_code_fence_comes_off(emulate: Any, form: Any) -> None:
    bench = await emulate({"text": '```json\n{"n": 1}\n```'}, lacks=LACKS)
    assert texts(await bench.ask(text=form)) == ['{"n": 1}']


async def test_a_wrong_answer_is_not_shown_and_gets_one_more_chance(emulate: Any) -> None:
    rules = [{"user": "'n' is a required property", "answers": ['{"n": 2}']}]
    bench = await emulate({"reasoning": "Hm."}, {"text": '{"m": 2}'}, lacks=LACKS, rules=rules)
    answer = await bench.ask(text=FORMAT)
    assert (texts(answer), [item["type"] for item in answer.output]) == (['{"n": 2}'], ["reasoning", "message"])
    assert [item["type"] for item in answer.read] == ["message", "reasoning", "message", "message"]


async def test_an_answer_that_stays_wrong_fails_clearly(emulate: Any) -> None:
    bench = await emulate({"text": "One."}, lacks=LACKS)
    answer = await bench.ask(text=FORMAT)
    (error,) = answer.get_events("error")
    assert (answer.response["status"], answer.output, len(answer.turns), error["error"]["type"]) == (
        "failed",
        [],
        2,
        "model_error",
    )
    assert answer.response["error"] == {
        "code": "invalid_output",
        "message": "The model's answer does not match 'text.format': "
        "not valid JSON: Expecting value: line 1 column 1 (char 0)",
        "type": "model_error",
    }


async def test_a_call_needs_no_json_and_words_before_it_are_commentary(emulate: Any) -> None:
    bench = await emulate({"text": "I look it up."}, call("f", {}), lacks=LACKS)
    answer = await bench.ask(text=FORMAT, tools=[{"type": "function", "name": "f"}])
    assert [(item["type"], item.get("phase")) for item in answer.output] == [
        ("message", "commentary"),
        ("function_call", None),
    ]


async def test_a_refusal_needs_no_json(emulate: Any) -> None:
    bench = await emulate({"refusal": "No."}, lacks=LACKS)
    answer = await bench.ask(text=FORMAT)
    assert (answer.response["status"], answer.output[0]["content"]) == (
        "completed",
        [{"type": "refusal", "refusal": "No."}],
    )


async def test_an_answer_that_was_cut_off_is_shown_as_it_is(emulate: Any) -> None:
    bench = await emulate({"text": '{"n": '}, {"finish": "length"}, lacks=LACKS)
    answer = await bench.ask(text=FORMAT)
    assert (answer.response["status"], texts(answer)) == ("incomplete", ['{"n": '])


async def test_a_model_that_takes_any_tool_is_helped_with_json_alone(emulate: Any) -> None:
    bench = await emulate({"text": '{"n": 1}'}, lacks=LACKS, native_tools=None)
    answer = await bench.ask(
        text=FORMAT, tools=[{"type": "mcp", "server_label": "l", "server_url": "https://a.example"}]
    )
    assert (texts(answer), answer.turns[0].request.tools[0].type) == (['{"n": 1}'], "mcp")
