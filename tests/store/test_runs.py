"""The run queue, in all stores."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from antiphon.engine.background.attempt import MAX_INTERRUPTIONS
from antiphon.errors import ServerError
from antiphon.store.base import ClaimedRun, LeaseLost, RunKey, Store, StoredResponse
from antiphon.store.limits import MAX_UNCOUNTED_ATTEMPT, SUSPECT_GROUP, SuspectFilter

MakeStored = Callable[..., StoredResponse]
Claim = Callable[..., Awaitable[list[ClaimedRun]]]


def run(
    number: int,
    *,
    attempt: int = 1,
    watched: bool = False,
    cancelled: bool = False,
    interruptions: int = 0,
    since: float = 0,
) -> ClaimedRun:
    request = b"request %d" % number
    more = interruptions, "scripted", True, since
    return ClaimedRun("p", f"resp_{number}", request, attempt, watched, cancelled, *more)


def lost(number: int, *, since: float, times: int = 1, cancelled: bool = False) -> ClaimedRun:
    """A run whose lease expired `times` times, the last time at `since`."""
    return run(number, attempt=times + 1, interruptions=times, since=since, cancelled=cancelled)


@pytest.fixture(autouse=True)
def start_at_zero(clock: Any) -> None:
    clock.time = 0


@pytest.fixture
def claim(store: Store, clock: Any) -> Claim:
    """Claim at this time."""

    async def claim_at(owner: str, now: float, *, limit: int) -> list[ClaimedRun]:
        clock.time = now
        return await store.claim(owner, as_of=now, lease=10, limit=limit)

    return claim_at


@pytest.fixture
async def queued(store: Store, make_stored: MakeStored) -> Store:
    """A store with four runs: resp_9, then resp_8, resp_7 and resp_6."""
    for number in (9, 8, 7, 6):
        await store.enqueue("p", make_stored(f"resp_{number}", status="queued"), b"request %d" % number)
    return store


async def test_enqueued_response_is_loaded_and_its_run_claimed(
    queued: Store, make_stored: MakeStored, claim: Claim
) -> None:
    assert await queued.load("p", "resp_9") == make_stored("resp_9", status="queued")
    assert await claim("us", 0, limit=1) == [run(9)]


@pytest.mark.parametrize("status", ["queued", "completed"])
async def test_existing_response_cannot_be_enqueued(
    store: Store, make_stored: MakeStored, status: str, claim: Claim
) -> None:
    await store.save("p", make_stored("resp_1", status=status, text="Before"))
    with pytest.raises(ServerError):
        await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    assert await store.load("p", "resp_1") == make_stored("resp_1", status=status, text="Before")
    assert await claim("us", 0, limit=1) == []


async def test_runs_are_claimed_once_oldest_first(queued: Store, claim: Claim) -> None:
    assert await claim("us", 0, limit=3) == [run(9), run(8), run(7)]
    assert await claim("them", 0, limit=3) == [run(6)]
    assert await claim("us", 0, limit=3) == []


async def test_concurrent_claims_never_share_a_run(queued: Store, claim: Claim) -> None:
    claims = await asyncio.gather(*(claim(f"owner {n}", 0, limit=1) for n in range(6)))
    assert sorted(claim for claimed in claims for claim in claimed) == [run(6), run(7), run(8), run(9)]


async def test_run_with_an_expired_lease_is_claimed_by_another_owner(queued: Store, claim: Claim) -> None:
    await claim("us", 0, limit=2)
    assert await claim("them", 9.9, limit=1) == [run(7)]
    assert await claim("them", 10, limit=9) == [lost(9, since=10), lost(8, since=10), run(6)]
    assert await claim("third", 19.9, limit=9) == [lost(7, since=19.9)]
    assert await claim("third", 20, limit=1) == [lost(9, times=2, since=20)]


async def test_owner_does_not_claim_its_own_runs_again(queued: Store, claim: Claim) -> None:
    """A process that was suspended for longer than its lease still works on its runs."""
    await claim("us", 0, limit=4)
    assert await claim("us", 1_000, limit=4) == []
    assert len(await claim("them", 1_000, limit=4)) == 4


async def test_renew_extends_all_leases_of_the_owner(queued: Store, claim: Claim, clock: Any) -> None:
    await claim("us", 0, limit=2)
    await claim("them", 0, limit=2)
    clock.time = 9
    assert await queued.renew("us", lease=10) == {RunKey("p", "resp_9"): False, RunKey("p", "resp_8"): False}
    assert await claim("third", 18, limit=9) == [lost(7, since=10), lost(6, since=10)]
    assert await claim("third", 19, limit=9) == [lost(9, since=19), lost(8, since=19)]


async def test_renew_does_not_return_runs_of_other_owners(queued: Store, claim: Claim) -> None:
    await claim("us", 0, limit=1)
    await claim("them", 10, limit=1)
    await queued.request_cancel("p", "resp_9")
    assert await queued.renew("us", lease=1_000) == {}
    assert await queued.renew("them", lease=10) == {RunKey("p", "resp_9"): True}


async def test_released_runs_are_claimed_at_once_without_an_interruption(
    queued: Store, claim: Claim, clock: Any
) -> None:
    await claim("us", 0, limit=2)
    await claim("them", 0, limit=1)
    clock.time = 1
    await queued.release("us")
    released = [run(number, attempt=2, since=1) for number in (9, 8)]
    assert await claim("third", 1, limit=9) == [*released, run(6)]


async def test_owner_cannot_write_to_a_released_run(queued: Store, make_stored: MakeStored, claim: Claim) -> None:
    await claim("us", 0, limit=1)
    await queued.release("us")
    assert await queued.append_events("p", "resp_9", 0, [b"{}"], owner="us") is False
    with pytest.raises(LeaseLost):
        await queued.save("p", make_stored("resp_9"), owner="us")
    assert await claim("us", 0, limit=1) == [run(9, attempt=2)]


async def test_runs_of_a_dead_owner_are_claimed_at_once(queued: Store, claim: Claim, clock: Any) -> None:
    await claim("dead", 0, limit=2)
    await claim("us", 0, limit=1)
    clock.time = 1
    await queued.end_leases("dead")
    assert await claim("them", 1, limit=9) == [lost(9, since=1), lost(8, since=1), run(6)]
    assert await queued.append_events("p", "resp_9", 0, [b"{}"], owner="dead") is False


async def test_lease_of_a_dead_owner_that_has_ended_is_not_prolonged(queued: Store, claim: Claim, clock: Any) -> None:
    await claim("dead", 0, limit=1)
    for now in (1, 20):
        clock.time = now
        await queued.end_leases("dead")
    assert await claim("them", 20, limit=1) == [lost(9, since=1)]


async def test_run_that_is_not_renewed_is_claimed_when_its_lease_expires(
    queued: Store, claim: Claim, clock: Any
) -> None:
    await claim("us", 0, limit=2)
    await queued.stop_renewing("us", "p", "resp_9")
    await queued.stop_renewing("them", "p", "resp_8")
    await queued.stop_renewing("us", "p", "resp_1")
    clock.time = 5
    await queued.renew("us", lease=10)
    assert await queued.append_events("p", "resp_9", 0, [b"{}"], owner="us") is False
    assert await claim("us", 9, limit=9) == [run(7), run(6)]
    assert await claim("us", 10, limit=9) == [lost(9, since=10)]
    assert await queued.append_events("p", "resp_8", 0, [b"{}"], owner="us") is True


async def test_claimed_run_is_marked_as_watched(queued: Store, claim: Claim) -> None:
    for _ in range(2):
        assert await queued.mark_watched("p", "resp_8") is True
    assert await claim("us", 0, limit=2) == [run(9), run(8, watched=True)]


async def test_cancellation_is_reported_by_renew_and_claim(queued: Store, claim: Claim) -> None:
    await claim("us", 0, limit=3)
    for number in (7, 9, 9, 6):
        assert await queued.request_cancel("p", f"resp_{number}") is True
    cancelled = {RunKey("p", f"resp_{number}"): number != 8 for number in (9, 8, 7)}
    assert await queued.renew("us", lease=10) == cancelled
    assert await claim("them", 1, limit=1) == [run(6, cancelled=True)]


async def test_cancelled_run_is_claimed_beyond_the_limit(queued: Store, claim: Claim) -> None:
    await claim("dead", 0, limit=1)
    for number in (9, 7):
        await queued.request_cancel("p", f"resp_{number}")
    assert await claim("us", 1, limit=0) == [run(7, cancelled=True)]
    assert await claim("us", 10, limit=1) == [lost(9, since=10, cancelled=True), run(8)]


async def test_response_without_a_run_is_neither_watched_nor_cancelled(
    queued: Store, make_stored: MakeStored, claim: Claim
) -> None:
    await queued.save("p", make_stored("resp_1"))
    for project, response_id in (("p", "resp_1"), ("p", "resp_2"), ("theirs", "resp_9")):
        assert await queued.mark_watched(project, response_id) is False
        assert await queued.request_cancel(project, response_id) is False
    assert await claim("us", 0, limit=1) == [run(9)]


@pytest.mark.parametrize("status", ["completed", "failed", "incomplete", "cancelled"])
async def test_final_response_has_no_run(queued: Store, make_stored: MakeStored, status: str, claim: Claim) -> None:
    await claim("us", 0, limit=1)
    await queued.save("p", make_stored("resp_9", status=status), owner="us")
    await queued.save("p", make_stored("resp_8", status=status))
    assert await queued.load("p", "resp_9") == make_stored("resp_9", status=status)
    assert await queued.mark_watched("p", "resp_9") is False
    assert await claim("them", 1_000, limit=9) == [run(7), run(6)]


async def test_unfinished_response_keeps_its_run(queued: Store, make_stored: MakeStored, claim: Claim) -> None:
    await claim("us", 0, limit=1)
    await queued.save("p", make_stored("resp_9", status="in_progress"), owner="us")
    assert await queued.load("p", "resp_9") == make_stored("resp_9", status="in_progress")
    assert await queued.mark_watched("p", "resp_9") is True


async def test_former_owner_of_a_run_cannot_save(queued: Store, make_stored: MakeStored, claim: Claim) -> None:
    await claim("us", 0, limit=2)
    await claim("them", 10, limit=1)
    await queued.save("p", make_stored("resp_8", status="cancelled"))
    for number in (9, 8):
        with pytest.raises(LeaseLost, match=f"us does not own the run of resp_{number}"):
            await queued.save("p", make_stored(f"resp_{number}"), owner="us")
    assert await queued.load("p", "resp_9") == make_stored("resp_9", status="queued")
    assert await queued.load("p", "resp_8") == make_stored("resp_8", status="cancelled")


async def test_runs_of_all_projects_are_claimed_together(store: Store, make_stored: MakeStored, claim: Claim) -> None:
    for project in ("ours", "theirs"):
        await store.enqueue(project, make_stored("resp_1", status="queued"), project.encode())
    assert await claim("us", 0, limit=9) == [
        run(1)._replace(project="ours", request=b"ours"),
        run(1)._replace(project="theirs", request=b"theirs"),
    ]
    await store.save("ours", make_stored("resp_1"), owner="us")
    await store.release("us")
    assert [claimed.project for claimed in await claim("them", 0, limit=9)] == ["theirs"]


async def test_lease_starts_when_the_run_is_claimed(queued: Store, claim: Claim, clock: Any) -> None:
    clock.time = 30
    assert await queued.claim("us", as_of=0, lease=10, limit=1) == [run(9)]
    assert await claim("them", 39.9, limit=1) == [run(8)]
    assert await claim("them", 40, limit=1) == [lost(9, since=40)]


async def test_lease_that_expired_while_waiting_for_the_store_is_not_claimed(
    queued: Store, claim: Claim, clock: Any
) -> None:
    await claim("us", 0, limit=4)
    clock.time = 30
    assert await queued.claim("them", as_of=9.9, lease=10, limit=4) == []
    assert len(await queued.renew("us", lease=10)) == 4
    assert await claim("them", 39.9, limit=4) == []


async def test_returned_run_keeps_its_waiting_time(queued: Store, claim: Claim, make_stored: MakeStored) -> None:
    (claimed,) = await claim("us", 5, limit=1)
    await queued.return_run("them", "p", "resp_9", free_since=1)
    assert await queued.append_events("p", "resp_9", 0, [b"{}"], owner="us") is True
    await queued.return_run("us", "p", "resp_9", free_since=claimed.free_since)
    await queued.return_run("us", "p", "resp_1", free_since=1)
    with pytest.raises(LeaseLost):
        await queued.save("p", make_stored("resp_9"), owner="us")
    assert await claim("them", 6, limit=1) == [run(9, attempt=2)]


async def test_run_enqueued_by_this_process_is_claimed_at_once(queued: Store) -> None:
    assert await queued.claim("us", as_of=0, lease=10, limit=2, wait_by_model={"scripted": 3600}) == [run(9), run(8)]


async def test_clock_set_back_does_not_lengthen_a_lease(queued: Store, claim: Claim, clock: Any) -> None:
    await claim("dead", 3600, limit=1)
    await claim("alive", 3600, limit=1)
    clock.time = 0
    for owner in ("alive", "us"):  # each live owner renews before its lease expires
        await queued.renew(owner, lease=10)
    assert await claim("us", 9.9, limit=2) == [run(7), run(6)]
    await queued.renew("alive", lease=10)
    assert await claim("us", 10, limit=2) == [lost(9, since=10)]


async def claim_for_dead_owners(claim: Claim, count: int, *, limit: int) -> None:
    """Let several owners claim all runs, one after the other, and die."""
    for number in range(count):
        assert len(await claim(f"dead {number}", 20 * number, limit=limit)) == limit


async def test_runs_interrupted_twice_are_claimed_in_a_group(
    store: Store, make_stored: MakeStored, claim: Claim
) -> None:
    count = SUSPECT_GROUP + 2
    for number in range(count):
        await store.enqueue("p", make_stored(f"resp_{number}", status="queued"), b"request %d" % number)
    await claim_for_dead_owners(claim, 2, limit=count)
    group = [lost(number, since=30, times=2) for number in range(SUSPECT_GROUP)]
    assert await claim("us", 40, limit=99) == group
    assert await claim("us", 41, limit=99) == []
    await store.save("p", make_stored("resp_3"), owner="us")
    assert await claim("us", 42, limit=99) == [lost(SUSPECT_GROUP, since=30, times=2)]
    assert await claim("them", 43, limit=99) == [lost(SUSPECT_GROUP + 1, since=30, times=2)]


async def test_runs_interrupted_three_times_are_claimed_one_at_a_time(queued: Store, claim: Claim) -> None:
    await claim_for_dead_owners(claim, 3, limit=4)
    assert await claim("us", 60, limit=4) == [lost(9, since=50, times=3)]
    assert await claim("us", 61, limit=4) == []
    assert await claim("them", 62, limit=4) == [lost(8, since=50, times=3)]
    await queued.release("us")
    (again,) = await claim("us", 63, limit=4)
    assert (again.response_id, again.interruptions) == ("resp_9", 3)
    await queued.request_cancel("p", "resp_7")
    assert [each.response_id for each in await claim("us", 64, limit=4)] == ["resp_7"]


async def test_no_group_is_claimed_beside_a_run_interrupted_three_times(queued: Store, claim: Claim) -> None:
    assert await claim("dead", 0, limit=1) == [run(9)]
    for number, time in enumerate((20, 40)):
        assert len(await claim(f"dead {number}", time, limit=4)) == 4
    assert await claim("us", 60, limit=4) == [lost(9, since=50, times=3)]
    assert await claim("us", 61, limit=4) == []
    assert await claim("them", 62, limit=4) == [lost(number, since=50, times=2) for number in (8, 7, 6)]


@pytest.mark.parametrize("position", [0, 70])
async def test_run_that_kills_its_process_is_found_among_many(
    store: Store, make_stored: MakeStored, claim: Claim, position: int
) -> None:
    """Each process works on 64 runs at a time, and is killed as soon as the run at this position begins."""
    fatal, left = f"resp_{position}", {f"resp_{number}" for number in range(80)}
    for number in range(80):
        await store.enqueue("p", make_stored(f"resp_{number}", status="queued"), b"request %d" % number)
    deaths, most, held = 0, 0, list[ClaimedRun]()
    while left:
        held += await claim(f"process {deaths}", 20 * deaths, limit=64 - len(held))
        ended = held[0]
        for each in held:
            if each.response_id != fatal:
                most = max(most, each.interruptions)
            elif each.interruptions < MAX_INTERRUPTIONS:
                deaths, held = deaths + 1, []
                break
        else:
            await store.save("p", make_stored(ended.response_id), owner=f"process {deaths}")
            held.remove(ended)
            left.remove(ended.response_id)
    assert (deaths, most) == (MAX_INTERRUPTIONS, MAX_INTERRUPTIONS - 1)


async def test_interruption_is_withdrawn_by_a_process_that_lives(queued: Store, claim: Claim) -> None:
    await claim("us", 0, limit=1)
    assert await claim("them", 10, limit=1) == [lost(9, since=10)]
    assert await queued.withdraw_interruption("p", "resp_9", attempt=1) is True
    assert await claim("third", 20, limit=1) == [run(9, attempt=3, interruptions=1, since=20)]


async def test_interruption_is_not_withdrawn_without_a_loss(queued: Store, claim: Claim) -> None:
    await claim("dead", 0, limit=1)
    await claim("us", 10, limit=1)
    for project, response_id, attempt in (
        ("p", "resp_9", 2),
        ("p", "resp_8", 0),
        ("p", "resp_1", 0),
        ("q", "resp_9", 1),
    ):
        assert await queued.withdraw_interruption(project, response_id, attempt=attempt) is False
    assert await claim("third", 20, limit=1) == [lost(9, times=2, since=20)]


async def test_run_that_is_lost_again_and_again_is_interrupted(queued: Store, claim: Claim) -> None:
    """It may be the cause: a response can also stop its process for longer than a lease."""
    await claim("owner 0", 0, limit=1)
    for number in range(1, MAX_UNCOUNTED_ATTEMPT):
        await claim(f"owner {number}", 10 * number, limit=1)
        assert await queued.withdraw_interruption("p", "resp_9", attempt=number) is True
    (claimed,) = await claim("last", 10 * MAX_UNCOUNTED_ATTEMPT, limit=1)
    assert (claimed.attempt, claimed.interruptions) == (MAX_UNCOUNTED_ATTEMPT + 1, 1)
    assert await queued.withdraw_interruption("p", "resp_9", attempt=MAX_UNCOUNTED_ATTEMPT) is False


@pytest.mark.parametrize(
    ("held", "waiting", "admitted"),
    [
        ([], [0, 1, 2, 2], [0, 1, 2, 2]),
        ([2] * (SUSPECT_GROUP - 1), [2, 2, 1], [2, 1]),
        ([2], [2, 3, 2, 0], [2, 0]),  # the third run does not overtake the second one
        ([], [3, 2, 3, 0], [3, 0]),
        ([3], [3, 2, 1], [1]),
    ],
)
def test_suspect_filter_admits_a_group_in_order(held: list[int], waiting: list[int], admitted: list[int]) -> None:
    assert [*filter(SuspectFilter(held).admit, waiting)] == admitted


async def test_runs_without_crashes_are_claimed_beside_a_suspect(
    store: Store, make_stored: MakeStored, claim: Claim
) -> None:
    await store.enqueue("p", make_stored("resp_9", status="queued"), b"request 9")
    for number, time in enumerate((0, 20)):
        assert len(await claim(f"dead {number}", time, limit=4)) == 1
    for number in (8, 7):
        await store.enqueue("p", make_stored(f"resp_{number}", status="queued"), b"request %d" % number)
    assert [each.response_id for each in await claim("us", 40, limit=4)] == ["resp_9", "resp_8", "resp_7"]


async def test_waiting_runs_are_those_without_an_owner_or_cancellation(queued: Store, claim: Claim) -> None:
    await queued.request_cancel("p", "resp_6")
    before = await queued.count_waiting()
    await claim("a", 1, limit=1)
    assert (before, await queued.count_waiting()) == (3, 2)
