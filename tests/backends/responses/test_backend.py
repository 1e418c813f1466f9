"""The backend against a server on a loopback socket."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.base import Model, Turn
from antiphon.backends.responses.backend import ResponsesBackend, create
from antiphon.errors import ConfigError, ContextLengthExceeded, RateLimited, UpstreamError
from antiphon.protocol import codec
from antiphon.stream.deltas import CloseItem, Delta, Finish, Served, Text
from support.upstream_server import STALL, json_of, serve, stream_of

CORPUS = Path(__file__).parents[2] / "wire" / "responses"


def recorded(name: str) -> bytes:
    return (CORPUS / f"{name}.sse").read_bytes()


def make_turn(**fields: Any) -> Turn:
    body = {"model": "m", "input": [{"role": "user", "content": "hi"}]} | fields
    request = codec.decode_request(json.dumps(body).encode()).request
    assert isinstance(request.input, list)
    return Turn(request=request, items=request.input)


@asynccontextmanager
async def running(url: str, *, name: str = "up", **options: Any) -> AsyncIterator[ResponsesBackend]:
    quick = {"models": ["m"], "request_retries": 0, "stream_retries": 0}
    backend = create(name, {"base_url": url} | quick | options, Path("unused"))
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def listen(backend: ResponsesBackend, turn: Turn) -> list[Delta]:
    return [delta async for batch in await backend.stream(turn) for delta in batch]


async def test_a_turn_is_sent_and_its_answer_told() -> None:
    async with serve([stream_of(recorded("text"))]) as upstream, running(upstream.url, api_key="sk-up") as backend:
        told = await listen(backend, make_turn())
        (request,) = upstream.requests
    assert request.path == "/v1/responses"
    assert request.json == {
        "model": "m",
        "instructions": "",
        "input": [{"type": "message", "role": "user", "content": "hi"}],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "stream": True,
        "include": [],
    }
    assert told[:5] == [Served("m", "up", "up-1"), Text("Hel"), Text("lo"), Text(" wörld"), CloseItem()]
    assert told[-1] == Finish()


async def test_s5_11_the_headers_of_the_contract_are_sent() -> None:
    own = {"chatgpt-account-id": "acct_1", "X-Team": "blue"}
    async with serve([stream_of(recorded("text"))]) as upstream:
        async with running(upstream.url, api_key="sk-up", headers=own) as backend:
            await listen(backend, make_turn(prompt_cache_key="conv_1"))
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


async def test_s5_11_azure_gets_its_version_and_its_own_key() -> None:
    async with serve([stream_of(recorded("text"))]) as upstream:
        query = {"api-version": "preview"}
        async with running(upstream.url, name="azure", api_key="az-key", query=query) as backend:
            await listen(backend, make_turn())
        (request,) = upstream.requests
    assert (request.query, request.headers["api-key"]) == ({"api-version": "preview"}, "az-key")
    assert "authorization" not in request.headers
    assert request.json["store"] is True


async def test_s5_12_an_upstream_that_is_busy_is_asked_again_when_it_says() -> None:
    busy = json_of({"error": {"message": "Busy"}}, 429, Retry_After="0")
    async with serve([busy, stream_of(recorded("text"))]) as upstream:
        async with running(upstream.url, request_retries=1) as backend:
            assert (await listen(backend, make_turn()))[-1] == Finish()
        assert len(upstream.requests) == 2


async def test_s5_12_after_the_last_retry_the_error_is_told() -> None:
    busy = json_of({"error": {"message": "Busy"}}, 429, Retry_After="0")
    async with serve([busy, busy]) as upstream, running(upstream.url, request_retries=1) as backend:
        with pytest.raises(RateLimited, match="Busy"):
            await backend.stream(make_turn())


async def test_s5_12_a_key_that_is_refused_is_an_error_of_ours() -> None:
    refused = json_of({"error": {"message": "Incorrect API key provided: sk-up-12345"}}, 401)
    async with serve([refused]) as upstream, running(upstream.url, api_key="sk-up-12345") as backend:
        with pytest.raises(UpstreamError) as caught:
            await backend.stream(make_turn())
    assert (caught.value.status, caught.value.code) == (502, "upstream_authentication")
    assert "12345" not in caught.value.message


def test_s5_14_the_kind_of_a_backend_is_its_wire_api() -> None:
    kinds = {point.name: point.value for point in entry_points(group="antiphon.backends")}
    assert kinds["responses"] == "antiphon.backends.responses.backend:create"
    assert kinds["chat_completions"] == "antiphon.backends.chat_completions.backend:create"


async def test_a_verbosity_that_is_left_out_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serve([stream_of(recorded("text"))]) as upstream, running(upstream.url) as backend:
        with caplog.at_level(logging.WARNING):
            await listen(backend, make_turn(text={"verbosity": "low"}))
    assert "backend up: text.verbosity: left out" in caplog.text


async def test_an_error_before_the_first_words_is_raised() -> None:
    async with serve([stream_of(recorded("error_nested"))]) as upstream, running(upstream.url) as backend:
        with pytest.raises(ContextLengthExceeded):
            await backend.stream(make_turn())


async def test_closing_the_answer_hangs_up() -> None:
    async with serve([stream_of(recorded("broken_off"), STALL)]) as upstream, running(upstream.url) as backend:
        deltas = await backend.stream(make_turn())
        assert await anext(deltas) == [Served("m", "up", "up-1"), Text("Half")]
        await deltas.aclose()
        await upstream.until_hang_ups()


async def test_the_upstreams_models_are_listed() -> None:
    listing = json_of({"data": [{"id": "a", "created": 7, "owned_by": "them"}]})
    async with serve(fixed={"/v1/models": listing}) as upstream, running(upstream.url, models=None) as backend:
        assert list(backend.models()) == [Model(id="a", created=7, owned_by="them")]


async def test_tokens_are_counted_there() -> None:
    counted = json_of({"object": "response.input_tokens", "input_tokens": 42})
    async with serve([counted]) as upstream, running(upstream.url) as backend:
        assert await backend.count_tokens(make_turn()) == 42
        assert upstream.requests[0].path == "/v1/responses/input_tokens"


@pytest.mark.parametrize(
    "reply",
    [
        json_of({"error": {"message": "no such path"}}, 404),
        json_of({"detail": "Method Not Allowed"}, 405),
        json_of({"tokens": 3}),
    ],
)
async def test_tokens_are_estimated_if_the_upstream_cannot_count_them(reply: Any) -> None:
    async with serve([reply]) as upstream, running(upstream.url) as backend:
        assert await backend.count_tokens(make_turn()) > 0
        assert await backend.count_tokens(make_turn()) > 0
        assert len(upstream.requests) == 1  # it is not asked twice


async def test_a_count_that_fails_once_is_asked_for_again() -> None:
    counted = json_of({"object": "response.input_tokens", "input_tokens": 42})
    async with serve([json_of({}, 500), counted]) as upstream, running(upstream.url) as backend:
        assert await backend.count_tokens(make_turn()) != 42
        assert await backend.count_tokens(make_turn()) == 42


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"backends\.up\.state"):
        create("up", {"base_url": "http://127.0.0.1:1/v1", "state": "nowhere"}, Path("unused"))
