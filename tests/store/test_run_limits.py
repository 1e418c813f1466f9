"""The shared limits of the run queue, over all stores."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from antiphon.store.base import QueueFull, Store, StoredResponse
from antiphon.store.limits import RunLimits

MakeStored = Callable[..., StoredResponse]
Claim = Callable[..., Awaitable[list[str]]]
Queue = Callable[..., Awaitable[None]]


@pytest.fixture(autouse=True)
def start_at_zero(clock: Any) -> None:
    clock.time = 0


@pytest.fixture
def queue(store: Store, make_stored: MakeStored) -> Queue:
    """Queue runs of these projects, in this order: `a` gets the ids a1, a2, and so on."""
    counts: dict[str, int] = {}

    async def queue_runs(projects: str) -> None:
        for project in projects:
            counts[project] = counts.get(project, 0) + 1
            stored = make_stored(f"resp_{project}{counts[project]}", status="queued")
            await store.enqueue(project, stored, b"{}")

    return queue_runs


@pytest.fixture
def claim(store: Store, clock: Any) -> Claim:
    """Claim at this time. Returns the runs as a1, a2, and so on."""

    async def claim_at(owner: str, now: float, *, limit: int = 99, lease: float = 1000, **limits: int) -> list[str]:
        clock.time = now
        claimed = await store.claim(owner, as_of=now, lease=lease, limit=limit, limits=RunLimits(**limits))
        return [run.response_id.removeprefix("resp_") for run in claimed]

    return claim_at


@pytest.fixture
def end(store: Store, make_stored: MakeStored) -> Callable[[str], Awaitable[None]]:
    async def end_run(name: str) -> None:
        await store.save(name[0], make_stored(f"resp_{name}"))

    return end_run


async def test_concurrency_counts_the_runs_of_all_owners(queue: Queue, claim: Claim, end: Any) -> None:
    await queue("aaabb")
    assert await claim("us", 0, concurrency=3, limit=2) == ["a1", "b1"]
    assert await claim("them", 0, concurrency=3) == ["a2"]
    assert await claim("third", 0, concurrency=3) == []
    await end("a1")
    assert await claim("third", 0, concurrency=3) == ["a3"]


async def test_slots_stay_the_limit_of_one_claim(queue: Queue, claim: Claim) -> None:
    await queue("aaa")
    assert await claim("us", 0, limit=1, concurrency=3, concurrency_per_project=3, starts_per_minute=3) == ["a1"]


async def test_full_project_is_skipped_for_the_runs_of_others(queue: Queue, claim: Claim, end: Any) -> None:
    await queue("aaaabbac")
    assert await claim("us", 0, concurrency_per_project=2, limit=4) == ["a1", "a2", "b1", "c1"]
    assert await claim("them", 0, concurrency_per_project=2) == ["b2"]
    assert await claim("them", 0, concurrency_per_project=2) == []
    await end("a1")
    assert await claim("them", 0, concurrency_per_project=2) == ["a3"]


async def test_both_concurrency_limits_hold_together(queue: Queue, claim: Claim) -> None:
    await queue("aaabbbccc")
    limits = {"concurrency": 4, "concurrency_per_project": 2}
    assert await claim("us", 0, **limits) == ["a1", "a2", "b1", "c1"]
    assert await claim("them", 0, **limits) == []


async def test_limit_below_active_runs_takes_no_more(queue: Queue, claim: Claim, end: Any) -> None:
    await queue("aaaa")
    assert await claim("us", 0, limit=3) == ["a1", "a2", "a3"]
    assert await claim("them", 0, concurrency=2) == []
    assert await claim("them", 0, concurrency_per_project=2) == []
    await end("a1")
    assert await claim("them", 0, concurrency=2) == []
    await end("a2")
    assert await claim("them", 0, concurrency=2) == ["a4"]


async def test_expired_runs_do_not_count_and_are_taken_over(queue: Queue, claim: Claim) -> None:
    await queue("aab")
    assert await claim("dead", 0, lease=10, concurrency=2) == ["a1", "b1"]
    assert await claim("us", 9, concurrency=2) == []
    assert await claim("us", 10, concurrency=2) == ["a1", "b1"]
    assert await claim("us", 10, concurrency=2) == []


async def test_takeover_stays_within_the_concurrency(queue: Queue, claim: Claim) -> None:
    await queue("aaab")
    assert await claim("dead", 0, lease=10) == ["a1", "a2", "a3", "b1"]
    assert await claim("us", 10, concurrency_per_project=2) == ["a1", "a2", "b1"]
    assert await claim("them", 10, concurrency=3) == []
    assert await claim("them", 10, concurrency=4) == ["a3"]


async def test_own_expired_runs_still_count(queue: Queue, claim: Claim) -> None:
    await queue("aa")
    assert await claim("us", 0, lease=10, concurrency=1) == ["a1"]
    assert await claim("us", 50, concurrency=1) == []


async def test_run_without_owner_does_not_count(store: Store, queue: Queue, claim: Claim) -> None:
    await queue("aa")
    assert await claim("us", 0, concurrency=1) == ["a1"]
    await store.stop_renewing("us", "a", "resp_a1")
    assert await claim("us", 0, concurrency=1) == ["a2"]


async def test_starts_count_over_all_owners_and_end_after_a_minute(queue: Queue, claim: Claim, end: Any) -> None:
    await queue("aabbcc")
    assert await claim("us", 0, starts_per_minute=3, limit=1) == ["a1"]
    assert await claim("them", 30, starts_per_minute=3) == ["b1", "c1"]
    await end("a1")
    assert await claim("us", 59.9, starts_per_minute=3) == []
    assert await claim("us", 60, starts_per_minute=3) == ["a2"]
    assert await claim("them", 89.9, starts_per_minute=3) == []
    assert await claim("them", 90, starts_per_minute=3) == ["b2", "c2"]


async def test_takeover_after_a_crash_is_not_a_start(queue: Queue, claim: Claim) -> None:
    await queue("aaa")
    assert await claim("dead", 0, lease=10, starts_per_minute=2) == ["a1", "a2"]
    assert await claim("us", 10, starts_per_minute=2) == ["a1", "a2"]
    assert await claim("us", 59, starts_per_minute=2) == []
    assert await claim("us", 60, starts_per_minute=2) == ["a3"]


async def test_released_run_is_taken_again_without_a_start(store: Store, queue: Queue, claim: Claim) -> None:
    await queue("aaa")
    assert await claim("us", 0, starts_per_minute=2) == ["a1", "a2"]
    await store.release("us")
    assert await claim("them", 1, starts_per_minute=2) == ["a1", "a2"]
    assert await claim("them", 59, starts_per_minute=2) == []


async def test_released_run_is_found_behind_many_that_may_not_start(store: Store, queue: Queue, claim: Claim) -> None:
    await queue("aaab")
    await store.request_cancel("b", "resp_b1")
    assert await claim("us", 0, starts_per_minute=1) == ["a1", "b1"]
    await store.return_run("us", "b", "resp_b1", free_since=0)
    assert await claim("us", 1, starts_per_minute=1) == ["b1"]


async def test_delayed_run_waits_but_not_others_of_its_project(store: Store, queue: Queue, claim: Claim) -> None:
    await queue("aab")
    assert await claim("us", 0, limit=1) == ["a1"]
    await store.return_run("us", "a", "resp_a1", free_since=5)
    assert await claim("us", 4.9, limit=1) == ["a2"]
    assert await claim("us", 4.9, limit=2) == ["b1"]
    assert await claim("us", 5, limit=2) == ["a1"]


async def test_delay_longer_than_a_minute_is_a_clock_set_back(store: Store, queue: Queue, claim: Claim) -> None:
    await queue("a")
    assert await claim("us", 100, limit=1) == ["a1"]
    await store.return_run("us", "a", "resp_a1", free_since=100)
    assert await claim("us", 0, limit=1) == ["a1"]


async def test_cancelled_run_is_claimed_in_spite_of_its_delay(store: Store, queue: Queue, claim: Claim) -> None:
    await queue("a")
    assert await claim("us", 0, limit=1) == ["a1"]
    await store.return_run("us", "a", "resp_a1", free_since=5)
    await store.request_cancel("a", "resp_a1")
    assert await claim("us", 0, limit=1) == ["a1"]


async def test_clock_set_back_blocks_starts_for_a_minute_at_most(queue: Queue, claim: Claim) -> None:
    await queue("aa")
    assert await claim("us", 3600, starts_per_minute=1) == ["a1"]
    assert await claim("us", 0, starts_per_minute=1) == []
    assert await claim("us", 59.9, starts_per_minute=1) == []
    assert await claim("us", 60, starts_per_minute=1) == ["a2"]


async def test_cancelled_runs_count_against_no_limit(store: Store, queue: Queue, claim: Claim) -> None:
    await queue("aab")
    limits = {"concurrency": 1, "concurrency_per_project": 1, "starts_per_minute": 1}
    assert await claim("us", 0, **limits) == ["a1"]
    await store.request_cancel("a", "resp_a2")
    await store.request_cancel("b", "resp_b1")
    assert await claim("us", 0, limit=0, **limits) == ["a2", "b1"]


async def test_deleted_response_frees_its_slot(store: Store, queue: Queue, claim: Claim) -> None:
    await queue("ab")
    assert await claim("us", 0, concurrency=1) == ["a1"]
    await store.delete("a", "resp_a1")
    assert await claim("us", 0, concurrency=1) == ["b1"]


async def test_projects_with_fewer_runs_in_progress_go_first(queue: Queue, claim: Claim, end: Any) -> None:
    await queue("aaaaaabbc")
    assert await claim("us", 0, limit=4) == ["a1", "a2", "b1", "c1"]
    assert await claim("them", 0, limit=1) == ["b2"]
    await queue("d")
    assert await claim("us", 0, limit=3) == ["a3", "a4", "d1"]
    await end("a1")
    await queue("c")
    assert await claim("us", 0, limit=3) == ["a5", "a6", "c2"]


async def test_runs_of_a_dead_process_are_shared_out_like_others(queue: Queue, claim: Claim) -> None:
    await queue("aaa")
    assert await claim("dead", 0, lease=10) == ["a1", "a2", "a3"]
    await queue("ba")
    assert await claim("us", 10, limit=2) == ["a1", "b1"]
    assert await claim("us", 10, limit=2) == ["a2", "a3"]


async def test_single_project_gets_all_slots(queue: Queue, claim: Claim) -> None:
    await queue("aaaa")
    assert await claim("us", 0, limit=3) == ["a1", "a2", "a3"]


@pytest.mark.parametrize(("project", "is_project"), [("a", True), ("c", False)])
async def test_run_beyond_the_longest_queue_is_not_accepted(
    store: Store, queue: Queue, make_stored: MakeStored, claim: Claim, project: str, *, is_project: bool
) -> None:
    await queue("aab")
    limits = RunLimits(queued=3, queued_per_project=2)
    refused = make_stored("resp_refused", status="queued")
    with pytest.raises(QueueFull) as caught:
        await store.enqueue(project, refused, b"{}", limits=limits)
    assert (caught.value.waiting, caught.value.is_project) == (2 if is_project else 3, is_project)
    assert await store.load(project, "resp_refused") is None
    # Runs in progress and cancelled ones do not wait.
    assert await claim("us", 0, limit=1) == ["a1"]
    await store.enqueue(project, refused, b"{}", limits=limits)
    await store.request_cancel("b", "resp_b1")
    await store.enqueue("d", make_stored("resp_d1", status="queued"), b"{}", limits=limits)
    assert len(await claim("us", 0)) == 4
