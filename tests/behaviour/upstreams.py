"""A server in front of an upstream of each kind: its responses, and the requests it sends upstream."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from antiphon.backends.registry import create
from behaviour.wire import Json, read_stream
from support.live_server import HttpResponse, LiveServer, make_settings
from support.upstream_server import Reply, UpstreamServer, json_of, serve, stream_of

# By kind of backend: the folder with recorded responses of its servers.
KINDS = {"anthropic_messages": "anthropic", "chat_completions": "chat", "responses": "responses"}
_CORPUS = Path(__file__).parents[1] / "wire"
NO_RETRIES = {"request_retries": 0, "stream_retries": 0}


async def ask_through(kind: str, input_items: Any, **fields: Any) -> tuple[HttpResponse, list[Json]]:
    """Send the input to a model behind an upstream of this kind. Return the answer and the upstream requests."""
    reply = stream_of((_CORPUS / KINDS[kind] / "text.sse").read_bytes())
    async with serve([reply]) as upstream:
        options = {"base_url": upstream.url, "models": ["m"]} | NO_RETRIES
        backend = create(kind, name="up", options=options, data_dir=Path("unused"))
        running = await asyncio.to_thread(LiveServer, {}, make_settings(), others={"up": backend})
        try:
            body = {"model": "m", "input": input_items} | fields
            answer = await asyncio.to_thread(running.ask, "POST", "/v1/responses", body)
        finally:
            await asyncio.to_thread(running.stop)
        return answer, [request.json for request in upstream.requests]


def recorded(name: str) -> Reply:
    """A recorded response of a Chat Completions server."""
    return stream_of((_CORPUS / "chat" / f"{name}.sse").read_bytes())


def streamed(*deltas: Json, finish: str = "stop") -> Reply:
    """A response of a Chat Completions server with these deltas."""
    chunks: list[Json] = [{"choices": [{"delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"finish_reason": finish}], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
    return stream_of(*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks), b"data: [DONE]\n\n")


def answered(*items: Json) -> Reply:
    """A response of a Responses API server."""
    words = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}
    response = {"id": "resp_up", "object": "response", "status": "completed", "output": [*items, words]}
    event = {"type": "response.completed", "response": response}
    return stream_of(f"data: {json.dumps(event)}\n\n".encode())


def refuse(message: str, *, param: str | None = None, code: str | None = None) -> Reply:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return json_of({"error": error}, 400)


class Bridge:
    """A server with an upstream behind it."""

    def __init__(self, running: LiveServer, upstream: UpstreamServer, model: str) -> None:
        self.upstream = upstream
        self._running = running
        self._model = model

    async def post(self, path: str, body: Json) -> HttpResponse:
        return await asyncio.to_thread(self._running.ask, "POST", path, body)

    async def ask(self, input_items: Any, **fields: Any) -> Json:
        answer = await self.post("/v1/responses", {"model": self._model, "input": input_items} | fields)
        assert answer.status == 200, answer.body
        response: Json = answer.json
        return response

    async def stream(self, input_items: Any, **fields: Any) -> list[Json]:
        answer = await self.post("/v1/responses", {"model": self._model, "input": input_items, "stream": True} | fields)
        return read_stream(answer.body)

    async def get(self, path: str) -> Json:
        found: Json = (await asyncio.to_thread(self._running.ask, "GET", path)).json
        return found

    def client(self) -> AsyncOpenAI:
        return self._running.async_client()

    @property
    def sent(self) -> list[Json]:
        return [request.json for request in self.upstream.requests if request.method == "POST"]


@asynccontextmanager
async def bridge(
    *replies: Reply, model: str = "m", kind: str = "chat_completions", **options: Any
) -> AsyncIterator[Bridge]:
    """Start a server in front of an upstream that sends these replies and lists no models."""
    async with serve(replies, fixed={"/v1/models": json_of({"data": []})}) as upstream:
        settings = {"base_url": upstream.url, "models": [model]} | NO_RETRIES | options
        backend = create(kind, name="up", options=settings, data_dir=Path("unused"))
        running = await asyncio.to_thread(LiveServer, {}, make_settings(), others={"up": backend})
        try:
            yield Bridge(running, upstream, model)
        finally:
            await asyncio.to_thread(running.stop)
