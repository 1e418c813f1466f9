"""Background responses that DBOS hands out, within its limits."""

import asyncio
import logging
from typing import Any

import pytest
from dbos import DBOS

from antiphon.backends.base import Deltas, Turn
from antiphon.backends.scripted import ScriptedBackend
from antiphon.engine.workflows import worker
from antiphon.errors import ConfigError, ModelNotFound, ServerError
from antiphon.protocol import codec
from antiphon.store.base import ClaimedRun
from engine_bench import judge
from workflow_bench import DONE, SLOW, Start, ask, finish, wait_for_status

# DBOS has made it, and ended before it began.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*coroutine object execute_dequeued_workflow:pytest.PytestUnraisableExceptionWarning"
)


async def test_a_response_is_a_workflow_that_ends_with_it(start: Start) -> None:
    bench = await start(SLOW)
    response_id = await ask(bench)
    await bench.backend.reached("gate")
    await wait_for_status(response_id, "PENDING")
    bench.backend.release("gate")
    assert await finish(bench, response_id) == DONE
    await wait_for_status(response_id, "SUCCESS")


async def test_no_more_are_worked_on_at_once_than_all_processes_may(start: Start) -> None:
    bench = await start(SLOW, concurrency=1)
    first, second = await ask(bench), await ask(bench)
    await bench.backend.reached("gate")
    bench.backend.release("gate")
    assert await finish(bench, first) == DONE
    await bench.backend.reached("gate")
    bench.backend.release("gate")
    assert await finish(bench, second) == DONE


async def test_a_project_does_not_keep_the_others_waiting(start: Start) -> None:
    bench = await start(SLOW, concurrency_per_project=1)
    first, second, other = await ask(bench), await ask(bench), await ask(bench, project="other")
    await bench.backend.reached("gate")
    await bench.backend.reached("gate")
    statuses = [(await bench.engine.retrieve("default", each)).status for each in (first, second)]
    statuses.append((await bench.engine.retrieve("other", other)).status)
    assert statuses == ["in_progress", "queued", "in_progress"]
    for _ in range(3):
        bench.backend.release("gate")
    ended = [await finish(bench, first), await finish(bench, second), await finish(bench, other, "other")]
    assert ended == [DONE] * 3


async def test_no_more_begin_in_a_minute_than_may(start: Start) -> None:
    bench = await start({}, starts_per_minute=2)
    first, second, third = await ask(bench), await ask(bench), await ask(bench)
    assert [status for status, _ in (await finish(bench, first), await finish(bench, second))] == ["completed"] * 2
    assert (await bench.engine.retrieve("default", third)).status == "queued"
    await wait_for_status(third, "ENQUEUED")


async def test_a_waiting_response_is_cancelled_without_waiting_for_its_turn(start: Start) -> None:
    bench = await start(SLOW, concurrency=1)
    first = await ask(bench)
    await bench.backend.reached("gate")
    second = await ask(bench)
    assert (await bench.engine.cancel("default", second)).status == "cancelled"
    bench.backend.release("gate")
    assert await finish(bench, first) == DONE


