"""Followers of background responses: reads of the store, and announcements between processes."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.background import follower, recent_events, worker
from antiphon.errors import NotFound
from antiphon.protocol import codec
from antiphon.store.base import Store
from antiphon.store.changes import Announcement, ReportsLost
from antiphon.store.location import locate_store
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore
from support.engine_harness import EngineHarness, judge

# Longer than any test: a test that waits for it hangs.
LONG = 3600.0
WORDS = [f"word {number} " for number in range(30)]
PACED = {"default": [step for word in WORDS for step in ({"text": [word]}, {"delay": 0.01})]}
GATED = {"default": [{"text": WORDS[:10]}, {"wait": "gate"}, {"text": WORDS[10:20]}, {"wait": "end"}, {"text": ["."]}]}


def count_calls(store: Store, *names: str) -> Counter[str]:
    """Count the calls of these methods from now on."""
    counts: Counter[str] = Counter()

    def count(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return method(*arguments, **options)

        return call

    for name in names:
        setattr(store, name, count(name, getattr(store, name)))
    return counts


def count_reads(store: Store) -> Counter[str]:
    return count_calls(store, "read_events", "load_bare_response", "mark_watched")


async def read_all(harness: EngineHarness, response_id: str, after: int = -1) -> list[bytes]:
    pages = await harness.engine.follow("default", response_id, after=after)
    return [event.raw async for page in pages for event in page]


def read_text(events: list[bytes]) -> str:
    return judge([codec.decode_event(each) for each in events]).output_text


@pytest.fixture(autouse=True)
def _no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_SECONDS", "REPORTED_POLL_SECONDS"):
        monkeypatch.setattr(follower, name, LONG)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_follower_in_the_process_of_the_run_reads_no_log(make_harness: Any, tmp_path: Path, kind: str) -> None:
    store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "store.db")
    harness = await make_harness(PACED, store=store)
    counts = count_reads(store)
    run = await harness.ask(background=True, stream=True)
    events = [event.raw async for page in run.events() for event in page]
    assert counts == {}
    assert read_text(events) == "".join(WORDS)
    assert await read_all(harness, run.response.id) == events


async def test_follower_that_joins_later_reads_the_log_at_most_once(make_harness: Any) -> None:
    harness = await make_harness(GATED)
    run = await harness.ask(background=True, stream=True)
    first = asyncio.create_task(_read_run(run))
    await harness.backend.reached("gate")
    counts = count_calls(harness.store, "read_events")
    pages = await harness.engine.follow("default", run.response.id, after=-1)
    second = [event.raw for event in await anext(pages)]
    harness.backend.release("gate")
    await harness.backend.reached("end")
    harness.backend.release("end")
    second += [event.raw async for page in pages for event in page]
    events = await first
    assert (second, read_text(events)) == (events, "".join([*WORDS[:20], "."]))
    assert counts["read_events"] <= 1


async def _read_run(run: Any) -> list[bytes]:
    return [event.raw async for page in run.events() for event in page]


async def test_slow_follower_reads_dropped_events_from_the_log(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_events, "RECENT_BYTES", 1)
    harness = await make_harness(PACED)
    run = await harness.ask(background=True, stream=True)
    fast = asyncio.create_task(_read_run(run))
    pages = await harness.engine.follow("default", run.response.id, after=-1)
    slow = [event.raw for event in await anext(pages)]
    events = await fast
    slow += [event.raw async for page in pages for event in page]
    assert slow == events


async def test_run_that_ends_before_its_follower_begins_is_read(make_harness: Any, tmp_path: Path) -> None:
    harness = await make_harness({"default": "a word"}, store=SqliteStore(tmp_path / "store.db"))
    run = await harness.ask(background=True, stream=True)
    while (await harness.engine.retrieve("default", run.response.id)).status != "completed":  # noqa: ASYNC110
        await asyncio.sleep(0)
    await harness.engine.wait_for_background()
    events = await _read_run(run)
    assert (read_text(events), events) == ("a word", await read_all(harness, run.response.id))


async def test_deletion_ends_the_stream_of_a_follower(make_harness: Any) -> None:
    harness = await make_harness(GATED)
    run = await harness.ask(background=True, stream=True)
    reader = asyncio.create_task(_read_run(run))
    await harness.backend.reached("gate")
    await harness.engine.delete("default", run.response.id)
    with pytest.raises(NotFound):
        await reader


def connect(harnesses: list[EngineHarness]) -> Counter[str]:
    """Let the engines announce changes to each other, as workers do. Return the number of announcements by kind."""
    counts: Counter[str] = Counter()
    for harness in harnesses:
        others = [other for other in harnesses if other is not harness]

        def announce(announcement: Announcement, others: list[EngineHarness] = others) -> None:
            counts[announcement.kind] += 1
            for other in others:
                other.engine.receive_change(announcement)

        harness.engine._background.announce_elsewhere = announce
    return counts


async def test_followers_of_another_worker_share_one_read_per_announcement(make_harness: Any, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    runner, other = [await make_harness(PACED, store=SqliteStore(path)) for _ in range(2)]
    other.engine.start_draining()
    announced = connect([runner, other])
    run = await runner.ask(background=True, stream=True)
    local = asyncio.create_task(_read_run(run))
    counts = count_reads(other.store)
    remote = await asyncio.gather(*(read_all(other, run.response.id) for _ in range(20)))
    events = await local
    assert remote == [events] * 20
    assert 0 < counts["read_events"] <= announced["events"] + 4
    assert counts["load_bare_response"] <= 2 * 20 + 2


async def test_run_without_remote_followers_announces_no_events(make_harness: Any, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    runner, other = [await make_harness(PACED, store=SqliteStore(path)) for _ in range(2)]
    other.engine.start_draining()
    announced = connect([runner, other])
    run = await runner.ask(background=True, stream=True)
    events = await _read_run(run)
    assert await read_all(other, run.response.id) == events  # it has ended
    assert announced == {"begun": 1}


async def test_worker_without_a_free_slot_offers_its_runs_to_the_other(
    make_harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CHECK_SECONDS", LONG)
    stores = [SqliteStore(tmp_path / "store.db") for _ in range(2)]
    checks = count_calls(stores[1], "claim")
    options = {"background_slots": 1, "background_lease_seconds": LONG}
    first, second = [await make_harness(GATED, store=store, **options) for store in stores]
    announced = connect([first, second])
    while not checks:  # noqa: ASYNC110
        await asyncio.sleep(0)
    runs = [await first.ask(background=True) for _ in range(2)]
    for gate in ("gate", "end"):
        for harness in (first, second):
            await harness.backend.reached(gate)
        for harness in (first, second):
            harness.backend.release(gate)
    for run in runs:
        await read_all(first, run.response.id)
        assert (await first.engine.retrieve("default", run.response.id)).status == "completed"
    assert announced["queued"] <= len(runs)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_deletion_by_another_process_stops_the_model(
    make_harness: Any, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    url = f"sqlite:///{tmp_path}/store.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    first, other = [await make_harness(GATED, store=locate_store(url), background_lease_seconds=LONG) for _ in range(2)]
    other.engine.start_draining()
    connect([first, other])
    if kind == "postgres":
        await first.store.peer_link.wait_connected()
    run = await first.ask(background=True)
    await first.backend.reached("gate")
    await other.engine.delete("default", run.response.id)
    await first.backend.cancellation.wait()
    await first.engine.wait_for_background()
    with pytest.raises(NotFound):
        await first.engine.retrieve("default", run.response.id)


@pytest.mark.parametrize("change", ["cancel", "delete"])
async def test_lost_report_is_made_up_for_after_reconnecting(make_harness: Any, change: str) -> None:
    harness = await make_harness(GATED, background_lease_seconds=LONG)
    run = await harness.ask(background=True)
    await harness.backend.reached("gate")
    lose_report = harness.store.request_cancel if change == "cancel" else harness.store.delete
    await lose_report("default", run.response.id)
    harness.engine.receive_change(ReportsLost())
    await harness.backend.cancellation.wait()


async def test_follower_stays_when_its_run_moves_between_other_nodes(make_harness: Any, postgres_url: str) -> None:
    """Each of three nodes has its own connection. No node polls."""
    # The third node gets its slot later.
    first, reader, third = [
        await make_harness(GATED, store=locate_store(postgres_url), background_slots=slots) for slots in (1, 0, 0)
    ]
    for node in (first, reader, third):
        await node.store.peer_link.wait_connected()
    run = await first.ask(background=True)
    await first.backend.reached("gate")
    counts = count_calls(reader.store, "read_events")
    follow = asyncio.create_task(read_all(reader, run.response.id))
    while not counts:  # noqa: ASYNC110 - the other node has the first events
        await asyncio.sleep(0)
    await first.engine.close()
    third.engine._worker._slots = 1
    await third.backend.reached("gate")
    third.backend.release("gate")
    await third.backend.reached("end")
    third.backend.release("end")
    events = await follow
    assert (read_text(events), events) == ("".join([*WORDS[:20], "."]), await read_all(third, run.response.id))
    assert counts["read_events"] < 30
