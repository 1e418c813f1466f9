"""The backend with a server on a loopback socket, alone and in an engine."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.backends.anthropic_messages.backend import AnthropicMessagesBackend, AnthropicMessagesOptions, create
from antiphon.backends.base import Model, Turn
from antiphon.engine.engine import Engine
from antiphon.errors import ConfigError, InvalidRequest, ModelNotFound, RateLimited, Unavailable
from antiphon.protocol import codec
from antiphon.protocol.response import Response, Usage
from antiphon.store.memory.store import MemoryStore
from antiphon.stream import deltas
from antiphon.upstream.options import UpstreamOptions
from antiphon.upstream.token_estimate import estimate_tokens
from support import engine_harness
from support.anthropic_types import check_request
from support.upstream_server import STALL, Reply, json_of, serve, stream_of

WIRE = Path(__file__).parents[2] / "wire" / "anthropic"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}


def recorded(name: str) -> Reply:
    return stream_of((WIRE / f"{name}.sse").read_bytes())


def refusal(message: str, status: int = 400, kind: str = "invalid_request_error") -> Reply:
    return json_of({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}, status)


def make_turn(*items: Any, **parameters: Any) -> Turn:
    body = {"model": "claude-sonnet-4-5", **parameters}
    history = items or ({"role": "user", "content": "Hi"},)
    request = codec.decode_request(json.dumps(body).encode()).body
    return Turn(request=request, items=codec.decode_items(json.dumps(history).encode()))


@asynccontextmanager
async def running(url: str, **options: Any) -> AsyncIterator[AnthropicMessagesBackend]:
    quick = {"models": ["claude-sonnet-4-5"], "request_retries": 0, "stream_retries": 0}
    backend = create("claude", {"base_url": url} | quick | options, Path("unused"))
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def collect_deltas(backend: AnthropicMessagesBackend, turn: Turn) -> list[deltas.Delta]:
    return [delta async for batch in await backend.stream(turn) for delta in batch]


async def test_unstreamed_turn_asks_for_the_whole_answer() -> None:
    content = [{"type": "thinking", "thinking": "Hm.", "signature": "sig"}, {"type": "text", "text": "Hello."}]
    usage = {"input_tokens": 5, "output_tokens": 3}
    whole = {"type": "message", "content": content, "stop_reason": "end_turn", "usage": usage}
    async with serve([json_of(whole)]) as upstream, running(upstream.url) as backend:
        turn = msgspec.structs.replace(make_turn(), streamed=False)
        (emitted,) = [batch async for batch in await backend.stream(turn)]
        body = check_request(upstream.requests[0].body)
    assert body["stream"] is False
    seal = '[{"type":"thinking","thinking":"Hm.","signature":"sig"}]'
    assert list(emitted) == [
        deltas.Reasoning("Hm."),
        deltas.ReasoningSeal(seal),
        deltas.Text("Hello."),
        deltas.TokenUsage(Usage(5, 3, 8)),
        deltas.Finish(),
    ]


async def test_turn_is_sent_and_answer_is_translated() -> None:
    async with serve([recorded("text")]) as upstream, running(upstream.url, api_key="sk-ant-1") as backend:
        emitted = await collect_deltas(backend, make_turn())
        (request,) = upstream.requests
    assert (request.method, request.path) == ("POST", "/v1/messages")
    assert {name: request.headers.get(name) for name in ("x-api-key", "anthropic-version", "authorization")} == {
        "x-api-key": "sk-ant-1",
        "anthropic-version": "2023-06-01",
        "authorization": None,
    }
    assert check_request(request.body)["messages"] == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert "".join(delta.text for delta in emitted if isinstance(delta, deltas.Text)) == "Hello, wörld! 👋"
    assert emitted[-1] == deltas.Finish("stop")


async def test_bearer_auth_sends_key_in_authorization_header() -> None:
    async with serve([recorded("text")]) as upstream, running(upstream.url, api_key="key", auth="bearer") as backend:
        await collect_deltas(backend, make_turn())
        headers = upstream.requests[0].headers
    assert (headers["authorization"], "x-api-key" in headers) == ("Bearer key", False)


async def test_newest_api_version_gets_no_temperature() -> None:
    replies = [recorded("text"), recorded("text")]
    turn = make_turn(temperature=0.5)
    async with serve(replies) as upstream:
        for version in ("2023-06-01", "2026-10-21"):
            async with running(upstream.url, version=version) as backend:
                await collect_deltas(backend, turn)
        assert ["temperature" in request.json for request in upstream.requests] == [True, False]


async def test_like_option_sets_traits_of_unknown_model() -> None:
    turn = make_turn(model="house-model", reasoning={"effort": "high"})
    async with serve([recorded("text")]) as upstream:
        async with running(upstream.url, like="claude-opus-5", max_tokens=500) as backend:
            await collect_deltas(backend, turn)
        body = check_request(upstream.requests[0].body)
    assert (body["model"], body["max_tokens"], body["output_config"]) == ("house-model", 500, {"effort": "high"})


async def test_unstreamed_answer_is_read() -> None:
    whole = {"type": "message", "content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn"}
    async with serve([json_of(whole)]) as upstream, running(upstream.url) as backend:
        assert await collect_deltas(backend, make_turn()) == [
            deltas.Text("Hi"),
            deltas.TokenUsage(Usage(10, 5, 15, estimated=True)),
            deltas.Finish("stop"),
        ]


@pytest.mark.parametrize("streamed", [True, False])
async def test_other_served_model_is_announced_first(streamed: bool) -> None:
    named = {"type": "message", "model": "claude-sonnet-4-5-20250929", "usage": {"input_tokens": 5, "output_tokens": 3}}
    text = {"type": "text", "text": "Hi."}
    events = [
        {"type": "message_start", "message": named},
        {"type": "content_block_start", "index": 0, "content_block": text},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ]
    raw = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events)
    reply = stream_of(raw) if streamed else json_of(named | {"content": [text], "stop_reason": "end_turn"})
    turn = msgspec.structs.replace(make_turn(), streamed=streamed)
    async with serve([reply]) as upstream, running(upstream.url) as backend:
        assert await collect_deltas(backend, turn) == [
            deltas.Served("claude-sonnet-4-5", "claude", "claude-sonnet-4-5-20250929"),
            deltas.Text("Hi."),
            deltas.TokenUsage(Usage(5, 3, 8)),
            deltas.Finish(),
        ]


async def test_models_are_listed_from_upstream() -> None:
    listed = {
        "data": [
            {
                "type": "model",
                "id": "claude-opus-5",
                "display_name": "Claude Opus 5",
                "created_at": "2026-02-19T00:00:00Z",
                "max_input_tokens": 1_000_000,
            }
        ],
        "has_more": False,
    }
    async with serve(fixed={"/v1/models": json_of(listed)}) as upstream:
        async with running(upstream.url, models=None) as backend:
            models = backend.models()
        assert upstream.requests[0].query == {"limit": "1000"}
    assert models == (Model(id="claude-opus-5", created=1_771_459_200, owned_by="anthropic", context_window=1_000_000),)


async def test_tokens_are_counted_upstream() -> None:
    turn = make_turn(instructions="Be kind.", tools=[TOOL], max_output_tokens=5, user="u", temperature=0.1)
    async with serve([json_of({"input_tokens": 14})]) as upstream, running(upstream.url) as backend:
        assert await backend.count_tokens(turn) == 14
        (request,) = upstream.requests
    assert request.path == "/v1/messages/count_tokens"
    assert request.json.keys() == {"model", "messages", "system", "tools"}


@pytest.mark.parametrize("reply", [refusal("no such path", 404, "not_found_error"), json_of({"tokens": 1})])
async def test_tokens_are_estimated_if_upstream_cannot_count(reply: Reply) -> None:
    turn = make_turn()
    async with serve([reply] * 2) as upstream, running(upstream.url) as backend:
        assert [await backend.count_tokens(turn) for _ in range(2)] == [estimate_tokens(turn.request, turn.items)] * 2
        assert len(upstream.requests) == 2  # the turn, and a minimal one


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refusal("max_tokens: too large"), InvalidRequest),
        (refusal("model: claude-sonnet-4-5", 404, "not_found_error"), ModelNotFound),
        (refusal("Too many", 429, "rate_limit_error"), RateLimited),
        (refusal("Overloaded", 529, "overloaded_error"), Unavailable),
        (stream_of(b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'), Unavailable),
    ],
)
async def test_error_before_first_delta_is_raised_by_stream(reply: Reply, kind: type[Exception]) -> None:
    async with serve([reply]) as upstream, running(upstream.url) as backend:
        with pytest.raises(kind):
            await backend.stream(make_turn())


async def test_closing_the_stream_closes_the_connection() -> None:
    begun = (WIRE / "broken_off.sse").read_bytes()
    async with serve([stream_of(begun, STALL)]) as upstream, running(upstream.url) as backend:
        answer = await backend.stream(make_turn())
        assert [delta async for delta in _take_one(answer)] == [deltas.Text("Hel")]
        await answer.aclose()
        await upstream.until_hang_ups()


async def _take_one(answer: Any) -> AsyncIterator[deltas.Delta]:
    async for batch in answer:
        for delta in batch:
            yield delta
        return


SEALED = {
    "type": "reasoning",
    "summary": [],
    "encrypted_content": '[{"type":"thinking","thinking":"a","signature":"b"}]',
}
MIDWAY = (
    {"role": "user", "content": "Hi"},
    SEALED,
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
)


async def test_rejected_thinking_is_omitted_on_retry() -> None:
    bound = (
        "messages.1.content.0: Invalid `signature` in `thinking` block. The block is bound to a different conversation."
    )
    async with serve([refusal(bound), recorded("text")]) as upstream, running(upstream.url) as backend:
        emitted = await collect_deltas(backend, make_turn(*MIDWAY))
        first, second = (json.dumps(request.json["messages"]) for request in upstream.requests)
    assert ('"thinking"' in first, '"thinking"' in second) == (True, False)
    assert emitted[-1] == deltas.Finish("stop")


async def test_unrelated_rejection_is_not_retried() -> None:
    async with serve([refusal("messages: too many images")]) as upstream, running(upstream.url) as backend:
        with pytest.raises(InvalidRequest, match="too many images"):
            await backend.stream(make_turn(*MIDWAY))
        assert len(upstream.requests) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"auth": "basic"}, "backends.claude.auth"),
        ({"max_tokens": 0}, "backends.claude.max_tokens"),
        ({"bucket": 1}, "backends.claude.bucket"),
        ({"base_url": "nowhere"}, "backends.claude.base_url"),
    ],
)
def test_invalid_option_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        create("claude", options, Path("unused"))


# In an engine


@asynccontextmanager
async def engine_on(url: str, **options: Any) -> AsyncIterator[Engine]:
    backend = create("claude", {"base_url": url, "models": ["claude-sonnet-4-5"]} | options, Path("unused"))
    engine = Engine(backends={"claude": backend}, store=MemoryStore())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def respond(engine: Engine, input_items: Any, **parameters: Any) -> Response:
    body = codec.encode({"model": "claude-sonnet-4-5", "input": input_items, "tools": [TOOL], **parameters})
    run = await engine.create(codec.decode_request(body).body, project="p")
    return engine_harness.judge([event async for batch in run.events() for event in batch])


def output_of(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "Rain"}


LOOP = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I need the weather.", "signature": "c2lnbmF0dXJl/+=="},
            {"type": "text", "text": "One moment."},
            {"type": "tool_use", "id": "toolu_01", "name": "get_weather", "input": {"city": "Oslo"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_01", "content": [{"type": "text", "text": "Rain"}]},
        ],
    },
]


@pytest.mark.parametrize("stored_by", ["server", "client"])
async def test_tool_loop_returns_signed_thinking_unchanged(stored_by: str) -> None:
    replies = [recorded("thinking_and_tool"), recorded("text")]
    thinking = {"reasoning": {"effort": "low"}}
    async with serve(replies) as upstream, engine_on(upstream.url) as engine:
        if stored_by == "server":
            first = await respond(engine, "Weather?", **thinking)
            await respond(engine, [output_of("toolu_01")], previous_response_id=first.id, **thinking)
        else:
            stateless = {"store": False, "include": ["reasoning.encrypted_content"]} | thinking
            first = await respond(engine, "Weather?", **stateless)
            output = json.loads(codec.encode(first.output))
            history = [{"role": "user", "content": "Weather?"}, *output, output_of("toolu_01")]
            await respond(engine, history, **stateless)
        bodies = [check_request(request.body) for request in upstream.requests]
    assert [body["thinking"] for body in bodies] == [{"type": "enabled", "budget_tokens": 2048}] * 2
    assert [body["messages"] for body in bodies] == [LOOP[:1], LOOP]


async def test_client_does_not_see_thinking_signature() -> None:
    async with serve([recorded("thinking_and_tool")]) as upstream, engine_on(upstream.url) as engine:
        response = await respond(engine, "Weather?", include=["reasoning.encrypted_content"], store=False)
    assert b"c2lnbmF0dXJl" not in codec.encode(response)


async def test_interleaved_thinking_returns_between_calls() -> None:
    replies = [recorded("interleaved_thinking"), recorded("text")]
    async with serve(replies) as upstream, engine_on(upstream.url) as engine:
        first = await respond(engine, "Weather?")
        await respond(engine, [output_of("toolu_02"), output_of("toolu_01")], previous_response_id=first.id)
        (_, assistant, answers) = upstream.requests[1].json["messages"]
    assert [block["type"] for block in assistant["content"]] == [
        "thinking", "tool_use", "thinking", "redacted_thinking", "tool_use",
    ]  # fmt: skip
    assert [block["tool_use_id"] for block in answers["content"]] == ["toolu_02", "toolu_01"]


async def test_upstream_search_blocks_return_to_upstream() -> None:
    replies = [recorded("web_search"), recorded("text")]
    async with serve(replies) as upstream, engine_on(upstream.url) as engine:
        first = await respond(engine, "When was Shannon born?")
        await respond(engine, "Thanks", previous_response_id=first.id)
        kinds = [block["type"] for block in upstream.requests[1].json["messages"][1]["content"]]
    assert kinds == ["text", "server_tool_use", "web_search_tool_result", "text"]


async def test_history_of_another_server_is_accepted() -> None:
    """Reasoning that another server sealed, and an open tool loop of another model."""
    history = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA-from-elsewhere"},
        {"type": "function_call", "call_id": "call:1", "name": "get_weather", "arguments": "{}"},
        output_of("call:1"),
    ]
    async with serve([recorded("text")]) as upstream, engine_on(upstream.url) as engine:
        response = await respond(engine, history, reasoning={"effort": "high"})
        body = check_request(upstream.requests[0].body)
    assert (response.status, "thinking" in body) == ("completed", False)


async def test_custom_tool_is_sent_as_function() -> None:
    patch = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
    shelf = {"type": "namespace", "name": "files", "description": "Files", "tools": [TOOL]}
    async with serve([stream_of(_call("apply_patch", {"input": "*** Begin Patch"}))]) as upstream:
        async with engine_on(upstream.url) as engine:
            body = codec.encode({"model": "claude-sonnet-4-5", "input": "Go", "tools": [patch, shelf]})
            run = await engine.create(codec.decode_request(body).body, project="p")
            *_, last = [event async for batch in run.events() for event in batch]
        offered = check_request(upstream.requests[0].body)["tools"]
    assert [(tool["name"], tool["input_schema"]["type"]) for tool in offered] == [
        ("apply_patch", "object"),
        ("files__get_weather", "object"),
    ]
    (called,) = last.response.output
    assert (called.type, called.name, called.input) == ("custom_tool_call", "apply_patch", "*** Begin Patch")


def _call(name: str, arguments: dict[str, Any]) -> bytes:
    block = {"type": "tool_use", "id": "toolu_1", "name": name, "input": arguments}
    message = {"type": "message", "content": [block], "stop_reason": "tool_use"}
    return b"data: " + json.dumps(message).encode() + b"\n\n"


# Documentation

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "upstreams.md").read_text("utf-8")


def test_guide_lists_every_option_with_default() -> None:
    table = GUIDE.split("| Messages option |", 1)[1].split("\n\n", 1)[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, flags=re.MULTILINE))
    own = {*AnthropicMessagesOptions.__struct_fields__} - {*UpstreamOptions.__struct_fields__} | {"base_url"}
    assert listed.keys() == own
    defaults = {
        field.name: field.default for field in msgspec.structs.fields(AnthropicMessagesOptions) if field.name in own
    }
    for name, value in defaults.items():
        if value is not None:
            assert listed[name] == f"`{json.dumps(value)}`", name
