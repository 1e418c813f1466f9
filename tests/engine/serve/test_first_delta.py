"""Models that are slow to start: the stream begins without them, and no model is left running."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest

from antiphon.backends.chat_completions.backend import create
from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve import first_delta
from antiphon.engine.serve.first_delta import LateDeltas
from antiphon.engine.serve.routing import Serving
from antiphon.errors import RateLimited, UpstreamError
from antiphon.protocol import codec, events
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.deltas import Delta
from antiphon.stream.fold import fold
from support.engine_harness import EngineHarness
from support.garbage import expect_no_garbage
from support.upstream_server import STALL, Reply, json_of, serve, stream_of

SCRIPT: dict[str, Any] = {"default": "Hello."}


class SlowBench(EngineHarness):
    """An engine whose model starts, or fails to start, on command."""

    def __init__(self, *, patience: float) -> None:
        super().__init__(SCRIPT, MemoryStore(), Policy(first_delta_seconds=patience))
        self.go_on: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting = asyncio.Event()
        begin = self.backend.stream

        async def begin_late(turn: Any) -> Any:
            self.waiting.set()
            await self.go_on
            return await begin(turn)

        self.backend.stream = begin_late  # type: ignore[method-assign]


@pytest.fixture
async def slow() -> AsyncIterator[SlowBench]:
    harness = SlowBench(patience=0)
    await harness.engine.start()
    yield harness
    await harness.engine.close()


async def test_stream_begins_before_model_and_names_it_later(slow: SlowBench) -> None:
    run = await slow.ask(stream=True)
    emitted = run.events()
    stream = list(await anext(emitted))
    assert [event.type for event in stream] == ["response.created", "response.in_progress"]
    slow.go_on.set_result(None)
    stream += [event async for batch in emitted for event in batch]
    response = fold(stream)
    assert (response.status, response.output_text, response.served_by) == ("completed", "Hello.", "test/scripted")


async def test_stream_fails_with_reason_if_model_cannot_start(slow: SlowBench) -> None:
    run = await slow.ask(stream=True)
    slow.go_on.set_exception(UpstreamError("Nobody is there."))
    stream = [event async for batch in run.events() for event in batch]
    assert [event.type for event in stream][2:] == ["error", "response.failed"]
    error = stream[2]
    assert isinstance(error, events.Error)
    assert (error.error.code, error.error.message) == ("upstream_error", "Nobody is there.")


async def test_stream_of_a_model_that_cannot_start_leaves_no_garbage(slow: SlowBench) -> None:
    async def fail(_: Any) -> Any:
        await asyncio.sleep(0.001)  # the stream has begun
        raise UpstreamError("Nobody is there.")

    slow.backend.stream = fail  # type: ignore[method-assign]

    async def ask_in_vain() -> None:
        emitted = (await slow.ask(stream=True)).events()
        assert [event.type async for batch in emitted for event in batch][-1] == "response.failed"

    await ask_in_vain()  # some parts are made at the first use
    with expect_no_garbage():
        await ask_in_vain()


async def test_closing_stream_before_model_starts_stops_model(slow: SlowBench) -> None:
    run = await slow.ask(stream=True)
    emitted = run.events()
    await anext(emitted)
    await slow.waiting.wait()
    await emitted.aclose()
    assert slow.go_on.cancelled()


async def test_stream_cancelled_before_model_starts_ends_as_cancelled(slow: SlowBench) -> None:
    run = await slow.ask(stream=True)

    async def read() -> list[Any]:
        return [event async for batch in run.events() for event in batch]

    reading = asyncio.create_task(read())
    await slow.waiting.wait()
    cancelled = await slow.engine.cancel("default", run.response.id)
    assert cancelled.status == "cancelled"
    assert (await reading)[-1].type == "response.incomplete"
    assert slow.go_on.cancelled()


class OpenAnswer:
    """An answer that has no deltas. It ends only if it is closed."""

    is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        return []

    async def aclose(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("ticks", range(6))
async def test_reader_that_leaves_when_the_model_has_started_closes_its_answer(ticks: int) -> None:
    answer, go_on = OpenAnswer(), asyncio.Event()

    async def start() -> Serving:
        await go_on.wait()
        return Serving(answer, None, ())

    late = LateDeltas(asyncio.create_task(start()), sent_warnings=(), candidate=None)
    reading = asyncio.ensure_future(anext(late))
    for _ in range(3):  # it waits for the start
        await asyncio.sleep(0)
    go_on.set()
    for _ in range(ticks):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    await late.aclose()
    assert answer.is_closed


async def test_late_error_is_raised_without_stream(slow: SlowBench) -> None:
    asking = asyncio.create_task(slow.ask())
    await slow.waiting.wait()
    slow.go_on.set_exception(UpstreamError("Nobody is there."))
    with pytest.raises(UpstreamError, match="Nobody is there"):
        await asking


async def test_client_disconnect_before_model_starts_stops_model() -> None:
    harness = SlowBench(patience=60)
    await harness.engine.start()
    asking = asyncio.create_task(harness.ask(stream=True))
    await harness.waiting.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert harness.go_on.cancelled()
    await harness.engine.close()


CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"Hello."}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ANSWER = stream_of(CHUNK, END)


@contextlib.asynccontextmanager
async def bridge(*replies: Reply, names: tuple[str, ...] = ("up",), **policy: Any) -> AsyncIterator[Engine]:
    """Start an engine over a scripted upstream, which several backends may share."""
    async with serve(replies) as upstream:
        options = {"base_url": upstream.url, "models": ["m"], "stream_retries": 0, "request_retries": 0}
        engine = Engine(
            backends={name: create(name, options, Path()) for name in names},
            store=MemoryStore(),
            policy=Policy(**policy),
            sealer=Sealer([bytes(32)]),
        )
        await engine.start()
        yield engine
        await engine.close()


async def stream(engine: Engine, model: str = "m") -> Any:
    request = codec.decode_request(codec.encode({"model": model, "input": "hi", "stream": True})).body
    return await engine.create(request, project="p")


async def read_types(run: Any) -> list[str]:
    return [event.type async for batch in run.events() for event in batch]


async def test_known_upstream_that_accepts_begins_stream_before_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_delta, "KNOWN_UPSTREAM_SECONDS", 60)
    go_on = asyncio.Event()
    async with bridge(ANSWER, stream_of(b": accepted\n\n", go_on, CHUNK, END), first_delta_seconds=60) as engine:
        await read_types(await stream(engine))
        run = await stream(engine)
        emitted = run.events()
        assert [event.type for event in await anext(emitted)] == ["response.created", "response.in_progress"]
        assert (run.begun.model, run.begun.served_by) == ("m", "up/m")
        go_on.set()
        assert [event.type async for batch in emitted for event in batch][-1] == "response.completed"


async def test_known_upstream_that_holds_its_answer_begins_stream_soon() -> None:
    async with bridge(ANSWER, Reply(raw=STALL), first_delta_seconds=60) as engine:
        await read_types(await stream(engine))
        run = await stream(engine)
        emitted = run.events()
        assert [event.type for event in await anext(emitted)] == ["response.created", "response.in_progress"]
        await emitted.aclose()


async def test_refusal_of_known_upstream_is_raised_before_stream_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_delta, "KNOWN_UPSTREAM_SECONDS", 60)
    refusal = json_of({"error": {"message": "Slow down.", "type": "rate_limit_error"}}, 429)
    async with bridge(ANSWER, refusal, first_delta_seconds=60) as engine:
        await read_types(await stream(engine))
        with pytest.raises(RateLimited, match="Slow down"):
            await stream(engine)


async def test_first_stream_waits_for_first_token_of_upstream() -> None:
    go_on = asyncio.Event()
    failing = stream_of(b": accepted\n\n", go_on, b'data: {"error":{"message":"Out of memory."}}\n\n')
    async with bridge(failing, first_delta_seconds=60) as engine:
        asking = asyncio.create_task(stream(engine))
        go_on.set()
        with pytest.raises(UpstreamError, match="Out of memory"):
            await asking


async def test_upstream_that_accepts_and_fails_stays_unknown() -> None:
    failing = stream_of(b'data: {"error":{"message":"Out of memory."}}\n\n')
    async with bridge(failing, failing, first_delta_seconds=60) as engine:
        for _ in range(2):
            with pytest.raises(UpstreamError, match="Out of memory"):
                await stream(engine)


async def test_early_stream_names_no_backend_if_another_may_answer() -> None:
    go_on = asyncio.Event()
    slow = stream_of(b": accepted\n\n", go_on, CHUNK, END)
    async with bridge(ANSWER, slow, names=("a", "b"), models={"x": ["a/m", "b/m"]}, first_delta_seconds=60) as engine:
        await read_types(await stream(engine, "x"))
        run = await stream(engine, "x")
        assert run.begun.served_by is None
        go_on.set()
        await read_types(run)
        assert run.response.served_by == "a/m"


async def test_error_right_after_the_head_is_raised_before_stream_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_delta, "KNOWN_UPSTREAM_SECONDS", 60)
    error = b'data: {"error":{"message":"Out of memory."}}\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    async with bridge(ANSWER, Reply(raw=head + error), first_delta_seconds=60) as engine:
        await read_types(await stream(engine))
        with pytest.raises(UpstreamError, match="Out of memory"):
            await stream(engine)


async def test_error_after_stream_has_begun_fails_the_response() -> None:
    go_on = asyncio.Event()
    failing = stream_of(b": accepted\n\n", go_on, b'data: {"error":{"message":"Out of memory."}}\n\n')
    async with bridge(ANSWER, failing, first_delta_seconds=60) as engine:
        await read_types(await stream(engine))
        run = await stream(engine)
        go_on.set()
        assert (await read_types(run))[2:] == ["error", "response.failed"]
        assert (await engine.retrieve("p", run.response.id)).status == "failed"


async def test_shutdown_after_stream_has_begun_ends_it_with_a_failure() -> None:
    async with bridge(ANSWER, stream_of(b": accepted\n\n", STALL), first_delta_seconds=60) as engine:
        await read_types(await stream(engine))
        run = await stream(engine)
        engine.stop_runs()
        assert (await read_types(run))[2:] == ["error", "response.failed"]
        assert run.response.error.code == "server_shutdown"
