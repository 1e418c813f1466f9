"""A turn that is slow to begin: streams begin without it, and nobody is left behind."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.engine.policy import Policy
from antiphon.errors import UpstreamError
from antiphon.protocol import events
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.fold import fold
from support.engine_harness import Bench

SCRIPT: dict[str, Any] = {"default": "Hello."}


class SlowBench(Bench):
    """Its model begins only when it is told to, or fails to."""

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
    bench = SlowBench(patience=0)
    await bench.engine.start()
    yield bench
    await bench.engine.close()


async def test_a_stream_begins_before_its_model_does_and_says_later_who_served_it(slow: SlowBench) -> None:
    run = await slow.ask(stream=True)
    told = run.events()
    stream = list(await anext(told))
    assert [event.type for event in stream] == ["response.created", "response.in_progress"]
    slow.go_on.set_result(None)
    stream += [event async for batch in told for event in batch]
    response = fold(stream)
    assert (response.status, response.output_text, response.served_by) == ("completed", "Hello.", "test/scripted")


async def test_a_stream_whose_model_cannot_begin_fails_with_the_reason(slow: SlowBench) -> None:
    run = await slow.ask(stream=True)
    slow.go_on.set_exception(UpstreamError("Nobody is there."))
    stream = [event async for batch in run.events() for event in batch]
    assert [event.type for event in stream][2:] == ["error", "response.failed"]
    error = stream[2]
    assert isinstance(error, events.Error)
    assert (error.error.code, error.error.message) == ("upstream_error", "Nobody is there.")


async def test_a_stream_that_is_left_before_its_model_begins_stops_the_model(slow: SlowBench) -> None:
    run = await slow.ask(stream=True)
    told = run.events()
    await anext(told)
    await slow.waiting.wait()
    await told.aclose()
    assert slow.go_on.cancelled()


async def test_a_stream_that_is_cancelled_before_its_model_begins_ends_as_cancelled(slow: SlowBench) -> None:
    run = await slow.ask(stream=True)

    async def read() -> list[Any]:
        return [event async for batch in run.events() for event in batch]

    reading = asyncio.create_task(read())
    await slow.waiting.wait()
    cancelled = await slow.engine.cancel("default", run.response.id)
    assert cancelled.status == "cancelled"
    assert (await reading)[-1].type == "response.incomplete"
    assert slow.go_on.cancelled()


async def test_without_a_stream_an_error_is_raised_however_late(slow: SlowBench) -> None:
    asking = asyncio.create_task(slow.ask())
    await slow.waiting.wait()
    slow.go_on.set_exception(UpstreamError("Nobody is there."))
    with pytest.raises(UpstreamError, match="Nobody is there"):
        await asking


async def test_a_client_that_leaves_while_the_model_has_not_begun_stops_it() -> None:
    bench = SlowBench(patience=60)
    await bench.engine.start()
    asking = asyncio.create_task(bench.ask(stream=True))
    await bench.waiting.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert bench.go_on.cancelled()
    await bench.engine.close()
