"""The backend with a server on a loopback socket, alone and in an engine."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.backends.base import Model, Turn
from antiphon.backends.responses.backend import create
from antiphon.engine.engine import Engine
from antiphon.errors import ConfigError, ContextLengthExceeded, RateLimited, UpstreamError
from antiphon.protocol import codec
from antiphon.protocol.response import Response, Usage
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.deltas import CloseItem, Finish, Served, Text, TokenUsage
from support.responses_backend import RECORDINGS, collect_deltas, open_backend, read_recording
from support.upstream_server import STALL, Reply, UpstreamServer, json_of, serve, stream_of

ESTIMATE = Usage(10, 9, 19, estimated=True)


def make_turn(**fields: Any) -> Turn:
    body = {"model": "m", "input": [{"role": "user", "content": "hi"}]} | fields
    request = codec.decode_request(json.dumps(body).encode()).body
    assert isinstance(request.input, list)
    return Turn(request=request, items=request.input)


async def test_turn_is_sent_and_answer_is_translated() -> None:
    async with (
        serve([stream_of(read_recording("text"))]) as upstream,
        open_backend(upstream.url, api_key="sk-up") as backend,
    ):
        emitted = await collect_deltas(backend, make_turn())
        (request,) = upstream.requests
    assert request.path == "/v1/responses"
    assert request.json == {
        "model": "m",
        "input": [{"type": "message", "role": "user", "content": "hi"}],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "stream": True,
        "include": [],
    }
    assert emitted[:5] == [Served("m", "up", "up-1"), Text("Hel"), Text("lo"), Text(" wörld"), CloseItem()]
    assert emitted[-1] == Finish()


async def test_unstreamed_turn_asks_for_the_whole_answer() -> None:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}
    whole = {"id": "resp_up", "object": "response", "status": "completed", "model": "up-1", "output": [message]}
    async with serve([json_of(whole)]) as upstream, open_backend(upstream.url) as backend:
        turn = msgspec.structs.replace(make_turn(prompt_cache_key="conv_1"), streamed=False)
        batches = [batch async for batch in await backend.stream(turn)]
        (request,) = upstream.requests
    assert request.json["stream"] is False
    assert (request.headers["accept"], request.headers["session_id"]) == ("application/json", "conv_1")
    assert [list(batch) for batch in batches] == [
        [Served("m", "up", "up-1"), Text("Hello."), CloseItem(), TokenUsage(ESTIMATE), Finish()],
    ]


async def test_missing_usage_is_estimated() -> None:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}
    events = [
        {"type": "response.output_item.done", "output_index": 0, "item": message},
        {"type": "response.completed", "response": {"id": "resp_up", "output": []}},
    ]
    stream = stream_of(*(b"data: %b\n\n" % json.dumps(event).encode() for event in events))
    async with serve([stream]) as upstream, open_backend(upstream.url) as backend:
        emitted = await collect_deltas(backend, make_turn())
    assert emitted[-2:] == [TokenUsage(ESTIMATE), Finish()]


async def test_s5_11_contract_headers_are_sent() -> None:
    own = {"chatgpt-account-id": "acct_1", "X-Team": "blue"}
    async with serve([stream_of(read_recording("text"))]) as upstream:
        async with open_backend(upstream.url, api_key="sk-up", headers=own) as backend:
            await collect_deltas(backend, make_turn(prompt_cache_key="conv_1"))
        sent = upstream.requests[0].headers
    expected = {
        "accept": "text/event-stream",
        "openai-beta": "responses=experimental",
        "conversation_id": "conv_1",
        "session_id": "conv_1",
        "authorization": "Bearer sk-up",
        "chatgpt-account-id": "acct_1",
        "x-team": "blue",
    }
    assert {name: sent.get(name) for name in expected} == expected


async def test_s5_11_azure_gets_api_version_and_api_key_header() -> None:
    async with serve([stream_of(read_recording("text"))]) as upstream:
        query = {"api-version": "preview"}
        async with open_backend(upstream.url, name="azure", api_key="az-key", query=query) as backend:
            await collect_deltas(backend, make_turn())
        (request,) = upstream.requests
    assert (request.query, request.headers["api-key"]) == ({"api-version": "preview"}, "az-key")
    assert "authorization" not in request.headers
    assert request.json["store"] is True


async def test_s5_12_busy_upstream_is_retried_after_retry_after() -> None:
    busy = json_of({"error": {"message": "Busy"}}, 429, Retry_After="0")
    async with serve([busy, stream_of(read_recording("text"))]) as upstream:
        async with open_backend(upstream.url, request_retries=1) as backend:
            assert (await collect_deltas(backend, make_turn()))[-1] == Finish()
        assert len(upstream.requests) == 2


async def test_s5_12_error_is_raised_after_the_last_retry() -> None:
    busy = json_of({"error": {"message": "Busy"}}, 429, Retry_After="0")
    async with serve([busy, busy]) as upstream, open_backend(upstream.url, request_retries=1) as backend:
        with pytest.raises(RateLimited, match="Busy"):
            await backend.stream(make_turn())


async def test_s5_12_rejected_key_is_upstream_authentication_error() -> None:
    rejection = json_of({"error": {"message": "Incorrect API key provided: sk-up-12345"}}, 401)
    async with serve([rejection]) as upstream, open_backend(upstream.url, api_key="sk-up-12345") as backend:
        with pytest.raises(UpstreamError) as caught:
            await backend.stream(make_turn())
    assert (caught.value.status, caught.value.code) == (502, "upstream_authentication")
    assert "12345" not in caught.value.message


def test_s5_14_backend_kind_is_its_wire_api() -> None:
    kinds = {point.name: point.value for point in entry_points(group="antiphon.backends")}
    assert kinds["responses"] == "antiphon.backends.responses.backend:create"
    assert kinds["chat_completions"] == "antiphon.backends.chat_completions.backend:create"


async def test_omitted_verbosity_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serve([stream_of(read_recording("text"))]) as upstream, open_backend(upstream.url) as backend:
        with caplog.at_level(logging.WARNING):
            await collect_deltas(backend, make_turn(text={"verbosity": "low"}))
    assert "backend up: text.verbosity: omitted" in caplog.text


async def test_error_before_first_delta_is_raised_by_stream() -> None:
    async with serve([stream_of(read_recording("error_nested"))]) as upstream, open_backend(upstream.url) as backend:
        with pytest.raises(ContextLengthExceeded):
            await backend.stream(make_turn())


async def test_closing_the_stream_closes_the_connection() -> None:
    async with (
        serve([stream_of(read_recording("broken_off"), STALL)]) as upstream,
        open_backend(upstream.url) as backend,
    ):
        deltas = await backend.stream(make_turn())
        assert await anext(deltas) == [Served("m", "up", "up-1"), Text("Half")]
        await deltas.aclose()
        await upstream.until_hang_ups()


async def test_models_are_listed_from_upstream() -> None:
    listing = json_of({"data": [{"id": "a", "created": 7, "owned_by": "them"}]})
    async with serve(fixed={"/v1/models": listing}) as upstream, open_backend(upstream.url, models=None) as backend:
        assert list(backend.models()) == [Model(id="a", created=7, owned_by="them")]


async def test_tokens_are_counted_upstream() -> None:
    counted = json_of({"object": "response.input_tokens", "input_tokens": 42})
    async with serve([counted]) as upstream, open_backend(upstream.url) as backend:
        assert await backend.count_tokens(make_turn()) == 42
        assert upstream.requests[0].path == "/v1/responses/input_tokens"


@pytest.mark.parametrize(
    "reply",
    [
        json_of({"error": {"message": "no such path"}}, 404),
        json_of({"detail": "Method Not Allowed"}, 405),
        json_of({"tokens": 3}),
        Reply(body=b'{"input_tokens": 3, "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    ],
)
async def test_tokens_are_estimated_if_upstream_cannot_count(reply: Any) -> None:
    async with serve([reply] * 2) as upstream, open_backend(upstream.url) as backend:
        assert await backend.count_tokens(make_turn()) > 0
        assert await backend.count_tokens(make_turn()) > 0
        assert len(upstream.requests) == 2  # the turn, and a minimal one


@pytest.mark.parametrize(
    "refusal",
    [
        json_of({"error": {"message": "Item 'msg_1' not found", "type": "invalid_request_error"}}, 404),
        json_of({"error": {"message": "File not found: file_1", "type": "not_found_error"}}, 404),
    ],
)
async def test_refused_item_does_not_end_the_counting_of_other_turns(refusal: Any) -> None:
    counted = json_of({"object": "response.input_tokens", "input_tokens": 42})
    async with serve([refusal, counted, counted]) as upstream, open_backend(upstream.url) as backend:
        assert await backend.count_tokens(make_turn()) > 0
        assert await backend.count_tokens(make_turn()) == 42


async def test_missing_model_does_not_end_the_counting_of_other_models() -> None:
    refusal = json_of({"error": {"message": "nothing here"}}, 404)
    counted = json_of({"object": "response.input_tokens", "input_tokens": 42})
    async with serve([refusal, refusal, counted]) as upstream, open_backend(upstream.url) as backend:
        assert await backend.count_tokens(make_turn(model="missing")) > 0
        assert await backend.count_tokens(make_turn()) == 42


async def test_failed_token_count_is_requested_again() -> None:
    counted = json_of({"object": "response.input_tokens", "input_tokens": 42})
    async with serve([json_of({}, 500), counted]) as upstream, open_backend(upstream.url) as backend:
        assert await backend.count_tokens(make_turn()) != 42
        assert await backend.count_tokens(make_turn()) == 42


def test_invalid_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"backends\.up\.state"):
        create("up", {"base_url": "http://127.0.0.1:1/v1", "state": "nowhere"}, Path("unused"))


# In an engine

EXPECTED = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(RECORDINGS.glob("*.json"))}
FINISHED = [name for name, expected in EXPECTED.items() if expected["status"] != "failed"]


def reply_with_recording(name: str) -> Reply:
    return stream_of(read_recording(name))


@asynccontextmanager
async def engine_on(*names: str) -> AsyncIterator[tuple[Engine, UpstreamServer]]:
    async with serve([reply_with_recording(name) for name in names]) as upstream:
        options = {"base_url": upstream.url, "models": ["m"], "request_retries": 0, "stream_retries": 0}
        engine = Engine(backends={"up": create("up", options, Path("unused"))}, store=MemoryStore())
        await engine.start()
        try:
            yield engine, upstream
        finally:
            await engine.close()


async def respond(engine: Engine, **fields: Any) -> Response:
    body = {"model": "m", "input": "hi", "tools": [{"type": "function", "name": "f"}]} | fields
    run = await engine.create(codec.decode_request(json.dumps(body).encode()).body, project="p")
    async for _ in run.events():
        pass
    return await engine.retrieve("p", run.response.id)


def drop_changing_fields(items: Any) -> list[dict[str, Any]]:
    """Return the items without ids and seals, which differ each time."""
    plain: list[dict[str, Any]] = json.loads(codec.encode(items))
    return [{name: item[name] for name in item if name not in ("id", "encrypted_content")} for item in plain]


@pytest.mark.parametrize("name", FINISHED)
async def test_stored_response_equals_recorded_response(name: str) -> None:
    async with engine_on(name) as (engine, _):
        stored = await respond(engine)
    assert stored.status == EXPECTED[name]["status"]
    assert drop_changing_fields(stored.output) == drop_changing_fields(EXPECTED[name]["output"])


@pytest.mark.parametrize("name", ["new_fields", "reasoning_summary_and_seal", "only_completed"])
async def test_upstream_seal_returns_to_it_and_is_hidden_from_client(name: str) -> None:
    async with engine_on(name, "text") as (engine, upstream):
        first = await respond(engine, reasoning={"effort": "low"})
        output = codec.encode(first.output)
        calls = (
            [{"type": "function_call_output", "call_id": "call_a", "output": "7"}]
            if name != "reasoning_summary_and_seal"
            else []
        )
        await respond(engine, previous_response_id=first.id, input=[*calls, {"role": "user", "content": "and now?"}])
        sent = upstream.requests[1].json["input"]
    assert b"opaque" not in output
    upstream_seals = [item["encrypted_content"] for item in EXPECTED[name]["output"] if "encrypted_content" in item]
    assert [item["encrypted_content"] for item in sent if item["type"] == "reasoning"] == upstream_seals
