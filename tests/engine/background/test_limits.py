"""Shared limits on background responses, as clients see them."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.background import worker
from antiphon.errors import RateLimited, Unavailable
from antiphon.protocol import codec
from antiphon.store.base import Store
from antiphon.store.limits import RunLimits
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore
from support.engine_harness import EngineHarness, judge
from support.watched_queue import WatchedQueue

SLOW = {"default": [{"text": ["so", " far"]}, {"wait": "gate"}, {"text": [" and", " on"]}]}
DONE = ("completed", "so far and on")
LONG = 3600.0


@pytest.fixture(params=["memory", "sqlite"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    return MemoryStore if request.param == "memory" else lambda: SqliteStore(tmp_path / "store.db")


async def ask(harness: EngineHarness, project: str = "default") -> str:
    return (await harness.ask(project=project, background=True)).response.id


async def finish(harness: EngineHarness, response_id: str, project: str = "default") -> tuple[str, str]:
    """Return the final status and text of a response."""
    batches = await harness.engine.follow(project, response_id, after=-1)
    response = judge([codec.decode_event(event.raw) async for batch in batches for event in batch])
    return response.status, response.output_text


async def test_next_run_begins_as_soon_as_one_ends(
    make_harness: Any, make_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CHECK_SECONDS", LONG)
    harness = await make_harness(
        SLOW, store=make_store(), background_limits=RunLimits(concurrency=1), background_lease_seconds=LONG
    )
    first, second = await ask(harness), await ask(harness)
    await harness.backend.reached("gate")
    assert [(await harness.engine.retrieve("default", each)).status for each in (first, second)] == [
        "in_progress",
        "queued",
    ]
    harness.backend.release("gate")
    assert await finish(harness, first) == DONE
    await harness.backend.reached("gate")
    harness.backend.release("gate")
    assert await finish(harness, second) == DONE


async def test_full_project_does_not_block_other_projects(make_harness: Any, make_store: Any) -> None:
    harness = await make_harness(SLOW, store=make_store(), background_limits=RunLimits(concurrency_per_project=1))
    first, second, other = await ask(harness), await ask(harness), await ask(harness, "other")
    await harness.backend.reached("gate")
    await harness.backend.reached("gate")
    statuses = [(await harness.engine.retrieve("default", each)).status for each in (first, second)]
    statuses.append((await harness.engine.retrieve("other", other)).status)
    assert statuses == ["in_progress", "queued", "in_progress"]
    for _ in range(3):
        harness.backend.release("gate")
    ended = [await finish(harness, first), await finish(harness, second), await finish(harness, other, "other")]
    assert ended == [DONE] * 3


async def test_starts_beyond_the_limit_of_a_minute_wait(
    make_harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CHECK_SECONDS", 0.02)
    ahead = 0.0
    store = SqliteStore(tmp_path / "store.db", now=lambda: time.time() + ahead)
    harness = await make_harness(
        {"default": "done"},
        store=store,
        background_limits=RunLimits(starts_per_minute=2),
        background_lease_seconds=LONG,
    )
    first, second, third = await ask(harness), await ask(harness), await ask(harness)
    assert [await finish(harness, each) for each in (first, second)] == [("completed", "done")] * 2
    assert (await harness.engine.retrieve("default", third)).status == "queued"
    ahead = 60.0
    assert await finish(harness, third) == ("completed", "done")


async def test_waiting_response_is_cancelled_without_a_free_slot(make_harness: Any, make_store: Any) -> None:
    harness = await make_harness(SLOW, store=make_store(), background_limits=RunLimits(concurrency=1))
    first = await ask(harness)
    await harness.backend.reached("gate")
    second = await ask(harness)
    assert (await harness.engine.cancel("default", second)).status == "cancelled"
    harness.backend.release("gate")
    assert await finish(harness, first) == DONE


async def test_restarted_engine_continues_within_the_limits(make_harness: Any, tmp_path: Path) -> None:
    policy = {"background_limits": RunLimits(concurrency=1, starts_per_minute=2)}
    first = await make_harness(SLOW, store=SqliteStore(tmp_path / "store.db", configuration_id="here"), **policy)
    running, waiting = await ask(first), await ask(first)
    await first.backend.reached("gate")
    await first.engine.close()
    second = await make_harness(SLOW, store=SqliteStore(tmp_path / "store.db", configuration_id="here"), **policy)
    for response_id in (running, waiting):
        await second.backend.reached("gate")
        second.backend.release("gate")
        assert await finish(second, response_id) == DONE


async def test_response_beyond_the_queue_is_refused_and_not_stored(make_harness: Any, make_store: Any) -> None:
    limits = RunLimits(queued=3, queued_per_project=2)
    harness = await make_harness(SLOW, store=make_store(), background_slots=1, background_limits=limits)
    running = await ask(harness, "a")
    await harness.backend.reached("gate")
    waiting = [(project, await ask(harness, project)) for project in "aab"]
    with pytest.raises(RateLimited, match="`background_queued_per_project`") as limited:
        await ask(harness, "a")
    with pytest.raises(Unavailable, match="`background_queued`") as overloaded:
        await ask(harness, "c")
    assert [(error.value.status, error.value.code) for error in (limited, overloaded)] == [
        (429, "rate_limit_exceeded"),
        (503, "server_overloaded"),
    ]
    assert limited.value.retry_after is not None
    assert overloaded.value.retry_after is not None
    for _ in range(4):
        harness.backend.release("gate")
    assert [await finish(harness, each, project) for project, each in [("a", running), *waiting]] == [DONE] * 4
    assert (await ask(harness, "c")).startswith("resp_")
    harness.backend.release("gate")


async def test_retry_after_of_a_process_that_runs_nothing_is_short(make_harness: Any, tmp_path: Path) -> None:
    policy = {"background_limits": RunLimits(concurrency=1, queued_per_project=1)}
    stores = [SqliteStore(tmp_path / "store.db", configuration_id="here") for _ in range(2)]
    working, idle = [await make_harness(SLOW, store=store, **policy) for store in stores]
    idle.engine.start_draining()
    await ask(working)
    await working.backend.reached("gate")
    await ask(working)
    with pytest.raises(RateLimited) as limited:
        await ask(idle)
    assert limited.value.retry_after == 1


async def test_background_turns_wait_behind_foreground_ones(make_harness: Any, make_store: Any) -> None:
    script = {"slots": 1, "default": [{"wait": "gate"}, {"text": "{input}"}]}
    harness = await make_harness(script, store=make_store())
    queue = harness.backend.queue = WatchedQueue(1)
    running = [asyncio.create_task(harness.answer("first"))]
    await harness.backend.reached("gate")
    for project in "aab":
        await ask(harness, project)
    await queue.until_arrivals(4)
    running += [asyncio.create_task(harness.answer(f"foreground {number}")) for number in range(3)]
    await queue.until_arrivals(3)
    assert queue.waiting == 6
    for task in running:  # in this order: no background turn is between them
        harness.backend.release("gate")
        assert (await task).status == "completed"
        await harness.backend.reached("gate")
    assert queue.waiting == 2
    for _ in range(3):
        harness.backend.release("gate")


async def test_run_without_memory_waits_and_lets_others_pass(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CHECK_SECONDS", LONG)
    returned: list[str] = []
    passed = 0.0

    class WatchedStore(MemoryStore):
        async def return_run(self, owner: str, project: str, response_id: str, *, free_since: float) -> None:
            returned.append(response_id)
            await super().return_run(owner, project, response_id, free_since=free_since)

    harness = await make_harness(
        {"default": "done"},
        store=WatchedStore(now=lambda: time.time() + passed),
        background_slots=1,
        history_budget_bytes=1_000_000,
        history_wait_seconds=0.0,
        background_lease_seconds=LONG,
    )
    with harness.engine._histories.open("other") as share:
        await share.reserve(250_000)
        run = await harness.ask("x" * 100_000, background=True)
        others = [await harness.ask("hi", background=True, project=project) for project in ("default", "third")]
        for project, other in zip(("default", "third"), others, strict=True):
            pages = await harness.engine.follow(project, other.response.id, after=-1)
            last = [event.type async for page in pages for event in page][-1]
            assert last == "response.completed"
        assert returned == [run.response.id]
    passed = worker.OVERLOAD_SECONDS
    await ask(harness)  # the next check
    assert await finish(harness, run.response.id) == ("completed", "done")
