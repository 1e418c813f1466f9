"""S2: mapping a result to the envelope. Each test names the contract lines that it covers."""

import json
from typing import Any

import pytest

from antiphon.agent.execute.builder import ResponsesRequestBuilder
from antiphon.agent.execute.envelope import (
    AgentExecuteRequest,
    AgentExecuteResponse,
    AgentToolCall,
    ConversationContext,
    ExecutionContext,
    FileBundle,
    LlmUsage,
    SourceRef,
    decode,
    encode,
)
from antiphon.agent.execute.mapper import map_error, map_response
from antiphon.agent.execute.rag import Chunk, build_context
from antiphon.agent.transports.base import ResponseCollector
from antiphon.errors import InvalidRequest, RateLimited
from support.scripted_model import ScriptedModel
from support.scripted_model import call as make_call

REQUEST = AgentExecuteRequest(conversation_id="conv-1", mode="QA", instruction="Why?")
CONTEXT = ExecutionContext(conversation_context_id="cc-1", agent_context_id="ac-1")
USAGE = {
    "input_tokens": 210,
    "output_tokens": 310,
    "total_tokens": 520,
    "input_tokens_details": {"cached_tokens": 5},
    "output_tokens_details": {"reasoning_tokens": 7},
}


def message(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "content": [{"type": "output_text", "text": text} for text in texts]} | fields


def call(name: str = "look_up", arguments: Any = '{"a":  1}', **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": name, "arguments": arguments} | fields


def respond(*output: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "resp_1", "model": "gpt-5.1", "status": "completed", "output": list(output), "usage": USAGE} | fields


def test_s2_2_s2_3_s2_4_s2_15_response_with_text_and_call() -> None:
    raw = json.dumps(respond({"type": "reasoning", "summary": []}, message("One.", "Two."), call(), acme="kept"))
    assert map_response(raw, REQUEST, CONTEXT) == AgentExecuteResponse(
        kind="ok",
        conversation_id="conv-1",
        turn_id="resp_1",
        agent_context_id="ac-1",
        conversation_context_id="cc-1",
        response_continuation_id="resp_1",
        mode="QA",
        model_id="gpt-5.1",
        text="One.\n\nTwo.",
        finish_reason="tool_use",
        usage=LlmUsage(prompt_tokens=210, completion_tokens=310, total_tokens=520, cached_tokens=5, reasoning_tokens=7),
        raw_response_json=raw,
        tool_calls=[AgentToolCall(call_id="call_1", name="look_up", arguments_json='{"a":  1}')],
    )


def test_s2_1_json_has_the_seeds_names_and_no_null_lists() -> None:
    written = json.loads(encode(map_response(respond(), REQUEST)))
    assert list(written) == [
        "Kind", "ConversationId", "TurnId", "AgentContextId", "ConversationContextId", "ResponseContinuationId", "Mode",
        "ModelId", "Text", "FinishReason", "Usage", "Sources", "FileBundle", "Warnings", "ErrorCode", "ErrorMessage",
        "RawResponseJson", "ToolCalls",
    ]  # fmt: skip
    assert [written[name] for name in ("Sources", "Warnings", "ToolCalls")] == [[], [], []]
    assert list(written["Usage"])[:3] == ["PromptTokens", "CompletionTokens", "TotalTokens"]


@pytest.mark.parametrize(
    ("kind", "usage", "count", "calls", "call_id", "name", "arguments"),
    [
        ("Kind", "Usage", "PromptTokens", "ToolCalls", "CallId", "Name", "ArgumentsJson"),
        ("kind", "usage", "promptTokens", "toolCalls", "callId", "name", "argumentsJson"),
        ("kind", "usage", "prompt_tokens", "tool_calls", "call_id", "NAME", "arguments_json"),
    ],
)
def test_s2_1_any_spelling_of_the_names_is_read(
    kind: str, usage: str, count: str, calls: str, call_id: str, name: str, arguments: str
) -> None:
    made = {call_id: "c", name: "n", arguments: "{}"}
    body = json.dumps({kind: "ok", usage: {count: 3}, calls: [made], "sources": None, "Warnings": None})
    assert decode(body, AgentExecuteResponse) == AgentExecuteResponse(
        kind="ok",
        usage=LlmUsage(prompt_tokens=3),
        tool_calls=[AgentToolCall(call_id="c", name="n", arguments_json="{}")],
    )


def test_invalid_envelope_is_rejected_with_the_field_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode('{"kind": 7}', AgentExecuteResponse)
    assert caught.value.param == "Kind"
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        decode("{", AgentExecuteResponse)


def test_s2_3_turn_counter_overrides_the_response_id() -> None:
    envelope = map_response(respond(), REQUEST, ExecutionContext(turn_id="7"))
    assert (envelope.turn_id, envelope.response_continuation_id) == ("7", "resp_1")


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}, (1, 2, 3)),
        ({"input_tokens": 1, "output_tokens": 2}, (1, 2, 3)),
        ({"prompt_tokens": 1}, (1, 0, 1)),
        ({}, (0, 0, 0)),
        (None, (0, 0, 0)),
    ],
)
def test_s2_5_c3_usage_is_read_in_both_spellings_and_absent_is_zero(usage: Any, expected: tuple[int, ...]) -> None:
    counted = map_response(respond(usage=usage), REQUEST).usage
    assert (counted.prompt_tokens, counted.completion_tokens, counted.total_tokens) == expected


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (respond(message("x", finish_reason="stop"), call(finish_reason="tool_use")), "tool_use"),
        (respond(message("x", finish_reason="length"), call()), "length"),
        (respond({"type": "output_text", "text": "x", "finish_reason": "stop"}), "stop"),
        (respond(message("x"), status="incomplete", incomplete_details={"reason": "max_output_tokens"}), "length"),
        (respond(message("x"), status="incomplete", incomplete_details={"reason": "content_filter"}), "content_filter"),
        (respond(message("x"), call()), "tool_use"),
        (respond(message("x")), "stop"),
        (respond(), "stop"),
    ],
)
def test_s2_6_c9_finish_reason_is_the_last_given_or_derived(response: Any, reason: str) -> None:
    assert map_response(response, REQUEST).finish_reason == reason


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([message("a"), call(), message("b")], "a\n\nb"),
        ([{"type": "output_text", "text": "a"}, {"type": "message", "content": "b"}], "a\n\nb"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}]}], "a"),
        ([message("", "a")], "a"),
        ([call()], None),
        ([{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hidden"}]}], None),
    ],
)
def test_s2_7_text_is_all_text_in_order_with_a_blank_line_between(output: Any, text: str | None) -> None:
    assert map_response(respond(*output), REQUEST).text == text


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (call(arguments='{ "b":1,\n "a": 2 }'), ("call_1", "look_up", '{ "b":1,\n "a": 2 }')),
        (call(arguments={"a": 1}), ("call_1", "look_up", '{"a":1}')),
        ({"type": "tool_call", "tool_call": {"id": "call_9", "name": "n", "arguments": "{}"}}, ("call_9", "n", "{}")),
        ({"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** x"}, ("c", "patch", "*** x")),
        (
            {"type": "message", "content": [{"type": "tool_call", "id": "c", "name": "n", "arguments": "{}"}]},
            ("c", "n", "{}"),
        ),
    ],
)
def test_s2_8_c10_c14_a_calls_arguments_are_as_the_model_made_them(piece: Any, expected: tuple[str, ...]) -> None:
    (made,) = map_response(respond(piece), REQUEST).tool_calls
    assert (made.call_id, made.name, made.arguments_json) == expected


