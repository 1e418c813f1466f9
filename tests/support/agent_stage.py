"""A model on stage: the same answers over HTTP, in process, and from a server that is not ours.

    async with open_stage("upstream") as stage:
        stage.play([call("look_up", {"city": "Bern"})], "It is mild.")
        outcome = await stage.agent(tools=[look_up]).run("How is it?")
        assert stage.sent[1]["input"] == [...]

Each turn gets the next answer: a text, or steps as scripts have them. Two more: DROP breaks the stream off, and HOLD
waits until the test goes on, which knows by `until_held` when it has come so far.
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

WAYS = ("http", "in process", "upstream")

Step = dict[str, Any]
Answer = str | list[Step]
DROP: Step = {"drop": True}
HOLD: Step = {"wait": "held"}


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


def call(name: str, arguments: Any = None, call_id: str = "call_1") -> Step:
    """A call; arguments that are text are sent as they are."""
    given = arguments if isinstance(arguments, str) else arguments or {}
    return {"tool_call": {"name": name, "arguments": given, "call_id": call_id, "key": call_id}}


def usage(read: int, said: int) -> Step:
    return {"usage": {"input_tokens": read, "output_tokens": said, "total_tokens": read + said}}


def outputs_of(request: dict[str, Any]) -> list[tuple[str, Any]]:
    """The outputs of calls in a request, by the ids of the calls."""
    return [
        (item["call_id"], item["output"]) for item in request["input"] if item.get("type") == "function_call_output"
    ]


class Recorder:
    """A transport that keeps what went over it. The next requests raise what is in `refusals`, one after the other."""

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


class Stage:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.transport: Recorder

    def agent(self, **options: Any) -> Agent:
        return Agent(**{"model": "scripted", "transport": self.transport} | options)

    def play(self, *answers: Answer) -> None:
        """Have these said from now on, one in each turn, and the last one again and again."""
        raise NotImplementedError

    async def until_held(self) -> None:
        raise NotImplementedError

    def go_on(self) -> None:
        raise NotImplementedError


class Understudy:
    """A backend whose script can be changed."""

    def __init__(self) -> None:
        self.part = make_backend(["Nothing is played yet."])
        self.capabilities = self.part.capabilities

    async def start(self) -> None:
        """There is nothing to get ready."""

    async def close(self) -> None:
        """There is nothing to release."""

    def models(self) -> list[Model]:
        return list(self.part.models())

    async def stream(self, turn: Turn) -> Deltas:
        return await self.part.stream(turn)

    async def count_tokens(self, turn: Turn) -> int:
        return await self.part.count_tokens(turn)


def make_backend(answers: Iterable[Answer], rules: Iterable[dict[str, Any]] = ()) -> ScriptedBackend:
    played = [
        answer
        if isinstance(answer, str)
        else [{"crash": "the power went out"} if step is DROP else step for step in answer]
        for answer in answers
    ]
    return create("scripted", {"script": {"rules": [*rules, {"answers": played}]}}, Path())


class OurStage(Stage):
    """In process, or over a socket to our own server."""

    def __init__(self, understudy: Understudy, transport: Transport, server: LiveServer | None = None) -> None:
        super().__init__()
        self.transport = Recorder(transport, self.sent)
        self._understudy = understudy
        self._server = server

    def play(self, *answers: Answer) -> None:
        self.play_by([], *answers)

    def play_by(self, rules: list[dict[str, Any]], *answers: Answer) -> None:
        """The same, but for the turns that the rules are for."""
        self._understudy.part = make_backend(answers, rules)

    async def until_held(self) -> None:
        part = self._understudy.part
        if self._server is None:
            await part.reached("held")
        else:
            await asyncio.to_thread(self._server.wait_for, lambda: part.reached("held"))

    def go_on(self) -> None:
        part = self._understudy.part
        if self._server is None:
            part.release("held")
        else:
            self._server.do(lambda: part.release("held"))


class TheirStage(Stage):
    """A server that sends the least it has to."""

    def __init__(self, upstream: UpstreamServer) -> None:
        super().__init__()
        self.transport = Recorder(HttpTransport(upstream.url), self.sent)
        self.upstream = upstream
        self._gate = asyncio.Event()

    def play(self, *answers: Answer) -> None:
        self._gate = asyncio.Event()
        replies = [make_reply(each, turn, self._gate) for turn, each in enumerate([*answers, *[answers[-1]] * 30])]
        self.upstream.replace(*replies)

    async def until_held(self) -> None:
        await self.upstream.until_requests(max(1, len(self.sent)))

    def go_on(self) -> None:
        self._gate.set()


def make_reply(answer: Answer, turn: int, gate: asyncio.Event) -> Reply:
    """An answer as a server of the Responses API sends it."""
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
        pieces += _play(step, response, gate)
    status = response["status"]
    return stream_of(*pieces, _event(f"response.{status}", response=response), b"data: [DONE]\n\n")


def _play(step: Step, response: dict[str, Any], gate: asyncio.Event) -> list[Piece]:
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
    words = [f" {word}" if place else word for place, word in enumerate(value.split(" "))]
    deltas: list[Piece] = [_event(f"response.{kind}.delta", delta=word, **where) for word in words]
    part = {"type": kind, "text": value} | ({"annotations": []} if key == "text" else {})
    item = {"id": f"item_{index}", "content": [part]}
    if key == "text":
        return item | {"type": "message", "role": "assistant", "status": "completed"}, deltas
    return item | {"type": "reasoning", "summary": []}, deltas


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **fields}).encode())


class Theatre:
    """Our server, for all the tests that need it one after the other."""

    def __init__(self) -> None:
        self.understudy = Understudy()
        self.server = LiveServer({}, make_settings(), backend=self.understudy)  # type: ignore[arg-type]  # as good as one

    def close(self) -> None:
        self.server.stop()


@asynccontextmanager
async def open_stage(way: str, theatre: Theatre | None = None) -> AsyncIterator[Stage]:
    """One of the WAYS; the one over HTTP needs a theatre."""
    if way == "http":
        assert theatre is not None
        transport = HttpTransport(f"{theatre.server.url}/v1")
        try:
            yield OurStage(theatre.understudy, transport, theatre.server)
        finally:
            await transport.close()
    elif way == "upstream":
        async with serve([]) as upstream:
            stage = TheirStage(upstream)
            try:
                yield stage
            finally:
                await stage.transport.close()
    else:
        understudy = Understudy()
        engine = Engine(backends={"test": understudy}, store=MemoryStore(), sealer=Sealer([bytes(32)]))
        await engine.start()
        try:
            yield OurStage(understudy, LocalTransport(engine))
        finally:
            await engine.close()
