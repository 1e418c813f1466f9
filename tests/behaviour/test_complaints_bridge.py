"""Complaints about servers that translate to Chat Completions: C42, D43 to D52, E53, E54, E58, G67 to G69, J80.

The upstream is a server on a loopback socket.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.chat_completions.backend import create
from antiphon.backends.responses.backend import create as create_responses
from behaviour.upstreams import KINDS, ask_through, bridge, recorded, streamed
from behaviour.wire import Json, of_type, say
from support.live_server import LiveServer, make_settings
from support.upstream_server import RESET, STALL, Reply, json_of, serve, stream_of

LOOK_UP = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
PICTURE = "data:image/png;base64,aGk="


def call(call_id: str) -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "look_up", "arguments": "{}"}


def output(call_id: str, content: Any) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": content}


def shape(response: Json) -> list[tuple[str, ...]]:
    """Return each item as its type and its text, or its type, name and arguments."""
    return [
        (item["type"], item["name"], item["arguments"])
        if item["type"] == "function_call"
        else (item["type"], "".join(part["text"] for part in item["content"]))
        for item in response["output"]
    ]


async def test_pain_c_42_reasoning_is_not_sent_to_a_model_without_it() -> None:
    """BerriAI/litellm#38842"""
    async with bridge(recorded("text")) as it:
        response = await it.ask("hi", reasoning={"effort": "high", "summary": "auto"})
        assert [name for name in it.sent[0] if name.startswith("reasoning")] == []
    assert response["status"] == "completed"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("text_and_call", [("message", "Let me look."), ("function_call", "look_up", '{"q":1}')]),
        ("text_and_call_in_one_chunk", [("message", "Wait."), ("function_call", "look_up", '{"q":1}')]),
        ("arguments_in_the_last_chunk", [("function_call", "look_up", '{"q":1}')]),
        ("arguments_as_an_object", [("function_call", "look_up", '{"q":1}')]),
        ("index_always_zero", [("function_call", "one", '{"x":1}'), ("function_call", "two", '{"y":2}')]),
    ],
)
async def test_pain_d_43_calls_and_arguments_are_not_lost(name: str, expected: list[Any]) -> None:
    """BerriAI/litellm#17246, #27144, #18238, #36262"""
    async with bridge(recorded(name), recorded(name)) as it:
        response = await it.ask("hi", tools=[LOOK_UP])
        events = await it.stream("hi", tools=[LOOK_UP])
    assert shape(response) == shape(events[-1]["response"]) == expected
    done = of_type(events, "response.function_call_arguments.done")
    assert [event["arguments"] for event in done] == [item[2] for item in expected if item[0] == "function_call"]


async def test_pain_d_44_chat_server_gets_only_chat_requests() -> None:
    """BerriAI/litellm#13130"""
    async with bridge(recorded("text")) as it:
        await it.ask("hi")
        assert [request.path for request in it.upstream.requests] == ["/v1/chat/completions"]


async def test_pain_d_45_rejected_key_is_an_authentication_error() -> None:
    """BerriAI/litellm#41385"""
    refused = json_of({"error": {"message": "Incorrect API key provided: sk-secret-123456"}}, 401)
    async with bridge(refused, api_key="sk-secret-123456") as it:
        answer = await it.post("/v1/responses", {"model": "m", "input": "hi"})
    assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_authentication")
    assert b"sk-secret" not in answer.body


@pytest.mark.parametrize("chat_is_up", [True, False])
async def test_pain_d_45_chat_fallback_serves_or_reports_its_error(chat_is_up: bool) -> None:
    """BerriAI/litellm#41385"""
    refused = json_of({"error": {"message": "No such key."}}, 401)
    async with serve([refused]) as first, serve([recorded("text") if chat_is_up else refused]) as second:
        backends = {
            "one": create_responses("one", {"base_url": first.url, "models": ["m"]}, Path("unused")),
            "two": create("two", {"base_url": second.url, "models": ["m"]}, Path("unused")),
        }
        settings = make_settings(models={"best": ["one/m", "two/m"]})
        running = await asyncio.to_thread(LiveServer, {}, settings, others=backends)
        try:
            answer = await asyncio.to_thread(running.ask, "POST", "/v1/responses", {"model": "best", "input": "hi"})
        finally:
            await asyncio.to_thread(running.stop)
        paths = [request.path for each in (first, second) for request in each.requests]
    assert paths == ["/v1/responses", "/v1/chat/completions"]
    if chat_is_up:
        assert (answer.status, answer.json["status"], answer.json["served_by"]) == (200, "completed", "two/m")
    else:
        assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_authentication")
        assert answer.json["error"]["message"].endswith("No such key.")


