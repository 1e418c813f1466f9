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
from support.engine_harness import EngineHarness, judge

SLOW = {"default": [{"text": ["so", " far"]}, {"wait": "gate"}, {"text": [" and", " on"]}]}


async def follow(harness: EngineHarness, response_id: str, after: int = -1) -> list[Event | Unknown]:
    batches = await harness.engine.follow("default", response_id, after=after)
    return [codec.decode_event(event.raw) for batch in await collect(batches) for event in batch]


async def collect(batches: Any) -> list[Any]:
    return [batch async for batch in batches]


async def finished(harness: EngineHarness, response_id: str) -> Response:
    """Return the finished response after checking its stream."""
    emitted = await follow(harness, response_id)
    response = judge(emitted)
    assert await harness.engine.retrieve("default", response_id) == response
    return response


async def test_background_response_is_queued_and_runs_without_client(make_harness: Any) -> None:
    harness = await make_harness(SLOW)
    run = await harness.ask(background=True)
    queued = await run.drain()
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    await harness.backend.reached("gate")
    assert (await harness.engine.retrieve("default", queued.id)).status == "in_progress"
    harness.backend.release("gate")
    done = await finished(harness, queued.id)
    assert (done.status, done.output_text) == ("completed", "so far and on")


async def test_stream_begins_with_queued_event(harness: EngineHarness) -> None:
    run = await harness.ask(background=True)
    emitted = await follow(harness, run.response.id)
    assert [event.type for event in emitted[:3]] == ["response.created", "response.queued", "response.in_progress"]


async def test_closing_stream_does_not_stop_run(make_harness: Any) -> None:
    harness = await make_harness(SLOW)
    run = await harness.ask(background=True)
    stream = run.events()
    await anext(stream)
    await stream.aclose()
    await harness.backend.reached("gate")
    harness.backend.release("gate")
    assert (await finished(harness, run.response.id)).output_text == "so far and on"


async def test_reader_resumes_from_any_number_and_follows_live(make_harness: Any) -> None:
    harness = await make_harness(SLOW)
    run = await harness.ask(background=True)
    live = asyncio.create_task(follow(harness, run.response.id))
    await harness.backend.reached("gate")
    harness.backend.release("gate")
    whole = await live
    for cut in range(-1, len(whole)):
        assert await follow(harness, run.response.id, cut) == whole[cut + 1 :]


async def test_cancel_ends_run_with_partial_output_and_is_repeatable(make_harness: Any) -> None:
    harness = await make_harness(SLOW)
    run = await harness.ask(background=True)
    reader = asyncio.create_task(follow(harness, run.response.id))
    await harness.backend.reached("gate")
    cancelled = await harness.engine.cancel("default", run.response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output == [
        Message("assistant", [OutputText("so far", [], [])], cancelled.output[0].id, "incomplete")
    ]
    assert judge(await reader) == cancelled
    assert await harness.engine.cancel("default", run.response.id) == cancelled
    assert harness.backend.cancelled == 1


async def test_cancel_leaves_finished_background_response_unchanged(harness: EngineHarness) -> None:
    run = await harness.ask(background=True)
    await collect(run.events())
    response = await harness.engine.retrieve("default", run.response.id)
    assert (response.status, await harness.engine.cancel("default", response.id)) == ("completed", response)
    with pytest.raises(NotFound):
        await harness.engine.cancel("other", response.id)


async def test_cancel_refuses_finished_foreground_response(harness: EngineHarness) -> None:
    response = await harness.answer()
    with pytest.raises(InvalidRequest, match=r"^Cannot cancel a synchronous response\.$"):
        await harness.engine.cancel("default", response.id)
    with pytest.raises(NotFound):
        await harness.engine.cancel("other", response.id)


async def test_foreground_stream_can_be_cancelled(make_harness: Any) -> None:
    harness = await make_harness(SLOW)
    run = await harness.ask()
    assert isinstance(run, Run)
    reader = asyncio.create_task(collect(run.events()))
    await harness.backend.reached("gate")
    cancelled = await harness.engine.cancel("default", run.response.id)
    emitted = [event for batch in await reader for event in batch]
    assert judge(emitted) == cancelled
    assert (cancelled.status, await harness.engine.retrieve("default", cancelled.id)) == ("cancelled", cancelled)
    assert await harness.engine.cancel("default", cancelled.id) == cancelled


async def test_stream_of_foreground_response_cannot_be_resumed(harness: EngineHarness) -> None:
    response = await harness.answer()
    with pytest.raises(InvalidRequest) as caught:
        await harness.engine.follow("default", response.id, after=-1)
    assert caught.value.param == "stream"


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ([{"raise": {"message": "no", "status": 400, "code": "context_length_exceeded"}}], "context_length_exceeded"),
        ([{"text": ["a"]}, {"crash": "a bug"}], "server_error"),
        ([{"text": ["a"]}, {"finish": None}], "model_error"),
    ],
)
async def test_any_error_ends_run_as_failed(make_harness: Any, steps: list[dict[str, Any]], code: str) -> None:
    harness = await make_harness({"default": steps})
    run = await harness.ask(background=True)
    response = await finished(harness, run.response.id)
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", code)


