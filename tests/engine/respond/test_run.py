"""Runs: the events of a stream, with and without errors."""

import asyncio
import gc
import weakref
from contextlib import aclosing
from typing import Any

import pytest

from antiphon.errors import AntiphonError, NotFound, ServerError
from antiphon.protocol import events
from antiphon.protocol.content import OutputText
from antiphon.protocol.events import Event
from antiphon.protocol.items import FunctionCall, Message
from antiphon.protocol.response import ResponseError
from antiphon.protocol.unions import Unknown
from antiphon.store.base import StoredResponse
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.deltas import Finish, Text, ToolCall
from antiphon.stream.fold import fold
from support.engine_harness import EngineHarness, judge

UNEXPECTED = "The server had an internal error. See the server's log."


def script(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"default": list(steps)}


async def stream(harness: EngineHarness) -> list[Event | Unknown]:
    run = await harness.ask()
    return [event async for batch in run.events() for event in batch]


async def test_response_is_stored_before_terminal_event(harness: EngineHarness) -> None:
    run = await harness.ask()
    async for batch in run.events():
        if isinstance(batch[-1], events.Completed):
            assert await harness.engine.retrieve("default", run.response.id) == batch[-1].response


async def test_deltas_without_events_yield_no_batch(make_harness: Any) -> None:
    harness = await make_harness(
        script({"text": ["", "a"]}, {"usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}})
    )
    run = await harness.ask()
    assert all([batch async for batch in run.events()])


async def test_error_before_first_delta_is_raised(make_harness: Any) -> None:
    harness = await make_harness(
        script({"raise": {"message": "too long", "status": 400, "code": "context_length_exceeded"}})
    )
    with pytest.raises(AntiphonError, match="too long") as caught:
        await harness.ask()
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ([{"failure": {"message": "overloaded", "code": "rate_limit_exceeded"}}], "rate_limit_exceeded"),
        ([{"raise": {"message": "reset", "code": "upstream_reset"}}], "upstream_reset"),
        ([{"crash": "a bug"}], "server_error"),
        ([{"finish": None}], "model_error"),
    ],
)
async def test_any_error_midway_stores_failed_response(
    make_harness: Any, steps: list[dict[str, Any]], code: str
) -> None:
    harness = await make_harness(script({"text": ["Hel"]}, *steps))
    emitted = await stream(harness)
    assert [event.type for event in emitted[-2:]] == ["error", "response.failed"]
    response = judge(emitted)
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", code)
    assert response.output == [Message("assistant", [OutputText("Hel", [], [])], response.output[0].id, "incomplete")]
    assert await harness.engine.retrieve("default", response.id) == response


async def test_unexpected_exception_reveals_no_internals(make_harness: Any) -> None:
    harness = await make_harness(script({"text": ["a"]}, {"crash": "secret detail"}))
    assert all(b"secret" not in repr(event).encode() for event in await stream(harness))


async def test_closing_stream_stops_model_and_stores_cancelled_response(make_harness: Any) -> None:
    harness = await make_harness(script({"text": ["so far"]}, {"wait": "gate"}, {"text": [" and on"]}))
    run = await harness.ask()
    generator = run.events()
    async for batch in generator:
        if isinstance(batch[-1], events.OutputTextDelta):
            break
    await generator.aclose()
    assert harness.backend.cancelled == 1
    stored = await harness.engine.retrieve("default", run.response.id)
    assert stored.status == "cancelled"
    assert stored.output == [Message("assistant", [OutputText("so far", [], [])], stored.output[0].id, "incomplete")]


async def test_cancelling_reader_stores_cancelled_response(make_harness: Any) -> None:
    harness = await make_harness(script({"text": ["so far"]}, {"wait": "gate"}))
    run = await harness.ask()
    reader = asyncio.create_task(run.drain())
    await harness.backend.reached("gate")
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert (await harness.engine.retrieve("default", run.response.id)).status == "cancelled"


async def test_stop_ends_running_responses_with_terminal_event(make_harness: Any) -> None:
    harness = await make_harness(script({"text": ["a"]}, {"wait": "gate"}))
    readers = [asyncio.create_task(stream(harness)) for _ in range(3)]
    for _ in readers:
        await harness.backend.reached("gate")
    harness.engine.stop_runs()
    for emitted in await asyncio.gather(*readers):
        response = judge(emitted)
        assert response.error is not None
        assert (response.status, response.error.code) == ("failed", "server_shutdown")


async def test_stop_during_slow_read_ends_at_next_delta(make_harness: Any) -> None:
    harness = await make_harness(script({"text": ["a", "b", "c"]}))
    run = await harness.ask()
    emitted: list[Event | Unknown] = []
    async for batch in run.events():
        emitted += batch
        harness.engine.stop_runs()
    assert judge(emitted).status == "failed"