async def test_pain_d_46_system_messages_are_moved_to_the_start() -> None:
    """ai-dynamo/dynamo#10206, vllm-project/vllm#41114, ogx-ai/ogx#6069, BerriAI/litellm#39852,
    ggml-org/llama.cpp#20215"""
    history = [say("user", "one"), say("developer", "B"), say("assistant", "two"), say("system", "C"), say("user", "3")]
    async with bridge(recorded("text")) as it:
        await it.ask(history, instructions="A")
        assert it.sent[0]["messages"] == [
            {"role": "system", "content": "A\n\nB\n\nC"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "3"},
        ]


async def test_pain_d_47_image_in_a_tool_output_reaches_the_model() -> None:
    """ggml-org/llama.cpp#23542, #23380, #23890, #23465"""
    seen = [{"type": "input_text", "text": "done"}, {"type": "input_image", "image_url": PICTURE}]
    async with bridge(recorded("text")) as it:
        await it.ask([say("user", "go"), call("call_a"), output("call_a", seen)])
        assert it.sent[0]["messages"][2:] == [
            {"role": "tool", "tool_call_id": "call_a", "content": "done"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "[Output of the call call_a to look_up]"},
                    {"type": "image_url", "image_url": {"url": PICTURE}},
                ],
            },
        ]


async def test_pain_d_48_all_parallel_calls_arrive() -> None:
    """vllm-project/vllm#57791"""
    async with bridge(recorded("interleaved_calls")) as it:
        response = await it.ask("hi", tools=[LOOK_UP])
    assert shape(response) == [("function_call", "one", '{"x":1}'), ("function_call", "two", '{"y":2}')]


async def test_pain_d_49_schema_is_sent_and_reasoning_is_not_in_the_answer() -> None:
    """vllm-project/vllm#44012"""
    schema_format = {"type": "json_schema", "name": "sum", "schema": {"type": "object"}, "strict": True}
    answer = streamed({"reasoning": "Two and two."}, {"content": '{"sum":'}, {"content": " 4}"})
    async with bridge(answer) as it:
        response = await it.ask("2+2?", text={"format": schema_format})
        assert it.sent[0]["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "sum", "schema": {"type": "object"}, "strict": True},
        }
    assert shape(response) == [("reasoning", "Two and two."), ("message", '{"sum": 4}')]


@pytest.mark.parametrize("text", ["Sure! The number is 4.", '{"number": 4}', '```json\n{"number": 4}\n```'])
async def test_pain_d_49_output_that_violates_the_schema_fails(text: str) -> None:
    """vllm-project/vllm#44012"""
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    text_options = {"format": {"type": "json_schema", "name": "sum", "schema": schema, "strict": True}}
    answer = streamed({"reasoning": "Two and two."}, {"content": text[:4]}, {"content": text[4:]})
    async with bridge(answer, answer, answer) as it:
        events = await it.stream("2+2?", text=text_options)
        # Without a stream, the request is repeated and the first answer is not sent.
        whole = await it.post("/v1/responses", {"model": "m", "input": "2+2?", "text": text_options})
        assert len(it.sent) == 3
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_output")
    assert (whole.status, whole.json["error"]["code"]) == (500, "invalid_output")
    # The stream has the text as it came.
    assert [event["delta"] for event in of_type(events, "response.output_text.delta")] == [text[:4], text[4:]]


