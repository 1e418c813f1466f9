"""What every store promises of the run queue."""

import asyncio
from collections.abc import Callable

import pytest

from antiphon.errors import ServerError
from antiphon.store.base import ClaimedRun, LeaseLost, RunKey, Store, StoredResponse

MakeStored = Callable[..., StoredResponse]


def run(number: int, *, attempt: int = 1, watched: bool = False, cancelled: bool = False) -> ClaimedRun:
    return ClaimedRun("p", f"resp_{number}", b"request %d" % number, attempt, watched, cancelled)


@pytest.fixture
async def queued(store: Store, make_stored: MakeStored) -> Store:
    """A store with four runs: resp_9, then resp_8, resp_7 and resp_6."""
    for number in (9, 8, 7, 6):
        await store.enqueue("p", make_stored(f"resp_{number}", status="queued"), b"request %d" % number)
    return store


async def test_an_enqueued_response_can_be_loaded_and_its_run_claimed(queued: Store, make_stored: MakeStored) -> None:
    assert await queued.load("p", "resp_9") == make_stored("resp_9", status="queued")
    assert await queued.claim("us", now=0, lease=10, limit=1) == [run(9)]


@pytest.mark.parametrize("status", ["queued", "completed"])
async def test_a_response_that_exists_is_not_enqueued(store: Store, make_stored: MakeStored, status: str) -> None:
    await store.save("p", make_stored("resp_1", status=status, text="Before"))
    with pytest.raises(ServerError):
        await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    assert await store.load("p", "resp_1") == make_stored("resp_1", status=status, text="Before")
    assert await store.claim("us", now=0, lease=10, limit=1) == []


async def test_runs_are_claimed_once_and_the_oldest_first(queued: Store) -> None:
    assert await queued.claim("us", now=0, lease=10, limit=3) == [run(9), run(8), run(7)]
    assert await queued.claim("them", now=0, lease=10, limit=3) == [run(6)]
    assert await queued.claim("us", now=0, lease=10, limit=3) == []


async def test_claims_at_once_never_share_a_run(queued: Store) -> None:
    claims = await asyncio.gather(*(queued.claim(f"owner {n}", now=0, lease=10, limit=1) for n in range(6)))
    assert sorted(claim for claimed in claims for claim in claimed) == [run(6), run(7), run(8), run(9)]


async def test_a_run_whose_lease_ran_out_is_claimed_by_another(queued: Store) -> None:
    await queued.claim("us", now=0, lease=10, limit=2)
    assert await queued.claim("them", now=9.9, lease=10, limit=1) == [run(7)]
    assert await queued.claim("them", now=10, lease=10, limit=9) == [run(9, attempt=2), run(8, attempt=2), run(6)]
    assert await queued.claim("third", now=19.9, lease=10, limit=9) == [run(7, attempt=2)]
    assert await queued.claim("third", now=20, lease=10, limit=1) == [run(9, attempt=3)]


async def test_nobody_claims_what_it_already_has(queued: Store) -> None:
    """A process that was asleep for longer than its lease is still working on its runs."""
    await queued.claim("us", now=0, lease=10, limit=4)
    assert await queued.claim("us", now=1_000, lease=10, limit=4) == []
    assert len(await queued.claim("them", now=1_000, lease=10, limit=4)) == 4


async def test_a_renewed_lease_holds_all_runs_of_its_owner(queued: Store) -> None:
    await queued.claim("us", now=0, lease=10, limit=2)
    await queued.claim("them", now=0, lease=10, limit=2)
    assert await queued.renew("us", now=9, lease=10) == {RunKey("p", "resp_9"): False, RunKey("p", "resp_8"): False}
    assert await queued.claim("third", now=18, lease=10, limit=9) == [run(7, attempt=2), run(6, attempt=2)]
    assert await queued.claim("third", now=19, lease=10, limit=9) == [run(9, attempt=2), run(8, attempt=2)]


async def test_renewing_brings_back_no_run_that_was_taken_over(queued: Store) -> None:
    await queued.claim("us", now=0, lease=10, limit=1)
    await queued.claim("them", now=10, lease=10, limit=1)
    await queued.request_cancel("p", "resp_9")
    assert await queued.renew("us", now=11, lease=1_000) == {}
    assert await queued.renew("them", now=11, lease=10) == {RunKey("p", "resp_9"): True}


async def test_released_runs_can_be_claimed_at_once(queued: Store) -> None:
    await queued.claim("us", now=0, lease=10, limit=2)
    await queued.claim("them", now=0, lease=10, limit=1)
    await queued.release("us")
    assert await queued.claim("third", now=1, lease=10, limit=9) == [run(9, attempt=2), run(8, attempt=2), run(6)]


async def test_a_released_run_is_not_its_owners_any_more(queued: Store, make_stored: MakeStored) -> None:
    await queued.claim("us", now=0, lease=10, limit=1)
    await queued.release("us")
    assert await queued.append_events("p", "resp_9", 0, [b"{}"], owner="us") is False
    with pytest.raises(LeaseLost):
        await queued.save("p", make_stored("resp_9"), owner="us")
    assert await queued.claim("us", now=0, lease=10, limit=1) == [run(9, attempt=2)]