class FullDisk(MemoryStore):
    async def save(self, project: str, stored: StoredResponse, **options: Any) -> None:
        raise ServerError("The store failed: disk is full")


async def test_response_that_cannot_be_stored_fails(make_harness: Any) -> None:
    harness = await make_harness(store=FullDisk())
    emitted = await stream(harness)
    response = judge(emitted)
    assert response.error is not None
    assert (response.status, response.error.message) == ("failed", "The response could not be stored.")
    with pytest.raises(NotFound):
        await harness.engine.retrieve("default", response.id)


async def test_unstored_response_does_not_fail_on_full_disk(make_harness: Any) -> None:
    harness = await make_harness(store=FullDisk())
    assert (await harness.answer(store=False)).status == "completed"


async def test_token_limit_ends_as_incomplete(make_harness: Any) -> None:
    harness = await make_harness(script({"text": ["a"]}, {"finish": "length"}))
    response = await harness.answer()
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_backend_error_on_close_does_not_block_end(make_harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def say() -> Any:
        try:
            yield [Text("so far")]
            await asyncio.get_running_loop().create_future()
        finally:
            raise RuntimeError("no way out")

    async def stream_badly(turn: Any) -> Any:
        return say()

    harness = await make_harness()
    monkeypatch.setattr(harness.backend, "stream", stream_badly)
    run = await harness.ask()
    batches = run.events()
    for _ in range(2):
        await anext(batches)
    with pytest.raises(RuntimeError, match="no way out"):
        await batches.aclose()
    stored = await harness.engine.retrieve("default", run.response.id)
    assert (stored.status, stored.output_text) == ("cancelled", "so far")


async def say_nonsense(turn: Any) -> Any:
    async def say() -> Any:
        yield [Text("so far"), ToolCall(0, 5, "f", "call_1")]  # type: ignore[arg-type]
        yield [Finish()]

    return say()


async def test_item_that_cannot_be_closed_stores_failed_response(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await make_harness()
    monkeypatch.setattr(harness.backend, "stream", say_nonsense)
    emitted = await stream(harness)
    response = fold(emitted)
    assert [event.sequence_number for event in emitted if not isinstance(event, Unknown)] == list(range(len(emitted)))
    assert [event.type for event in emitted[-2:]] == ["error", "response.failed"]
    assert (response.status, response.error) == (
        "failed",
        ResponseError("server_error", UNEXPECTED, type="server_error"),
    )
    message, call = response.output
    assert (message, call) == (
        Message("assistant", [OutputText("so far", [], [])], message.id, "completed"),
        FunctionCall("call_1", "f", "", call.id, "incomplete"),
    )
    assert await harness.engine.retrieve("default", response.id) == response


async def test_closing_stream_with_unclosable_item_stores_failed_response(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await make_harness()
    monkeypatch.setattr(harness.backend, "stream", say_nonsense)
    run = await harness.ask()
    batches = run.events()
    for _ in range(2):
        await anext(batches)
    await batches.aclose()
    stored = await harness.engine.retrieve("default", run.response.id)
    assert (stored.status, stored.output_text) == ("failed", "so far")


async def test_stateless_unclosable_item_is_removed_from_output(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await make_harness(stateless=True)
    monkeypatch.setattr(harness.backend, "stream", say_nonsense)
    last = (await stream(harness))[-1]
    assert isinstance(last, events.Failed)
    assert (last.response.output, last.response.error) == (
        [],
        ResponseError("server_error", UNEXPECTED, type="server_error"),
    )


async def test_cancel_does_not_wait_for_stalled_reader(make_harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.engine.respond.run.READER_TIMEOUT_SECONDS", 0.0)
    harness = await make_harness(script({"text": ["a", "b"]}))
    run = await harness.ask()
    stuck = asyncio.Event()

    async def read() -> None:
        async with aclosing(run.events()) as batches:
            async for _ in batches:
                stuck.set()
                await asyncio.Event().wait()

    reader = asyncio.create_task(read())
    await stuck.wait()
    cancelled = await harness.engine.cancel("default", run.response.id)
    assert (cancelled.status, await harness.engine.retrieve("default", cancelled.id)) == ("cancelled", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await reader


@pytest.mark.parametrize("stream", [False, True])
async def test_ended_run_is_freed_without_garbage_collection(harness: EngineHarness, stream: bool) -> None:
    run = await harness.ask(stream=stream)
    if stream:
        async for _ in run.events():
            pass
    else:
        await run.drain()
    ended = weakref.ref(run)
    gc.disable()
    try:
        del run
        assert ended() is None
    finally:
        gc.enable()