@pytest.mark.parametrize("stored", [True, False])
async def test_pain_d_49_output_that_violates_the_schema_is_retried_once(stored: bool) -> None:
    """vllm-project/vllm#44012"""
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    text_options = {"format": {"type": "json_schema", "name": "sum", "schema": schema, "strict": True}}
    wrong = streamed({"reasoning": "Two and two."}, {"content": "It is 4."})
    async with bridge(wrong, streamed({"content": '{"sum": 4}'})) as it:
        response = await it.ask("2+2?", text=text_options, store=stored)
        answer, correction = it.sent[1]["messages"][-2:]
        assert it.sent[1]["response_format"] == it.sent[0]["response_format"]
    assert shape(response) == [("message", '{"sum": 4}')]
    assert response["usage"]["total_tokens"] == 16
    assert (answer["role"], answer["content"], correction["role"]) == ("assistant", "It is 4.", "user")
    assert correction["content"].startswith("This answer is not what was asked for: not valid JSON")


async def test_pain_d_50_conversation_continues() -> None:
    """praxis-proxy/ai#665"""
    async with bridge(recorded("text"), recorded("text")) as it:
        made = (await it.post("/v1/conversations", {})).json["id"]
        await it.ask("one", conversation=made)
        await it.ask("two", conversation=made)
        assert it.sent[1]["messages"] == [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "Hello. Größe 🎈"},
            {"role": "user", "content": "two"},
        ]
        assert "conversation" not in it.sent[1]


async def test_pain_d_51_explicit_defaults_are_accepted() -> None:
    """stdapi-ai/stdapi.ai#160"""
    async with bridge(recorded("text")) as it:
        response = await it.ask("hi", truncation="disabled", store=True, background=False, service_tier="auto")
        assert it.sent[0].keys() == {"model", "messages", "stream"}
    assert (response["status"], response["truncation"]) == ("completed", "disabled")


async def test_pain_d_52_call_id_is_unchanged_in_both_directions() -> None:
    """agent0ai/agent-zero#1724"""
    odd = "chatcmpl-tool-0a1b2c:функция/1"
    made = {"tool_calls": [{"index": 0, "id": odd, "function": {"name": "look_up", "arguments": "{}"}}]}
    async with bridge(streamed(made, finish="tool_calls"), recorded("text")) as it:
        first = await it.ask("hi", tools=[LOOK_UP])
        assert first["output"][0]["call_id"] == odd
        await it.ask([output(odd, "ok")], previous_response_id=first["id"], tools=[LOOK_UP])
        sent_call, sent_output = it.sent[1]["messages"][1:]
    assert (sent_call["tool_calls"][0]["id"], sent_output["tool_call_id"]) == (odd, odd)


async def test_pain_e_53_reasoning_before_a_call_is_returned() -> None:
    """maximhq/bifrost#7320"""
    async with bridge(recorded("reasoning_then_call"), recorded("text"), model="deepseek-v4-pro") as it:
        first = await it.ask("hi", tools=[LOOK_UP])
        await it.ask([output("call_a", "ok")], previous_response_id=first["id"], tools=[LOOK_UP])
        assert it.sent[1]["messages"][1]["reasoning_content"] == "I must look."


@pytest.mark.parametrize("stored", [True, False])
async def test_pain_e_53_upstream_signature_is_returned_unchanged(stored: bool) -> None:
    """maximhq/bifrost#7320"""
    fields = {"tools": [LOOK_UP], "store": stored, "include": ["reasoning.encrypted_content"]}
    outputs = [output("fc_a", "ok"), output("fc_b", "ok")]
    async with bridge(recorded("gemini_signature"), recorded("text"), server="gemini") as it:
        first = await it.ask("hi", **fields)
        if stored:
            await it.ask(outputs, previous_response_id=first["id"], **fields)
        else:
            await it.ask([say("user", "hi"), *first["output"], *outputs], **fields)
        calls = it.sent[1]["messages"][1]["tool_calls"]
    assert [(each["id"], each.get("extra_content")) for each in calls] == [
        ("fc_a", {"google": {"thought_signature": "c2ln"}}),
        ("fc_b", None),
    ]
    assert "c2ln" not in json.dumps(first)


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ("deepseek-ai/DeepSeek-R1", None),
        ("deepseek-ai/DeepSeek-V3.2", "reasoning_content"),
        ("openai/gpt-oss-120b", "reasoning"),
        ("llama-3", None),
    ],
)
async def test_pain_e_54_return_of_reasoning_depends_on_the_model(model: str, field: str | None) -> None:
    """vercel/ai#14740"""
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    async with bridge(recorded("text"), model=model) as it:
        await it.ask([say("user", "go"), reasoning, call("call_a"), output("call_a", "ok")])
        message = it.sent[0]["messages"][1]
    assert {name: message[name] for name in message if name.startswith("reasoning")} == (
        {field: "Hm."} if field else {}
    )


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking_tags"])
async def test_pain_e_58_reasoning_in_any_field_is_streamed(name: str) -> None:
    """BerriAI/litellm#20246"""
    async with bridge(recorded(name)) as it:
        events = await it.stream("2+2?")
    deltas = of_type(events, "response.reasoning_text.delta")
    assert len(deltas) > 1
    assert "".join(event["delta"] for event in deltas) == "Two and two."
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]


