"""A scripted model for agents: the same answers over HTTP, in process, and from a minimal server.

    async with open_scripted("upstream") as scripted:
        scripted.set_answers([call("look_up", {"city": "Bern"})], "It is mild.")
        outcome = await scripted.agent(tools=[look_up]).run("How is it?")
        assert scripted.sent[1]["input"] == [...]

Each turn gets the next answer: a text, or the steps of a script. There are two more steps: DROP breaks the stream, and
HOLD waits for `release`. `until_held` waits until HOLD is reached.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon import tool
from antiphon.agent.transports.base import Events, Transport
from antiphon.agent.transports.engine import LocalTransport
from antiphon.agent.transports.http import HttpTransport
from antiphon.backends.base import Model, Turn
from antiphon.backends.scripted.backend import ScriptedBackend, create
from antiphon.engine.engine import Engine
from antiphon.engine.sealing import Sealer
from antiphon.runtime import Agent
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.deltas import Deltas
from support.live_server import LiveServer, make_settings
from support.upstream_server import RESET, Piece, Reply, UpstreamServer, json_of, serve, stream_of

TRANSPORTS = ("http", "in process", "upstream")

Step = dict[str, Any]
Answer = str | list[Step]
DROP: Step = {"drop": True}
HOLD: Step = {"wait": "held"}


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


def call(name: str, arguments: Any = None, call_id: str = "call_1") -> Step:
    """Return the step of a call. Arguments that are a string are sent unchanged."""
    given = arguments if isinstance(arguments, str) else arguments or {}
    return {"tool_call": {"name": name, "arguments": given, "call_id": call_id, "key": call_id}}


def usage(input_tokens: int, output_tokens: int) -> Step:
    return {
        "usage": {
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        }
    }


def outputs_of(request: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the outputs in a request, with their call ids."""
    return [
        (item["call_id"], item["output"]) for item in request["input"] if item.get("type") == "function_call_output"
    ]


class Recorder:
    """A transport that records requests. The next requests raise the errors in `refusals`, one each."""

    def __init__(self, inner: Transport, sent: list[dict[str, Any]]) -> None:
        self.refusals: list[Exception] = []
        self._sent = sent
        self._inner = inner

    async def stream(self, request: dict[str, Any]) -> Events:
        self._sent.append(json.loads(json.dumps(request)))
        if self.refusals:
            raise self.refusals.pop(0)
        return await self._inner.stream(request)

    async def close(self) -> None:
        await self._inner.close()


