"""Input that repeats calls of the history without their ids."""

from typing import Any

import msgspec
import pytest

from antiphon.engine.prepare.repeated_calls import identify_repeated_calls
from antiphon.errors import InvalidRequest
from antiphon.protocol.items import CustomToolCall, FunctionCall, Item
from support.engine_harness import EngineHarness

TOOLS = [{"type": "function", "name": "look_up", "parameters": {}}]
GO = {"role": "user", "content": "go"}
BERN = {"tool_call": {"name": "look_up", "arguments": '{"city":"Bern","days":2}', "call_id": "call_0"}}
ROME = {"tool_call": {"name": "look_up", "arguments": '{"city":"Rome"}', "call_id": "call_1"}}


def call(arguments: str, call_id: str = "call_0") -> dict[str, Any]:
    return {"type": "function_call", "name": "look_up", "arguments": arguments, "call_id": call_id}


def output(text: str, call_id: str = "call_0") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


# The same arguments as in BERN, parsed and encoded again.
BERN_AGAIN = call('{"days": 2, "city": "Bern"}')


@pytest.fixture
async def harness(make_harness: Any) -> EngineHarness:
    rules = [{"user": "go", "answers": [[BERN], [ROME], "{history} items"]}]
    made: EngineHarness = await make_harness({"rules": rules})
    return made


async def list_new_types(harness: EngineHarness, response_id: str) -> list[str]:
    stored = await harness.store.load("default", response_id)
    assert stored is not None
    return [item.type for item in stored.input]


async def test_history_without_ids_is_not_duplicated(harness: EngineHarness) -> None:
    first = await harness.answer([GO], tools=TOOLS)
    again = [GO, BERN_AGAIN, output("mild")]
    second = await harness.answer(again, tools=TOOLS, previous_response_id=first.id)
    again += [call('{"city": "Rome"}', "call_1"), output("warm", "call_1")]
    third = await harness.answer(again, tools=TOOLS, previous_response_id=second.id)
    assert third.output_text == "5 items"
    assert await list_new_types(harness, second.id) == ["function_call_output"]
    assert await list_new_types(harness, third.id) == ["function_call_output"]


async def test_history_without_ids_is_not_duplicated_in_a_conversation(harness: EngineHarness) -> None:
    conversation = await harness.engine.conversations.create("default", [], None)
    await harness.answer([GO], tools=TOOLS, conversation=conversation.id)
    again = [GO, BERN_AGAIN, output("mild")]
    second = await harness.answer(again, tools=TOOLS, conversation=conversation.id)
    assert await list_new_types(harness, second.id) == ["function_call_output"]


async def test_other_message_before_a_repeated_call_is_new(harness: EngineHarness) -> None:
    first = await harness.answer([GO], tools=TOOLS)
    rule = {"role": "developer", "content": "Be brief."}
    second = await harness.answer([GO, rule, BERN_AGAIN, output("mild")], tools=TOOLS, previous_response_id=first.id)
    assert await list_new_types(harness, second.id) == ["message", "function_call_output"]


async def test_answered_call_with_another_output_is_a_new_call(make_harness: Any) -> None:
    rules = [{"last_item": "function_call_output", "answers": ["{history} items"]}]
    harness = await make_harness({"rules": rules, "default": [BERN]})
    first = await harness.answer([GO], tools=TOOLS)
    second = await harness.answer([output("mild")], tools=TOOLS, previous_response_id=first.id)
    repeated = [GO, BERN_AGAIN, output("mild"), second.output[0], GO, BERN_AGAIN, output("cold")]
    third = await harness.answer(repeated, tools=TOOLS, previous_response_id=second.id)
    assert third.output_text == "7 items"
    fourth = await harness.answer([BERN_AGAIN, output("wet")], tools=TOOLS, previous_response_id=third.id)
    assert fourth.output_text == "10 items"


@pytest.mark.parametrize(
    ("sent", "is_repeat"),
    [
        (CustomToolCall("call_0", "run", "a  b"), True),
        (CustomToolCall("call_0", "run", "a b"), False),
        (CustomToolCall("call_0", "walk", "a  b"), False),
        (CustomToolCall("call_1", "run", "a  b"), False),
        (FunctionCall("call_0", "run", "a  b"), False),
    ],
)
def test_custom_call_is_compared_with_its_exact_input(sent: Item, is_repeat: bool) -> None:
    earlier = CustomToolCall("call_0", "run", "a  b", id="ctc_1", status="completed")
    normalized = msgspec.structs.replace(sent, id="ctc_2")
    assert identify_repeated_calls([normalized], [sent], [earlier]) == [earlier if is_repeat else normalized]


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', "not JSON", "[" * 5000])
async def test_other_call_with_the_id_of_an_unanswered_call_is_refused(harness: EngineHarness, arguments: str) -> None:
    first = await harness.answer([GO], tools=TOOLS)
    with pytest.raises(InvalidRequest, match="More than one function call with call_id call_0"):
        await harness.answer([call(arguments), output("mild")], tools=TOOLS, previous_response_id=first.id)