WORD = b'data: {"choices":[{"delta":{"content":"So "}}]}\n\n'


async def test_pain_g_67_upstream_request_ends_when_the_client_disconnects() -> None:
    """ggml-org/llama.cpp#24496, vllm-project/vllm#54947, cubist38/mlx-openai-server#269"""
    async with bridge(stream_of(WORD, STALL)) as it:
        async with it.client() as client:
            events = await client.responses.create(model="m", input="hi", stream=True)
            async for event in events:
                if event.type == "response.output_text.delta":
                    break
            await events.close()
        await it.upstream.until_hang_ups()


async def test_pain_g_67_unstreamed_upstream_request_ends_when_the_client_disconnects() -> None:
    async with bridge(Reply(raw=STALL)) as it:
        async with it.client() as client:
            call = asyncio.create_task(client.responses.create(model="m", input="hi"))
            await it.upstream.until_requests(1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await it.upstream.until_hang_ups()
        assert it.sent[0]["stream"] is False


@pytest.mark.parametrize(
    "payload",
    [
        {"error": {"message": "Out of memory.", "code": 500}},
        {"object": "error", "message": "Out of memory.", "type": "InternalServerError", "code": 500},
        {"choices": [{"delta": {}, "finish_reason": "error"}]},
    ],
)
async def test_pain_g_68_error_in_the_upstream_stream_is_sent_and_stored(payload: Json) -> None:
    """vllm-project/semantic-router#3063, Wei-Shaw/sub2api#5289"""
    gate = asyncio.Event()
    async with bridge(stream_of(WORD, gate, f"data: {json.dumps(payload)}\n\n".encode())) as it:
        events = []
        async with it.client() as client:
            raw = await client.responses.with_raw_response.create(model="m", input="hi", stream=True)
            async for line in raw.http_response.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                    gate.set()
        failed = events[-1]["response"]
        stored = await it.get(f"/v1/responses/{failed['id']}")
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert (failed["error"]["code"], stored) == ("upstream_error", failed)


@pytest.mark.parametrize("reply", [stream_of(RESET), stream_of(), stream_of(b"data: [DONE]\n\n"), Reply(raw=RESET)])
async def test_pain_g_69_empty_upstream_response_fails(reply: Reply) -> None:
    """BerriAI/litellm#33222"""
    async with bridge(reply) as it:
        answer = await it.post("/v1/responses", {"model": "m", "input": "hi"})
    assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_error")


@pytest.mark.parametrize("ending", [(RESET,), ()], ids=["reset", "closed"])
async def test_pain_g_69_truncated_upstream_stream_fails(ending: Any) -> None:
    """BerriAI/litellm#33222"""
    async with bridge(stream_of(WORD, *ending)) as it:
        failed = (await it.stream("hi"))[-1]
    assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "upstream_error")


@pytest.mark.parametrize("kind", KINDS)
async def test_pain_j_80_repeated_history_is_the_same_prompt(kind: str) -> None:
    """BerriAI/litellm#35127. An upstream caches the beginning of a prompt, so no id in it may be new."""
    history = [
        say("user", "hi"),
        {"type": "acme_note", "text": "x"},
        {"type": "function_call_output", "name": "event", "output": "y"},
        call("call_a"),
        output("call_a", "z"),
        say("user", "go on"),
    ]
    search = {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}}
    if kind != "responses":  # this API needs the id
        history[4:4] = [search, search]
    sent = [await ask_through(kind, history, store=False) for _ in range(2)]
    assert [answer.status for answer, _ in sent] == [200, 200]
    assert sent[0][1] == sent[1][1]