def test_output_object_is_mapped_as_one_item() -> None:
    assert map_response(respond() | {"output": message("x")}, REQUEST).text == "x"


def test_s2_9_raw_response_is_complete() -> None:
    raw = b'{ "id": "resp_1", "output": [], "acme": {"new": [1.0]} }'
    assert map_response(raw, REQUEST).raw_response_json == raw.decode()


def test_s2_10_sources_bundle_and_warnings_come_from_elsewhere() -> None:
    sources, bundle = [SourceRef(tag="A#1")], FileBundle()
    response = respond(message("x"), Sources=["forged"], warnings=["forged"])
    envelope = map_response(response, REQUEST, sources=sources, file_bundle=bundle, warnings=["cut"])
    assert (envelope.sources, envelope.file_bundle, envelope.warnings) == (sources, bundle, ["cut"])
    assert map_response(response, REQUEST).sources == map_response(response, REQUEST).warnings == []


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (
            {"status": 429, "body": '{"error": {"message": "Slow down.", "type": "rate", "code": null}}'},
            "rate",
            "Slow down.",
        ),
        ({"status": 502, "body": b"<html>Bad gateway</html>"}, "502", "<html>Bad gateway</html>"),
        ({"status": 500}, "500", "The request failed with status 500."),
        ({"error": ConnectionResetError("peer reset")}, "ConnectionResetError", "peer reset"),
        ({"error": TimeoutError()}, "TimeoutError", "TimeoutError"),
        ({"error": RateLimited("Slow down.")}, "rate_limit_error", "Slow down."),
    ],
)
def test_s2_11_a_failed_call_is_an_error_with_its_code_and_message(failure: Any, code: str, text: str) -> None:
    envelope = map_error(failure.pop("error", None), REQUEST, CONTEXT, **failure)
    body = failure.get("body")
    raw = body.decode() if isinstance(body, bytes) else body
    assert envelope == AgentExecuteResponse(
        kind="error",
        conversation_id="conv-1",
        mode="QA",
        agent_context_id="ac-1",
        conversation_context_id="cc-1",
        finish_reason="error",
        error_code=code,
        error_message=text,
        raw_response_json=raw,
    )