async def test_a_store_that_fails_for_a_moment_does_not_lose_a_run(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await start({})
    claim_one, failures = bench.store.claim_one, [ServerError("The store failed.")]

    async def claim_late(*args: Any, **options: Any) -> ClaimedRun | None:
        if failures:
            raise failures.pop()
        return await claim_one(*args, **options)

    monkeypatch.setattr(bench.store, "claim_one", claim_late)
    with caplog.at_level(logging.ERROR):
        assert (await finish(bench, await ask(bench)))[0] == "completed"
    assert "a background response cannot be reached" in caplog.messages


async def test_a_run_is_not_given_up_between_its_claim_and_its_beginning(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await start({})
    claim_one, claimed = bench.store.claim_one, []

    async def claim_and_renew(*args: Any, **options: Any) -> ClaimedRun | None:
        run = await claim_one(*args, **options)
        claimed.append(run)
        assert worker._performing is not None
        await worker._performing._renew()
        return run

    monkeypatch.setattr(bench.store, "claim_one", claim_and_renew)
    assert (await finish(bench, await ask(bench)))[0] == "completed"
    assert len(claimed) == 1


async def test_a_run_that_was_claimed_for_nothing_is_free_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when DBOS ends at this moment."""
    bench = await start({})
    claim_one, claimed, gate = bench.store.claim_one, [], asyncio.Event()

    async def claim_late(*args: Any, **options: Any) -> ClaimedRun | None:
        claimed.append(await claim_one(*args, **options))
        if len(claimed) == 1:
            assert worker._performing is not None
            (performance,) = worker._performing._performances
            performance.cancel()
            await gate.wait()
        return claimed[-1]

    monkeypatch.setattr(bench.store, "claim_one", claim_late)
    response_id = await ask(bench)
    put_back = bench.store.put_back
    given: list[str] = []

    async def give(owner: str, project: str, response_id: str, **options: Any) -> None:
        await put_back(owner, project, response_id, **options)
        given.append(response_id)

    monkeypatch.setattr(bench.store, "put_back", give)
    gate.set()
    assert (await finish(bench, response_id))[0] == "completed"
    assert given == [response_id]
    assert [run.interruptions for run in claimed if run is not None] == [0, 0]


async def test_a_model_that_nobody_has_any_more_fails_when_others_have_had_their_time(start: Start) -> None:
    first = await start({"models": ["old"], "default": [{"wait": "gate"}]})
    run = await first.ask(background=True, model="old")
    await first.backend.reached("gate")
    await first.engine.close()
    second = await start({"models": ["new"]})
    batches = await second.engine.follow("default", run.response.id, after=-1)
    response = judge([codec.decode_event(event.raw) async for batch in batches for event in batch])
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", "model_not_found")


async def test_what_its_upstream_does_not_have_is_handed_out_again_when_others_have_had_their_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start({"models": ["alpha"], "default": [{"wait": "gate"}]})
    run = await first.ask(background=True, model="alpha")
    await first.backend.reached("gate")
    await first.engine.close()
    asked: list[str] = []

    async def refuse(_: ScriptedBackend, turn: Turn) -> Deltas:
        asked.append(turn.request.model or "")
        raise ModelNotFound(f"no {turn.request.model}")

    monkeypatch.setattr(ScriptedBackend, "stream", refuse)
    second = await start({"models": ["alpha"]})
    batches = await second.engine.follow("default", run.response.id, after=-1)
    response = judge([codec.decode_event(event.raw) async for batch in batches for event in batch])
    assert response.error is not None
    assert (response.status, response.error.code, asked) == ("failed", "model_not_found", ["alpha", "alpha"])


async def test_no_more_are_worked_on_in_a_process_than_it_has_room_for(start: Start) -> None:
    """Though another one, which has more, has told DBOS of it last."""
    bench = await start(SLOW, slots=1)
    first = await ask(bench)
    await bench.backend.reached("gate")
    queue = await asyncio.to_thread(DBOS.retrieve_queue, "antiphon.responses")
    assert queue is not None
    await queue.set_worker_concurrency_async(9)
    second = await ask(bench)
    await wait_for_status(second, "PENDING")
    assert [(await bench.engine.retrieve("default", each)).status for each in (first, second)] == [
        "in_progress",
        "queued",
    ]
    bench.backend.release("gate")
    await bench.backend.reached("gate")
    bench.backend.release("gate")
    assert [await finish(bench, each) for each in (first, second)] == [DONE, DONE]


async def test_a_second_engine_of_the_process_is_refused_and_a_later_one_is_not(start: Start) -> None:
    first = await start({})
    with pytest.raises(ConfigError, match="dbos: DBOS is one for each process"):
        await start({})
    await first.engine.close()
    assert await asyncio.to_thread(str, 1) == "1"
    second = await start({})
    assert (await finish(second, await ask(second)))[0] == "completed"
