import json
from typing import Any

import pytest
from openai.types import responses as sdk

from antiphon.protocol.codec import decode_response, encode
from antiphon.protocol.content import LogProb, OutputText, ReasoningText, Refusal, SummaryText, UrlCitation
from antiphon.protocol.items import Compaction, FunctionCall, FunctionCallOutput, Message, Reasoning
from antiphon.protocol.request import JsonObjectFormat, JsonSchemaFormat, ReasoningConfig, TextConfig
from antiphon.protocol.response import IncompleteDetails, Response, ResponseError, Usage
from antiphon.protocol.tools import AllowedToolsChoice, FunctionChoice, FunctionTool
from antiphon.protocol.unions import Unknown
from support import openresponses

BARE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "completed_at": None,
    "status": "in_progress",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "truncation": "disabled",
    "usage": None,
    "metadata": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
}
MESSAGE = Message("assistant", [OutputText("hi")], id="msg_1", status="completed")


def response(**fields: Any) -> Response:
    return Response(id="resp_1", created_at=1, model="m", **fields)


def encoded(value: Any) -> Any:
    return json.loads(encode(value))


def test_minimal_response_has_required_open_responses_fields() -> None:
    assert encoded(response()) == BARE


def test_responses_share_no_default_objects() -> None:
    first, second = response(), response()
    first.output.append(MESSAGE)
    first.text.verbosity = "low"
    assert encoded(second) == BARE


VALID = {
    "bare": response(),
    "message": response(output=[MESSAGE]),
    "commentary": response(output=[Message("assistant", [], id="msg_1", status="completed", phase="commentary")]),
    "refusal": response(output=[Message("assistant", [Refusal("no")], id="msg_1", status="completed")]),
    "annotation": response(
        output=[Message("assistant", [OutputText("", [UrlCitation("u", "t", 0, 1)])], id="msg_1", status="completed")]
    ),
    "logprobs": response(
        output=[Message("assistant", [OutputText("a", [], [LogProb("a", -1.0)])], id="msg_1", status="incomplete")]
    ),
    "call": response(output=[FunctionCall("c", "f", "{}", "fc_1", "completed")]),
    "call output": response(output=[FunctionCallOutput("1", "c", "fco_1", "completed")]),
    "reasoning": response(output=[Reasoning(id="rs_1")]),
    "full reasoning": response(output=[Reasoning([SummaryText("s")], "rs_1", [ReasoningText("r")], "e")]),
    "compaction": response(output=[Compaction("e", "cmp_1")]),
    "tools": response(tools=[FunctionTool("f")], tool_choice=FunctionChoice("f")),
    "allowed tools": response(tool_choice=AllowedToolsChoice([{"type": "function", "name": "f"}])),
    "effort": response(reasoning=ReasoningConfig(effort="low")),
    "summary": response(reasoning=ReasoningConfig(summary="auto")),
    "usage": response(usage=Usage(1, 2, 3)),
    "failed": response(status="failed", error=ResponseError("server_error", "broke")),
    "incomplete": response(status="incomplete", incomplete_details=IncompleteDetails("max_output_tokens")),
    "json object": response(text=TextConfig(JsonObjectFormat())),
    "json schema": response(text=TextConfig(JsonSchemaFormat("n", strict=True), "low")),
    "metadata": response(metadata={"a": "b"}, user="u", conversation=None),
}


@pytest.mark.parametrize("name", VALID)
def test_response_is_valid_open_responses(name: str) -> None:
    openresponses.validate_response(encoded(VALID[name]))


# Open Responses requires null where the SDK's type has the schema. The SDK does not check it.
@pytest.mark.parametrize("name", [name for name in VALID if name != "json schema"])
def test_response_is_valid_for_sdk(name: str) -> None:
    sdk.Response.model_validate_json(encode(VALID[name]), strict=True)


def test_output_text_equals_sdk_output_text() -> None:
    parts = [OutputText("a"), Refusal("no"), OutputText("b")]
    value = response(output=[Reasoning(id="rs_1"), Message("assistant", parts, id="msg_1", status="completed")])
    assert sdk.Response.model_validate_json(encode(value)).output_text == value.output_text == "ab"


# Fields that the Open Responses schema allows to be omitted but not to be null.


def test_unset_phase_is_omitted() -> None:
    assert encoded(MESSAGE) == {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "hi", "annotations": []}],
    }


def test_unset_reasoning_content_is_omitted() -> None:
    assert encoded(Reasoning(id="rs_1")) == {"type": "reasoning", "id": "rs_1", "summary": []}


def test_unset_logprobs_are_omitted() -> None:
    assert "logprobs" not in encoded(OutputText("hi"))


def test_echoed_tool_has_description_parameters_and_strict() -> None:
    assert encoded(response(tools=[FunctionTool("f")]))["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
    ]


@pytest.mark.parametrize(
    ("config", "sent"),
    [
        (None, None),
        (ReasoningConfig(), {"effort": None, "summary": None}),
        (ReasoningConfig(effort="low"), {"effort": "low", "summary": None}),
        (ReasoningConfig(summary="auto"), {"effort": None, "summary": "auto"}),
    ],
)
def test_reasoning_is_null_or_has_both_effort_and_summary(config: Any, sent: Any) -> None:
    assert encoded(response(reasoning=config))["reasoning"] == sent


def test_usage_has_both_details() -> None:
    assert encoded(Usage(1, 2, 3)) == {
        "input_tokens": 1,
        "output_tokens": 2,
        "total_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }


def test_json_schema_format_without_schema_has_null() -> None:
    assert encoded(JsonSchemaFormat("n", strict=True)) == {
        "type": "json_schema",
        "name": "n",
        "description": None,
        "schema": None,
        "strict": True,
    }


def test_input_transformations_survive_a_round_trip() -> None:
    removed = {"id": "rs_1", "type": "reasoning", "action": "removed", "reason": "model_mismatch"}
    payload = {**BARE, "input_transformations": [removed]}
    assert encoded(decode_response(json.dumps(payload).encode())) == payload


def test_openai_only_fields_are_encoded_if_set() -> None:
    value = response(user="u", prompt_cache_retention="24h", tool_usage={"a": 1})
    assert encoded(value) == {**BARE, "user": "u", "prompt_cache_retention": "24h", "tool_usage": {"a": 1}}


@pytest.mark.parametrize("field", ["output", "tools", "temperature", "id", "text"])
def test_null_in_required_field_is_rejected(field: str) -> None:
    with pytest.raises(Exception, match=f"Invalid value for '{field}'"):
        decode_response(json.dumps({**BARE, field: None}).encode())


def test_output_text_is_joined_from_messages_only() -> None:
    output = [
        Reasoning(content=[ReasoningText("r")]),
        Message("assistant", "not a part"),
        MESSAGE,
        Unknown(b'{"type":"message:x","content":[{"type":"output_text","text":"no"}]}'),
        Message("assistant", [Unknown(b'{"type":"acme:x","text":"no"}'), OutputText("!")]),
    ]
    assert response(output=output).output_text == "hi!"
    assert response().output_text == ""