async def test_illegal_deltas_are_not_retried(make_harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    async def say() -> Any:
        yield [Text("so far"), ToolCall(0, 5, "f")]  # type: ignore[arg-type]
        yield [Finish()]

    async def say_nonsense(turn: Any) -> Any:
        turns.append(turn)
        return say()

    harness = await make_harness()
    monkeypatch.setattr(harness.backend, "stream", say_nonsense)
    emitted = await follow(harness, (await harness.ask(background=True)).response.id)
    response = fold(emitted)
    assert (len(turns), response.status, response.output_text) == (1, "failed", "so far")
    assert await harness.engine.retrieve("default", response.id) == response


async def test_chain_continues_from_background_response(make_harness: Any) -> None:
    harness = await make_harness({"default": "{history} items"})
    first = await finished(harness, (await harness.ask(background=True)).response.id)
    assert (await harness.answer(previous_response_id=first.id)).output_text == "3 items"


async def test_conversation_gets_items_when_run_ends(harness: EngineHarness) -> None:
    conversation = await harness.engine.conversations.create("default", [], None)
    run = await harness.ask("hello", background=True, conversation=conversation.id)
    await finished(harness, run.response.id)
    page = await harness.engine.conversations.list_items("default", conversation.id, after=None, limit=9, order="asc")
    assert [item.type for item in page.data] == ["message", "message"]


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("repeats", [True, False])
async def test_run_of_dead_process_is_taken_over(
    make_harness: Any, tmp_path: Path, watched: bool, repeats: bool
) -> None:
    """A run with a reader continues if the model repeats its answer, and fails otherwise."""
    path = tmp_path / "store.db"
    first = await make_harness(SLOW, store=SqliteStore(path))
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
    second = await make_harness(script, store=SqliteStore(path))
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


async def test_close_releases_runs_unchanged(make_harness: Any, tmp_path: Path) -> None:
    harness = await make_harness(SLOW, store=SqliteStore(tmp_path / "store.db"))
    run = await harness.ask(background=True)
    await harness.backend.reached("gate")
    await harness.engine.close()
    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    (returned,) = await store.claim("another", as_of=0, lease=1, limit=9)
    await store.close()
    assert (returned.response_id, returned.attempt, returned.cancelled) == (run.response.id, 2, False)


async def test_stop_ends_readers_and_leaves_run_untouched(make_harness: Any) -> None:
    harness = await make_harness(SLOW)
    run = await harness.ask(background=True)
    await harness.backend.reached("gate")
    reader = asyncio.create_task(follow(harness, run.response.id))
    harness.engine.stop_runs()
    with pytest.raises(Unavailable):
        await reader
    assert (await harness.engine.retrieve("default", run.response.id)).status == "in_progress"


async def test_run_that_cannot_begin_fails_after_shown_events(make_harness: Any) -> None:
    harness = await make_harness(background_lease_seconds=0.1)
    queued = Response(id="resp_1", created_at=1, model="scripted", status="queued", background=True)
    await harness.store.enqueue("default", StoredResponse(response=queued, input=[]), b"not a request")
    emitted = await follow(harness, "resp_1")
    assert [event.type for event in emitted] == ["response.created", "response.queued", "error", "response.failed"]
    assert (await harness.engine.retrieve("default", "resp_1")) == judge(emitted)
