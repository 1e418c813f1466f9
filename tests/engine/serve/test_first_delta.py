"""Models that are slow to start: the stream begins without them, and no model is left running."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.engine.policy import Policy
from antiphon.errors import UpstreamError
from antiphon.protocol import events
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.fold import fold
from support.engine_harness import EngineHarness

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