async def test_an_abandoned_run_is_free_when_its_lease_runs_out(queued: Store) -> None:
    await queued.claim("us", now=0, lease=10, limit=2)
    await queued.abandon("us", "p", "resp_9")
    await queued.abandon("them", "p", "resp_8")
    await queued.abandon("us", "p", "resp_1")
    await queued.renew("us", now=5, lease=10)
    assert await queued.append_events("p", "resp_9", 0, [b"{}"], owner="us") is False
    assert await queued.claim("us", now=9, lease=10, limit=9) == [run(7), run(6)]
    assert await queued.claim("us", now=10, lease=10, limit=9) == [run(9, attempt=2)]
    assert await queued.append_events("p", "resp_8", 0, [b"{}"], owner="us") is True


async def test_a_watched_run_says_so_when_it_is_claimed(queued: Store) -> None:
    for _ in range(2):
        assert await queued.watch("p", "resp_8") is True
    assert await queued.claim("us", now=0, lease=10, limit=2) == [run(9), run(8, watched=True)]


async def test_a_cancelled_run_says_so_at_the_next_renewal_and_when_it_is_claimed(queued: Store) -> None:
    await queued.claim("us", now=0, lease=10, limit=3)
    for number in (7, 9, 9, 6):
        assert await queued.request_cancel("p", f"resp_{number}") is True
    cancelled = {RunKey("p", f"resp_{number}"): number != 8 for number in (9, 8, 7)}
    assert await queued.renew("us", now=1, lease=10) == cancelled
    assert await queued.claim("them", now=1, lease=10, limit=1) == [run(6, cancelled=True)]


async def test_a_cancelled_run_is_claimed_beyond_the_limit(queued: Store) -> None:
    await queued.claim("dead", now=0, lease=10, limit=1)
    for number in (9, 7):
        await queued.request_cancel("p", f"resp_{number}")
    assert await queued.claim("us", now=1, lease=10, limit=0) == [run(7, cancelled=True)]
    assert await queued.claim("us", now=10, lease=10, limit=1) == [run(9, attempt=2, cancelled=True), run(8)]


async def test_what_has_no_run_is_neither_watched_nor_cancelled(queued: Store, make_stored: MakeStored) -> None:
    await queued.save("p", make_stored("resp_1"))
    for project, response_id in (("p", "resp_1"), ("p", "resp_2"), ("theirs", "resp_9")):
        assert await queued.watch(project, response_id) is False
        assert await queued.request_cancel(project, response_id) is False
    assert await queued.claim("us", now=0, lease=10, limit=1) == [run(9)]


@pytest.mark.parametrize("status", ["completed", "failed", "incomplete", "cancelled"])
async def test_a_final_response_has_no_run(queued: Store, make_stored: MakeStored, status: str) -> None:
    await queued.claim("us", now=0, lease=10, limit=1)
    await queued.save("p", make_stored("resp_9", status=status), owner="us")
    await queued.save("p", make_stored("resp_8", status=status))
    assert await queued.load("p", "resp_9") == make_stored("resp_9", status=status)
    assert await queued.watch("p", "resp_9") is False
    assert await queued.claim("them", now=1_000, lease=10, limit=9) == [run(7), run(6)]


async def test_an_unfinished_response_keeps_its_run(queued: Store, make_stored: MakeStored) -> None:
    await queued.claim("us", now=0, lease=10, limit=1)
    await queued.save("p", make_stored("resp_9", status="in_progress"), owner="us")
    assert await queued.load("p", "resp_9") == make_stored("resp_9", status="in_progress")
    assert await queued.watch("p", "resp_9") is True


async def test_an_owner_whose_run_was_taken_over_or_ended_saves_nothing(queued: Store, make_stored: MakeStored) -> None:
    await queued.claim("us", now=0, lease=10, limit=2)
    await queued.claim("them", now=10, lease=10, limit=1)
    await queued.save("p", make_stored("resp_8", status="cancelled"))
    for number in (9, 8):
        with pytest.raises(LeaseLost, match=f"The run of resp_{number} is not, or no longer, us's"):
            await queued.save("p", make_stored(f"resp_{number}"), owner="us")
    assert await queued.load("p", "resp_9") == make_stored("resp_9", status="queued")
    assert await queued.load("p", "resp_8") == make_stored("resp_8", status="cancelled")


async def test_runs_of_all_projects_are_claimed_together(store: Store, make_stored: MakeStored) -> None:
    for project in ("ours", "theirs"):
        await store.enqueue(project, make_stored("resp_1", status="queued"), project.encode())
    assert await store.claim("us", now=0, lease=10, limit=9) == [
        ClaimedRun("ours", "resp_1", b"ours", 1, watched=False, cancelled=False),
        ClaimedRun("theirs", "resp_1", b"theirs", 1, watched=False, cancelled=False),
    ]
    await store.save("ours", make_stored("resp_1"), owner="us")
    await store.release("us")
    assert [claimed.project for claimed in await store.claim("them", now=0, lease=10, limit=9)] == ["theirs"]