def test_s2_11_failed_response_is_an_error_with_its_id() -> None:
    response = respond(status="failed", error={"code": "server_error", "message": "It broke."})
    envelope = map_response(response, REQUEST)
    assert (envelope.kind, envelope.error_code, envelope.error_message) == ("error", "server_error", "It broke.")
    assert (envelope.response_continuation_id, envelope.finish_reason) == ("resp_1", "error")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("no json", "The response is not a JSON object."),
        ("[]", "The response is not a JSON object."),
        ('{"output": []}', "The response has no 'id'."),
        ('{"id": "resp_1"}', "The response has no 'output'."),
    ],
)
def test_s2_11_other_data_becomes_an_error(raw: str, text: str) -> None:
    envelope = map_response(raw, REQUEST)
    assert (envelope.kind, envelope.error_code, envelope.error_message) == ("error", "invalid_response", text)
    assert envelope.raw_response_json == raw


def test_s2_12_error_in_the_text_is_an_answer() -> None:
    assert map_response(respond(message("Error: the file is missing.")), REQUEST).kind == "ok"


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ([message("x")], "ok"),
        ([message("x"), call()], "ok"),
        ([call()], "tool-only"),
        ([], "empty"),
        ([message("")], "empty"),
    ],
)
def test_s2_13_kind_follows_from_text_and_calls(output: Any, kind: str) -> None:
    assert map_response(respond(*output), REQUEST).kind == kind


# End-to-end flows that the seed requires, on a live server


async def execute(scripted: ScriptedModel, block: str | None = None) -> AgentExecuteResponse:
    context = ConversationContext(model_name="scripted", temperature=0.0, system="You are Aptix.")
    collector = ResponseCollector()
    async for batch in await scripted.transport.stream(ResponsesRequestBuilder.build(context, REQUEST, block)):
        collector.feed(batch)
    return map_response(collector.finish(), REQUEST, CONTEXT)


LOOK = make_call("look_up", {"path": "a.py"})


@pytest.mark.parametrize(
    ("answer", "kind", "text", "reason", "calls"),
    [
        ([LOOK], "tool-only", None, "tool_use", ["call_1"]),
        ([{"text": "Looking."}, LOOK], "ok", "Looking.", "tool_use", ["call_1"]),
        ("A long answer.", "ok", "A long answer.", "stop", []),
        ([{"text": "A long ans"}, {"finish": "length"}], "ok", "A long ans", "length", []),
    ],
    ids=["tool calls only", "mixed", "whole", "truncated"],
)
async def test_s2_15_live_flows_are_mapped(
    scripted: ScriptedModel, answer: Any, kind: str, text: str | None, reason: str, calls: list[str]
) -> None:
    scripted.set_answers(answer)
    envelope = await execute(scripted)
    assert (envelope.kind, envelope.text, envelope.finish_reason) == (kind, text, reason)
    assert [(each.call_id, each.name, each.arguments_json) for each in envelope.tool_calls] == [
        (call_id, "look_up", '{"path":"a.py"}') for call_id in calls
    ]
    assert envelope.response_continuation_id == json.loads(envelope.raw_response_json or "")["id"]


@pytest.mark.parametrize("chunks", [0, 8])
async def test_s2_15_with_and_without_rag_context(scripted: ScriptedModel, chunks: int) -> None:
    scripted.set_answers("Because.")
    hits = [Chunk(id=f"{n}", path=f"{n}.py", start_line=1, end_line=9, text="x = 1\n" * 9) for n in range(chunks)]
    block = build_context(hits).block if hits else None
    envelope = await execute(scripted, block)
    assert (envelope.kind, envelope.text) == ("ok", "Because.")
    texts = [part["text"] for part in scripted.sent[0]["input"][-1]["content"]]
    assert texts[1:] == ([block] if block else [])


def test_s2_6_finish_reason_on_the_message_of_the_last_part() -> None:
    response = respond(
        {"type": "tool_call", "tool_call": {"id": "t", "name": "n", "arguments": "{}"}, "finish_reason": "tool_use"},
        message("Well.", finish_reason="stop"),
    )
    assert map_response(response, REQUEST).finish_reason == "stop"


def test_s2_7_a_refusal_is_text_too() -> None:
    made = map_response(respond({"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}), REQUEST)
    assert (made.kind, made.text) == ("ok", "No.")


@pytest.mark.parametrize("content", [7, {"type": "output_text"}, [{"type": "text", "text": {"value": "x"}}], ["x"]])
def test_content_of_unknown_form_has_no_text(content: Any) -> None:
    assert map_response(respond({"type": "message", "content": content}), REQUEST).kind == "empty"


def test_s2_11_values_of_other_types_do_not_raise() -> None:
    parts = [
        {"type": ["text"], "text": "a"},
        {"type": "output_text", "text": ["b"]},
        {"type": "output_text", "text": "c"},
    ]
    envelope = map_response({"id": "resp_1", "model": 5, "output": parts}, AgentExecuteRequest())
    assert (envelope.kind, envelope.text, envelope.model_id) == ("ok", "c", None)
    envelope = map_response({"id": [], "output": []}, AgentExecuteRequest())
    assert (envelope.kind, envelope.error_message) == ("error", "The response has no 'id'.")


def test_s2_11_too_deep_nesting_is_an_error() -> None:
    assert map_response("[" * 100_000, REQUEST).kind == "error"
    assert map_error(None, REQUEST, status=502, body="[" * 100_000).error_code == "502"
