"""Background responses: queued, run, followed, cancelled, taken over."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.respond.run import Run
from antiphon.errors import InvalidRequest, NotFound, Unavailable
from antiphon.protocol import codec
from antiphon.protocol.content import OutputText
from antiphon.protocol.events import Event
from antiphon.protocol.items import Message
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import StoredResponse
from antiphon.store.sqlite.store import SqliteStore
from antiphon.stream.deltas import Finish, Text, ToolCall
from antiphon.stream.fold import fold
from support.engine_harness import Bench, judge

SLOW = {"default": [{"text": ["so", " far"]}, {"wait": "gate"}, {"text": [" and", " on"]}]}


async def follow(bench: Bench, response_id: str, after: int = -1) -> list[Event | Unknown]:
    batches = await bench.engine.follow("default", response_id, after=after)
    return [codec.decode_event(event.raw) for batch in await collect(batches) for event in batch]


async def collect(batches: Any) -> list[Any]:
    return [batch async for batch in batches]


async def finished(bench: Bench, response_id: str) -> Response:
    """Return the finished response after checking its stream."""
    emitted = await follow(bench, response_id)
    response = judge(emitted)
    assert await bench.engine.retrieve("default", response_id) == response
    return response


async def test_background_response_is_queued_and_runs_without_client(make_bench: Any) -> None:
    bench = await make_bench(SLOW)
    run = await bench.ask(background=True)
    queued = await run.drain()
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    await bench.backend.reached("gate")
    assert (await bench.engine.retrieve("default", queued.id)).status == "in_progress"
    bench.backend.release("gate")
    done = await finished(bench, queued.id)
    assert (done.status, done.output_text) == ("completed", "so far and on")


async def test_stream_begins_with_queued_event(bench: Bench) -> None:
    run = await bench.ask(background=True)
    emitted = await follow(bench, run.response.id)
    assert [event.type for event in emitted[:3]] == ["response.created", "response.queued", "response.in_progress"]


async def test_closing_stream_does_not_stop_run(make_bench: Any) -> None:
    bench = await make_bench(SLOW)
    run = await bench.ask(background=True)
    stream = run.events()
    await anext(stream)
    await stream.aclose()
    await bench.backend.reached("gate")
    bench.backend.release("gate")
    assert (await finished(bench, run.response.id)).output_text == "so far and on"


async def test_reader_resumes_from_any_number_and_follows_live(make_bench: Any) -> None:
    bench = await make_bench(SLOW)
    run = await bench.ask(background=True)
    live = asyncio.create_task(follow(bench, run.response.id))
    await bench.backend.reached("gate")
    bench.backend.release("gate")
    whole = await live
    for cut in range(-1, len(whole)):
        assert await follow(bench, run.response.id, cut) == whole[cut + 1 :]


async def test_cancel_ends_run_with_partial_output_and_is_repeatable(make_bench: Any) -> None:
    bench = await make_bench(SLOW)
    run = await bench.ask(background=True)
    reader = asyncio.create_task(follow(bench, run.response.id))
    await bench.backend.reached("gate")
    cancelled = await bench.engine.cancel("default", run.response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output == [Message("assistant", [OutputText("so far")], cancelled.output[0].id, "incomplete")]
    assert judge(await reader) == cancelled
    assert await bench.engine.cancel("default", run.response.id) == cancelled
    assert bench.backend.cancelled == 1


async def test_cancel_leaves_finished_response_unchanged(bench: Bench) -> None:
    response = await bench.answer()
    assert await bench.engine.cancel("default", response.id) == response
    with pytest.raises(NotFound):
        await bench.engine.cancel("other", response.id)


async def test_foreground_stream_can_be_cancelled(make_bench: Any) -> None:
    bench = await make_bench(SLOW)
    run = await bench.ask()
    assert isinstance(run, Run)
    reader = asyncio.create_task(collect(run.events()))
    await bench.backend.reached("gate")
    cancelled = await bench.engine.cancel("default", run.response.id)
    emitted = [event for batch in await reader for event in batch]
    assert judge(emitted) == cancelled
    assert (cancelled.status, await bench.engine.retrieve("default", cancelled.id)) == ("cancelled", cancelled)


async def test_stream_of_foreground_response_cannot_be_resumed(bench: Bench) -> None:
    response = await bench.answer()
    with pytest.raises(InvalidRequest) as caught:
        await bench.engine.follow("default", response.id, after=-1)
    assert caught.value.param == "stream"


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ([{"raise": {"message": "no", "status": 400, "code": "context_length_exceeded"}}], "context_length_exceeded"),
        ([{"text": ["a"]}, {"crash": "a bug"}], "server_error"),
        ([{"text": ["a"]}, {"finish": None}], "model_error"),
    ],
)
async def test_any_error_ends_run_as_failed(make_bench: Any, steps: list[dict[str, Any]], code: str) -> None:
    bench = await make_bench({"default": steps})
    run = await bench.ask(background=True)
    response = await finished(bench, run.response.id)
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", code)


async def test_illegal_deltas_are_not_retried(make_bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    async def say() -> Any:
        yield [Text("so far"), ToolCall(0, 5, "f")]  # type: ignore[arg-type]
        yield [Finish()]

    async def say_nonsense(turn: Any) -> Any:
        turns.append(turn)
        return say()

    bench = await make_bench()
    monkeypatch.setattr(bench.backend, "stream", say_nonsense)
    emitted = await follow(bench, (await bench.ask(background=True)).response.id)
    response = fold(emitted)
    assert (len(turns), response.status, response.output_text) == (1, "failed", "so far")
    assert await bench.engine.retrieve("default", response.id) == response


async def test_chain_continues_from_background_response(make_bench: Any) -> None:
    bench = await make_bench({"default": "{history} items"})
    first = await finished(bench, (await bench.ask(background=True)).response.id)
    assert (await bench.answer(previous_response_id=first.id)).output_text == "3 items"


async def test_conversation_gets_items_when_run_ends(bench: Bench) -> None:
    conversation = await bench.engine.conversations.create("default", [], None)
    run = await bench.ask("hello", background=True, conversation=conversation.id)
    await finished(bench, run.response.id)
    page = await bench.engine.conversations.list_items("default", conversation.id, after=None, limit=9, order="asc")
    assert [item.type for item in page.data] == ["message", "message"]


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("repeats", [True, False])
async def test_run_of_dead_process_is_taken_over(make_bench: Any, tmp_path: Path, watched: bool, repeats: bool) -> None:
    """A run with a reader continues if the model repeats its answer, and fails otherwise."""
    path = tmp_path / "store.db"
    first = await make_bench(SLOW, store=SqliteStore(path))
    run = await first.ask(background=True)
    await first.backend.reached("gate")
    shown: list[Any] = []
    if watched:
        reader = await first.engine.follow("default", run.response.id, after=-1)
        while not shown or b"far" not in shown[-1].raw:
            shown += await anext(reader)
        await reader.aclose()
    await first.engine.close()
    again = "so far" if repeats else "not so"
    script = {"default": [{"wait": "gate"}, {"text": [again, " and on"]}]}
    second = await make_bench(script, store=SqliteStore(path))
    await second.backend.reached("gate")
    second.backend.release("gate")
    emitted = await follow(second, run.response.id)
    response = judge(emitted)
    assert [codec.encode(event) for event in emitted[: len(shown)]] == [event.raw for event in shown]
    if watched and not repeats:
        assert response.error is not None
        assert (response.status, response.error.code) == ("failed", "interrupted")
    else:
        assert (response.status, response.output_text) == ("completed", f"{again} and on")


async def test_close_releases_runs_unchanged(make_bench: Any, tmp_path: Path) -> None:
    bench = await make_bench(SLOW, store=SqliteStore(tmp_path / "store.db"))
    run = await bench.ask(background=True)
    await bench.backend.reached("gate")
    await bench.engine.close()
    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    (returned,) = await store.claim("another", as_of=0, lease=1, limit=9)
    await store.close()
    assert (returned.response_id, returned.attempt, returned.cancelled) == (run.response.id, 2, False)


async def test_stop_ends_readers_and_leaves_run_untouched(make_bench: Any) -> None:
    bench = await make_bench(SLOW)
    run = await bench.ask(background=True)
    await bench.backend.reached("gate")
    reader = asyncio.create_task(follow(bench, run.response.id))
    bench.engine.stop_runs()
    with pytest.raises(Unavailable):
        await reader
    assert (await bench.engine.retrieve("default", run.response.id)).status == "in_progress"


async def test_run_that_cannot_begin_fails_after_shown_events(make_bench: Any) -> None:
    bench = await make_bench(background_lease_seconds=0.1)
    queued = Response(id="resp_1", created_at=1, model="scripted", status="queued", background=True)
    await bench.store.enqueue("default", StoredResponse(response=queued, input=[]), b"not a request")
    emitted = await follow(bench, "resp_1")
    assert [event.type for event in emitted] == ["response.created", "response.queued", "error", "response.failed"]
    assert (await bench.engine.retrieve("default", "resp_1")) == judge(emitted)
