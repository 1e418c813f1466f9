"""Runs: the events of a stream, with and without errors."""

import asyncio
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
from support.engine_harness import Bench, judge

UNEXPECTED = "The server had an internal error. See the server's log."


def script(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"default": list(steps)}


async def stream(bench: Bench) -> list[Event | Unknown]:
    run = await bench.ask()
    return [event async for batch in run.events() for event in batch]


async def test_response_is_stored_before_terminal_event(bench: Bench) -> None:
    run = await bench.ask()
    async for batch in run.events():
        if isinstance(batch[-1], events.Completed):
            assert await bench.engine.retrieve("default", run.response.id) == batch[-1].response


async def test_deltas_without_events_yield_no_batch(make_bench: Any) -> None:
    bench = await make_bench(
        script({"text": ["", "a"]}, {"usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}})
    )
    run = await bench.ask()
    assert all([batch async for batch in run.events()])


async def test_error_before_first_delta_is_raised(make_bench: Any) -> None:
    bench = await make_bench(
        script({"raise": {"message": "too long", "status": 400, "code": "context_length_exceeded"}})
    )
    with pytest.raises(AntiphonError, match="too long") as caught:
        await bench.ask()
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
async def test_any_error_midway_stores_failed_response(make_bench: Any, steps: list[dict[str, Any]], code: str) -> None:
    bench = await make_bench(script({"text": ["Hel"]}, *steps))
    emitted = await stream(bench)
    assert [event.type for event in emitted[-2:]] == ["error", "response.failed"]
    response = judge(emitted)
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", code)
    assert response.output == [Message("assistant", [OutputText("Hel")], response.output[0].id, "incomplete")]
    assert await bench.engine.retrieve("default", response.id) == response


async def test_unexpected_exception_reveals_no_internals(make_bench: Any) -> None:
    bench = await make_bench(script({"text": ["a"]}, {"crash": "secret detail"}))
    assert all(b"secret" not in repr(event).encode() for event in await stream(bench))


async def test_closing_stream_stops_model_and_stores_cancelled_response(make_bench: Any) -> None:
    bench = await make_bench(script({"text": ["so far"]}, {"wait": "gate"}, {"text": [" and on"]}))
    run = await bench.ask()
    generator = run.events()
    async for batch in generator:
        if isinstance(batch[-1], events.OutputTextDelta):
            break
    await generator.aclose()
    assert bench.backend.cancelled == 1
    stored = await bench.engine.retrieve("default", run.response.id)
    assert stored.status == "cancelled"
    assert stored.output == [Message("assistant", [OutputText("so far")], stored.output[0].id, "incomplete")]


async def test_cancelling_reader_stores_cancelled_response(make_bench: Any) -> None:
    bench = await make_bench(script({"text": ["so far"]}, {"wait": "gate"}))
    run = await bench.ask()
    reader = asyncio.create_task(run.drain())
    await bench.backend.reached("gate")
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert (await bench.engine.retrieve("default", run.response.id)).status == "cancelled"


async def test_stop_ends_running_responses_with_terminal_event(make_bench: Any) -> None:
    bench = await make_bench(script({"text": ["a"]}, {"wait": "gate"}))
    readers = [asyncio.create_task(stream(bench)) for _ in range(3)]
    for _ in readers:
        await bench.backend.reached("gate")
    bench.engine.stop_runs()
    for emitted in await asyncio.gather(*readers):
        response = judge(emitted)
        assert response.error is not None
        assert (response.status, response.error.code) == ("failed", "server_shutdown")


async def test_stop_during_slow_read_ends_at_next_delta(make_bench: Any) -> None:
    bench = await make_bench(script({"text": ["a", "b", "c"]}))
    run = await bench.ask()
    emitted: list[Event | Unknown] = []
    async for batch in run.events():
        emitted += batch
        bench.engine.stop_runs()
    assert judge(emitted).status == "failed"


class FullDisk(MemoryStore):
    async def save(self, project: str, stored: StoredResponse, **options: Any) -> None:
        raise ServerError("The store failed: disk is full")


async def test_response_that_cannot_be_stored_fails(make_bench: Any) -> None:
    bench = await make_bench(store=FullDisk())
    emitted = await stream(bench)
    response = judge(emitted)
    assert response.error is not None
    assert (response.status, response.error.message) == ("failed", "The response could not be stored.")
    with pytest.raises(NotFound):
        await bench.engine.retrieve("default", response.id)


async def test_unstored_response_does_not_fail_on_full_disk(make_bench: Any) -> None:
    bench = await make_bench(store=FullDisk())
    assert (await bench.answer(store=False)).status == "completed"


async def test_token_limit_ends_as_incomplete(make_bench: Any) -> None:
    bench = await make_bench(script({"text": ["a"]}, {"finish": "length"}))
    response = await bench.answer()
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_backend_error_on_close_does_not_block_end(make_bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def say() -> Any:
        try:
            yield [Text("so far")]
            await asyncio.get_running_loop().create_future()
        finally:
            raise RuntimeError("no way out")

    async def stream_badly(turn: Any) -> Any:
        return say()

    bench = await make_bench()
    monkeypatch.setattr(bench.backend, "stream", stream_badly)
    run = await bench.ask()
    batches = run.events()
    for _ in range(2):
        await anext(batches)
    with pytest.raises(RuntimeError, match="no way out"):
        await batches.aclose()
    stored = await bench.engine.retrieve("default", run.response.id)
    assert (stored.status, stored.output_text) == ("cancelled", "so far")


async def say_nonsense(turn: Any) -> Any:
    async def say() -> Any:
        yield [Text("so far"), ToolCall(0, 5, "f", "call_1")]  # type: ignore[arg-type]
        yield [Finish()]

    return say()


async def test_item_that_cannot_be_closed_stores_failed_response(
    make_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await make_bench()
    monkeypatch.setattr(bench.backend, "stream", say_nonsense)
    emitted = await stream(bench)
    response = fold(emitted)
    assert [event.sequence_number for event in emitted if not isinstance(event, Unknown)] == list(range(len(emitted)))
    assert [event.type for event in emitted[-2:]] == ["error", "response.failed"]
    assert (response.status, response.error) == (
        "failed",
        ResponseError("server_error", UNEXPECTED, type="server_error"),
    )
    message, call = response.output
    assert (message, call) == (
        Message("assistant", [OutputText("so far")], message.id, "completed"),
        FunctionCall("call_1", "f", "", call.id, "incomplete"),
    )
    assert await bench.engine.retrieve("default", response.id) == response


async def test_closing_stream_with_unclosable_item_stores_failed_response(
    make_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await make_bench()
    monkeypatch.setattr(bench.backend, "stream", say_nonsense)
    run = await bench.ask()
    batches = run.events()
    for _ in range(2):
        await anext(batches)
    await batches.aclose()
    stored = await bench.engine.retrieve("default", run.response.id)
    assert (stored.status, stored.output_text) == ("failed", "so far")


async def test_stateless_unclosable_item_is_removed_from_output(
    make_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await make_bench(stateless=True)
    monkeypatch.setattr(bench.backend, "stream", say_nonsense)
    last = (await stream(bench))[-1]
    assert isinstance(last, events.Failed)
    assert (last.response.output, last.response.error) == (
        [],
        ResponseError("server_error", UNEXPECTED, type="server_error"),
    )


async def test_cancel_does_not_wait_for_stalled_reader(make_bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.engine.respond.run.READER_TIMEOUT_SECONDS", 0.0)
    bench = await make_bench(script({"text": ["a", "b"]}))
    run = await bench.ask()
    stuck = asyncio.Event()

    async def read() -> None:
        async with aclosing(run.events()) as batches:
            async for _ in batches:
                stuck.set()
                await asyncio.Event().wait()

    reader = asyncio.create_task(read())
    await stuck.wait()
    cancelled = await bench.engine.cancel("default", run.response.id)
    assert (cancelled.status, await bench.engine.retrieve("default", cancelled.id)) == ("cancelled", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await reader
