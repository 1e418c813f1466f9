"""The backend against a server on a loopback socket."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.backends.base import Model, Turn
from antiphon.backends.chat_completions.backend import ChatCompletionsBackend, create
from antiphon.engine.engine import Engine
from antiphon.engine.sealing import Sealer
from antiphon.errors import AntiphonError, ConfigError, ModelNotFound, RateLimited, UpstreamError
from antiphon.protocol import codec
from antiphon.protocol.hosted import ImageGenerationCall
from antiphon.protocol.items import Message
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response, Usage
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.deltas import Delta, Finish, Served, Text, TokenUsage
from antiphon.stream.fold import fold
from support.upstream_server import HANG_UP, RESET, STALL, Act, json_of, serve, stream_of

CORPUS = Path(__file__).parents[2] / "wire" / "chat"


def recorded(name: str) -> bytes:
    return (CORPUS / f"{name}.sse").read_bytes()


def make_turn(**fields: Any) -> Turn:
    body = {"model": "m", "input": [{"role": "user", "content": "hi"}]} | fields
    request = codec.decode_request(json.dumps(body).encode()).body
    assert isinstance(request.input, list)
    return Turn(request=request, items=request.input)


@asynccontextmanager
async def running(url: str, **options: Any) -> AsyncIterator[ChatCompletionsBackend]:
    quick = {"models": ["m"], "request_retries": 0, "stream_retries": 0}
    backend = create("up", {"base_url": url} | quick | options, Path("unused"))
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def collect_deltas(backend: ChatCompletionsBackend, turn: Turn) -> list[Delta]:
    return [delta async for batch in await backend.stream(turn) for delta in batch]


async def test_turn_is_sent_and_answer_streamed() -> None:
    async with serve([stream_of(recorded("text"))]) as upstream, running(upstream.url, api_key="sk-up") as backend:
        emitted = await collect_deltas(backend, make_turn(temperature=0.5))
        (request,) = upstream.requests
    assert (request.path, request.headers["authorization"]) == ("/v1/chat/completions", "Bearer sk-up")
    assert request.json == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }
    assert emitted == [Text("Hel"), Text("lo. Größe 🎈"), TokenUsage(Usage(5, 3, 8)), Finish("stop")]


def unstreamed(turn: Turn) -> Turn:
    return msgspec.structs.replace(turn, streamed=False)


async def test_unstreamed_turn_asks_for_the_whole_answer() -> None:
    whole = json_of(json.loads(recorded("whole_completion").removeprefix(b"data: ")))
    async with serve([whole]) as upstream, running(upstream.url) as backend:
        batches = [batch async for batch in await backend.stream(unstreamed(make_turn()))]
        (request,) = upstream.requests
    assert request.json == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": False}
    assert [batch[-2:] for batch in batches] == [[TokenUsage(Usage(5, 3, 8)), Finish("stop")]]


@pytest.mark.parametrize("options", [{"always_stream": True}, {"model_quirks": {"m": {"always_stream": True}}}])
async def test_always_stream_applies_to_unstreamed_turns(options: dict[str, Any]) -> None:
    async with serve([stream_of(recorded("text"))]) as upstream, running(upstream.url, **options) as backend:
        emitted = await collect_deltas(backend, unstreamed(make_turn()))
        assert upstream.requests[0].json["stream"] is True
    assert emitted[-1] == Finish("stop")


@pytest.mark.parametrize(
    "body", [{"error": {"message": "No."}}, {"choices": []}, {"choices": [{"error": {"code": 500}}]}]
)
async def test_error_in_whole_answer_is_raised(body: dict[str, Any]) -> None:
    async with serve([json_of(body)]) as upstream, running(upstream.url) as backend:
        with pytest.raises(UpstreamError):
            await backend.stream(unstreamed(make_turn()))


async def test_other_served_model_is_announced_first() -> None:
    named = {"model": "acme/model-1"}
    chunks = [
        named | {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Hi."}}]},
        named | {"choices": [{"delta": {"content": " So."}, "finish_reason": "stop"}]},
    ]
    raw = b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks)
    async with serve([stream_of(raw)]) as upstream, running(upstream.url) as backend:
        emitted = await collect_deltas(backend, make_turn())
    assert emitted[:3] == [Served("m", "up", "acme/model-1"), Text("Hi."), Text(" So.")]


async def test_no_key_sends_no_authorization() -> None:
    async with serve([stream_of(recorded("text"))]) as upstream, running(upstream.url) as backend:
        await collect_deltas(backend, make_turn())
        assert "authorization" not in upstream.requests[0].headers


async def test_extra_body_is_added_to_every_request() -> None:
    more = {"top_k": 5, "stream_options": None}
    async with serve([stream_of(recorded("text"))]) as upstream, running(upstream.url, extra_body=more) as backend:
        await collect_deltas(backend, make_turn())
        sent = upstream.requests[0].json
    assert (sent["top_k"], sent["stream_options"]) == (5, None)


async def test_server_that_does_not_stream_is_supported() -> None:
    whole = json_of(json.loads(recorded("whole_completion").removeprefix(b"data: ")))
    async with serve([whole]) as upstream, running(upstream.url) as backend:
        emitted = await collect_deltas(backend, make_turn())
    assert emitted[-2:] == [TokenUsage(Usage(5, 3, 8)), Finish("stop")]


async def test_missing_usage_is_estimated() -> None:
    async with serve([stream_of(recorded("usage_missing"))]) as upstream, running(upstream.url) as backend:
        turn = make_turn()
        emitted = await collect_deltas(backend, turn)
        counted = await backend.count_tokens(turn)
    assert isinstance(emitted[-2], TokenUsage)
    assert (emitted[-2].usage.estimated, emitted[-2].usage.input_tokens) == (True, counted)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (json_of({"error": {"message": "No such model.", "code": "model_not_found"}}, 404), ModelNotFound),
        (json_of({"error": {"message": "Slow down."}}, 429), RateLimited),
        (stream_of(recorded("error_text")), UpstreamError),
        (stream_of(recorded("nothing")), UpstreamError),
        (stream_of(recorded("nothing_but_done")), UpstreamError),
    ],
)
async def test_error_before_first_delta_is_raised_by_stream(reply: Any, kind: type[AntiphonError]) -> None:
    async with serve([reply]) as upstream, running(upstream.url) as backend:
        with pytest.raises(kind):
            await backend.stream(make_turn())


async def test_error_in_stream_hides_the_key() -> None:
    failing = stream_of(b'data: {"error": {"message": "Bad key my-secret-key.", "code": 500}}\n\n')
    async with serve([failing]) as upstream, running(upstream.url, api_key="my-secret-key") as backend:
        with pytest.raises(UpstreamError) as caught:
            await backend.stream(make_turn())
    assert "my-secret-key" not in caught.value.message


@pytest.mark.parametrize("end", [RESET, HANG_UP, STALL])
async def test_connection_broken_between_calls_fails_despite_finish_reason(end: Act) -> None:
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    chunk = {"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    broken = stream_of(b"data: " + json.dumps(chunk).encode() + b"\n\n", end)
    async with serve([broken]) as upstream, running(upstream.url, idle_timeout=0.01) as backend:
        with pytest.raises(UpstreamError):
            await collect_deltas(backend, make_turn())


async def test_closing_the_answer_closes_the_connection() -> None:
    begun = stream_of(b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n', STALL)
    async with serve([begun]) as upstream, running(upstream.url) as backend:
        deltas = await backend.stream(make_turn())
        assert await anext(deltas) == [Text("Hi")]
        await deltas.aclose()
        await upstream.until_hang_ups()


async def test_models_are_listed_and_unlisted_ones_are_served() -> None:
    listed = {"/v1/models": json_of({"data": [{"id": "a", "created": 7, "owned_by": "x", "max_model_len": 100}]})}
    async with serve(fixed=listed) as upstream, running(upstream.url, models=None) as backend:
        assert list(backend.models()) == [Model(id="a", created=7, owned_by="x", context_window=100)]
        assert backend.capabilities.any_model
    async with running("http://127.0.0.1:9/v1", models=["a"]) as backend:
        assert [model.id for model in backend.models()] == ["a"]
        assert not backend.capabilities.any_model


def test_server_without_json_schema_lacks_the_capability() -> None:
    made = [
        create("up", {"base_url": url}, Path()) for url in ("https://api.deepseek.com", "https://api.openai.com/v1")
    ]
    assert [backend.capabilities.json_schema for backend in made] == [False, True]


def test_unknown_option_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        create("up", {"base_url": "http://127.0.0.1/v1", "quirks": {"nope": 1}}, Path())
    assert caught.value.message == "backends.up.quirks: Object contains unknown field nope"


async def test_generated_image_is_an_item_and_goes_back_as_image() -> None:
    async with (
        serve([stream_of(recorded("images")), stream_of(recorded("text"))]) as upstream,
        running(upstream.url) as backend,
    ):
        engine = Engine(backends={"up": backend}, store=MemoryStore(), sealer=Sealer([bytes(32)]))

        async def answer(*sent: Any) -> Response:
            run = await engine.create(CreateRequest(model="m", stream=True, store=False, input=list(sent)), project="p")
            return fold([event async for batch in run.events() for event in batch])

        first = await answer(Message("user", "Draw."))
        await answer(*first.output, Message("user", "Again."))
        _, second = upstream.requests
    image = first.output[1]
    assert isinstance(image, ImageGenerationCall)
    assert (image.status, image.result, image.output_format) == ("completed", "iVBORw0KGgo=", "png")
    sent = [
        part["image_url"]["url"]
        for message in second.json["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    assert sent == ["data:image/png;base64,iVBORw0KGgo="]