class ScriptedModel:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.transport: Recorder

    def agent(self, **options: Any) -> Agent:
        return Agent(**{"model": "scripted", "transport": self.transport} | options)

    def set_answers(self, *answers: Answer) -> None:
        """Set the answers of the following turns. The last one is repeated."""
        raise NotImplementedError

    async def until_held(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError


class ReplaceableBackend:
    """A backend whose script can be changed."""

    def __init__(self) -> None:
        self.current = make_backend(["No answer is set."])
        self.capabilities = self.current.capabilities

    async def start(self) -> None:
        """There is nothing to start."""

    async def close(self) -> None:
        """There is nothing to close."""

    def models(self) -> list[Model]:
        return list(self.current.models())

    async def stream(self, turn: Turn) -> Deltas:
        return await self.current.stream(turn)

    async def count_tokens(self, turn: Turn) -> int:
        return await self.current.count_tokens(turn)


def make_backend(answers: Iterable[Answer], rules: Iterable[dict[str, Any]] = ()) -> ScriptedBackend:
    played = [
        answer
        if isinstance(answer, str)
        else [{"crash": "the power went out"} if step is DROP else step for step in answer]
        for answer in answers
    ]
    return create("scripted", {"script": {"rules": [*rules, {"answers": played}]}}, Path())


class AntiphonModel(ScriptedModel):
    """A scripted backend of an Antiphon engine, in process or behind a server."""

    def __init__(self, backend: ReplaceableBackend, transport: Transport, server: LiveServer | None = None) -> None:
        super().__init__()
        self.transport = Recorder(transport, self.sent)
        self._backend = backend
        self._server = server

    def set_answers(self, *answers: Answer) -> None:
        self.set_answers_by_rule([], *answers)

    def set_answers_by_rule(self, rules: list[dict[str, Any]], *answers: Answer) -> None:
        """Set the answers for turns that match a rule, and for the others."""
        self._backend.current = make_backend(answers, rules)

    async def until_held(self) -> None:
        current = self._backend.current
        if self._server is None:
            await current.reached("held")
        else:
            await asyncio.to_thread(self._server.wait_for, lambda: current.reached("held"))

    def release(self) -> None:
        current = self._backend.current
        if self._server is None:
            current.release("held")
        else:
            self._server.do(lambda: current.release("held"))


class UpstreamModel(ScriptedModel):
    """A server of the Responses API that sends only the required events."""

    def __init__(self, upstream: UpstreamServer) -> None:
        super().__init__()
        self.transport = Recorder(HttpTransport(upstream.url), self.sent)
        self.upstream = upstream
        self._gate = asyncio.Event()

    def set_answers(self, *answers: Answer) -> None:
        self._gate = asyncio.Event()
        replies = [make_reply(each, turn, self._gate) for turn, each in enumerate([*answers, *[answers[-1]] * 30])]
        self.upstream.replace(*replies)

    async def until_held(self) -> None:
        await self.upstream.until_requests(max(1, len(self.sent)))

    def release(self) -> None:
        self._gate.set()


def make_reply(answer: Answer, turn: int, gate: asyncio.Event) -> Reply:
    """Return an answer as the reply of a Responses API server."""
    steps = [{"text": answer}] if isinstance(answer, str) else answer
    if "raise" in steps[0]:
        error = {"type": "server_error", "param": None, "code": None} | steps[0]["raise"]
        return json_of({"error": error}, error.pop("status", 500), Retry_After="0")
    response: dict[str, Any] = {
        "id": f"resp_{turn + 1}",
        "object": "response",
        "created_at": 1,
        "model": "scripted",
        "status": "completed",
        "previous_response_id": f"resp_{turn}" if turn else None,
        "output": [],
        "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
    }
    pieces: list[Piece] = [_event("response.created", response={**response, "status": "in_progress"})]
    for step in steps:
        if step is DROP:
            return stream_of(*pieces, RESET)
        pieces += _apply_step(step, response, gate)
    status = response["status"]
    return stream_of(*pieces, _event(f"response.{status}", response=response), b"data: [DONE]\n\n")


def _apply_step(step: Step, response: dict[str, Any], gate: asyncio.Event) -> list[Piece]:
    ((key, value),) = step.items()
    if key == "wait":
        return [gate]
    if key == "usage":
        response["usage"] = value
        return []
    if key == "finish":
        response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return []
    if key == "failure":
        return [_event("response.failed", response=response | {"status": "failed", "error": value})]
    index = len(response["output"])
    item, deltas = _make_item(key, value, index)
    response["output"].append(item)
    return [*deltas, _event("response.output_item.done", output_index=index, item=item)]


def _make_item(key: str, value: Any, index: int) -> tuple[dict[str, Any], list[Piece]]:
    if key == "tool_call":
        arguments = value["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, separators=(",", ":"))
        named = {"call_id": value["call_id"], "name": value["name"], "arguments": text}
        return {"type": "function_call", "id": f"fc_{index}", "status": "completed"} | named, []
    if key == "item":
        return value, []
    kind = "output_text" if key == "text" else "reasoning_text"
    where = {"item_id": f"item_{index}", "output_index": index, "content_index": 0}
    words = [f" {word}" if index else word for index, word in enumerate(value.split(" "))]
    deltas: list[Piece] = [_event(f"response.{kind}.delta", delta=word, **where) for word in words]
    part = {"type": kind, "text": value} | ({"annotations": []} if key == "text" else {})
    item = {"id": f"item_{index}", "content": [part]}
    if key == "text":
        return item | {"type": "message", "role": "assistant", "status": "completed"}, deltas
    return item | {"type": "reasoning", "summary": []}, deltas


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **fields}).encode())


class SharedServer:
    """An Antiphon server that tests use one after another."""

    def __init__(self) -> None:
        self.backend = ReplaceableBackend()
        self.server = LiveServer({}, make_settings(), backend=self.backend)  # type: ignore[arg-type]  # as good as one

    def close(self) -> None:
        self.server.stop()


@asynccontextmanager
async def open_scripted(transport_name: str, shared_server: SharedServer | None = None) -> AsyncIterator[ScriptedModel]:
    """Open a scripted model behind one of TRANSPORTS. "http" needs a shared server."""
    if transport_name == "http":
        assert shared_server is not None
        transport = HttpTransport(f"{shared_server.server.url}/v1")
        try:
            yield AntiphonModel(shared_server.backend, transport, shared_server.server)
        finally:
            await transport.close()
    elif transport_name == "upstream":
        async with serve([]) as upstream:
            scripted = UpstreamModel(upstream)
            try:
                yield scripted
            finally:
                await scripted.transport.close()
    else:
        backend = ReplaceableBackend()
        engine = Engine(backends={"test": backend}, store=MemoryStore(), sealer=Sealer([bytes(32)]))
        await engine.start()
        try:
            yield AntiphonModel(backend, LocalTransport(engine))
        finally:
            await engine.close()
