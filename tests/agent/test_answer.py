"""A turn of the model, as the loop reads it: whatever servers make of the form."""

from typing import Any

import pytest

from antiphon.agent.model import ModelAnswer, ModelDelta, make_answer, read_delta
from antiphon.protocol import codec
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage

NONE = Usage(0, 0, 0)
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}
SHELL = {"type": "shell_call", "id": "sh_1", "call_id": "call_s", "status": "completed", "action": {"commands": ["ls"]}}
PRINTED = {"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
SHOWN = {"type": "shell_call_output", "id": "sho_1", "call_id": "call_s", "status": "completed", "output": [PRINTED]}


WHOLE_DELTA = (
    b'{"type":"response.output_text.delta","delta":"a","item_id":"i","output_index":0,"content_index":0,'
    b'"sequence_number":1,"logprobs":[]}'
)


def call(call_id: str | None = "call_1", **fields: Any) -> dict[str, Any]:
    named = {"call_id": call_id} if call_id is not None else {}
    return {"type": "function_call", "name": "look_up", "arguments": "{}"} | named | fields


def cut(*output: Any) -> dict[str, Any]:
    return {"id": "r", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": output}


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ({"id": "r", "output": [{"id": "m", "status": "completed"} | SAID]}, ModelAnswer("r", [SAID], NONE)),
        ({"output": [SAID]}, ModelAnswer("", [SAID], NONE)),
        (cut(SAID), ModelAnswer("r", [SAID], NONE, "max_output_tokens")),
        ({"id": "r", "status": "incomplete", "output": [SAID]}, ModelAnswer("r", [SAID], NONE, "incomplete")),
        # What follows is not what the server has stored: it cannot be continued from there.
        (cut(SAID, call(arguments='{"ci')), ModelAnswer("r", [SAID], NONE, "max_output_tokens", False)),
        (cut(SAID, THOUGHT, call(status="incomplete")), ModelAnswer("r", [SAID], NONE, "max_output_tokens", False)),
        (cut(call(), THOUGHT), ModelAnswer("r", [call()], NONE, "max_output_tokens", False)),
        ({"id": "r", "output": [call(), call()]}, ModelAnswer("r", [call(), call("call_1_2")], NONE, "", False)),
        ({"id": "r", "output": [call(None)]}, ModelAnswer("r", [call("call_1")], NONE, "", False)),
        ({"id": "r", "output": ["nonsense", SAID]}, ModelAnswer("r", [SAID], NONE)),
        # What the server has made itself is not understood without the id under which it did.
        ({"id": "r", "output": [SEARCH, SAID]}, ModelAnswer("r", [SEARCH, SAID], NONE)),
        ({"id": "r", "output": [SHELL, SHOWN, SAID]}, ModelAnswer("r", [SHELL, SHOWN, SAID], NONE)),
        # Nobody here makes such a call: what the server has stored would wait for its output for ever.
        ({"id": "r", "output": [SHELL, call()]}, ModelAnswer("r", [SHELL, call()], NONE, "", False)),
        (cut(SAID, SHELL | {"status": "in_progress"}), ModelAnswer("r", [SAID], NONE, "max_output_tokens", False)),
    ],
)
def test_the_answer_can_be_sent_back(response: dict[str, Any], answer: ModelAnswer) -> None:
    assert make_answer(response) == answer


def test_arguments_that_are_no_json_are_the_models_mistake_unless_it_was_cut_off() -> None:
    assert make_answer({"id": "r", "output": [call(arguments="{")]}).output == [call(arguments="{")]


@pytest.mark.parametrize(
    ("told", "read"),
    [
        (None, NONE),
        ("many", NONE),
        ({"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}, Usage(3, 2, 5)),
        ({"prompt_tokens": 3, "completion_tokens": 2}, Usage(3, 2, 5)),
        ({"input_tokens": 3, "output_tokens": 2, "estimated": True}, Usage(3, 2, 5, estimated=True)),
        ({"input_tokens": 3, "output_tokens": None, "input_tokens_details": None}, Usage(3, 0, 3)),
        (
            {
                "input_tokens": 3,
                "output_tokens": 2,
                "total_tokens": 9,
                "input_tokens_details": {"cached_tokens": 1},
                "output_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(3, 2, 9, InputTokensDetails(1), OutputTokensDetails(2)),
        ),
    ],
)
def test_usage_is_read_whatever_is_missing(told: Any, read: Usage) -> None:
    assert make_answer({"output": [], "usage": told}).usage == read


@pytest.mark.parametrize(
    ("event", "spoken"),
    [
        (b'{"type":"response.output_text.delta","delta":"a"}', ModelDelta("text", "a")),
        (WHOLE_DELTA, ModelDelta("text", "a")),
        (b'{"type":"response.reasoning_summary_text.delta","delta":"a"}', ModelDelta("reasoning", "a")),
        (b'{"type":"response.function_call_arguments.delta","delta":"a"}', None),
        (b'{"type":"keepalive"}', None),
    ],
)
def test_what_is_said_is_heard_in_any_form(event: bytes, spoken: ModelDelta | None) -> None:
    assert read_delta(codec.decode_event(event)) == spoken
