"""Expiry of responses and conversations, in all stores."""

from collections.abc import Callable
from typing import Protocol

import pytest

from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Store, StoredResponse

MakeStored = Callable[..., StoredResponse]
MakeItems = Callable[..., list[Item | Unknown]]

LONG = 250  # turns: more than a store deletes in one step


class Clock(Protocol):
    time: int


@pytest.fixture(autouse=True)
def start_at_zero(clock: Clock) -> None:
    """Set the clock before every expiry, so that `load` returns everything that was not deleted."""
    clock.time = 0


async def list_left(store: Store, count: int) -> list[int]:
    """Return the numbers of the responses that were not deleted."""
    return [number for number in range(count) if await store.load("p", f"resp_{number}") is not None]


async def save_chain(store: Store, make_stored: MakeStored, expiries: list[int | None]) -> None:
    """Save responses with these expiry times. Each continues the one before it."""
    for number, expires_at in enumerate(expiries):
        previous = f"resp_{number - 1}" if number else None
        await store.save("p", make_stored(f"resp_{number}", previous=previous, expires_at=expires_at))


async def test_expire_deletes_only_expired_data(store: Store, make_stored: MakeStored, make_items: MakeItems) -> None:
    for number in range(250):
        await store.save(f"project {number % 3}", make_stored(f"resp_{number}", expires_at=100 + number % 2))
    await store.save("p", make_stored("resp_lasting"))
    await store.create_conversation("p", Conversation("conv_expired", 1), make_items("msg_1"), expires_at=100)
    await store.create_conversation("p", Conversation("conv_later", 1), make_items("msg_2"), expires_at=101)
    await store.create_conversation("p", Conversation("conv_lasting", 1), make_items("msg_3"))

    assert await store.expire(99) == 0
    assert await store.expire(100) == 125 + 1
    loaded = [await store.load(f"project {number % 3}", f"resp_{number}") for number in range(250)]
    assert [stored is not None for stored in loaded] == [False, True] * 125
    assert [await store.find_item("p", f"msg_{n}") for n in (1, 2, 3)] == [None, *make_items("msg_2", "msg_3")]
    assert await store.expire(1_000) == 125 + 1
    assert await store.load("p", "resp_lasting") == make_stored("resp_lasting")
    assert await store.load_conversation_items("p", "conv_lasting") == make_items("msg_3")


@pytest.mark.parametrize("end", ["delete", "expire"])
async def test_events_and_run_are_deleted_with_their_response(store: Store, make_stored: MakeStored, end: str) -> None:
    queued = make_stored("resp_1", status="queued", expires_at=1)
    for project in ("ours", "theirs"):
        await store.enqueue(project, queued, b"{}")
        await store.append_events(project, "resp_1", 0, [b"{}"])
    if end == "delete":
        assert await store.delete("ours", "resp_1") is True
    else:
        await store.save("theirs", make_stored("resp_1", status="queued"))
        assert await store.expire(1) == 1

    assert await store.read_events("ours", "resp_1", -1) == []
    assert await store.mark_watched("ours", "resp_1") is False
    assert await store.read_events("theirs", "resp_1", -1) == [(0, b"{}")]
    assert await store.mark_watched("theirs", "resp_1") is True


async def test_expired_response_stays_while_another_continues_it(store: Store, make_stored: MakeStored) -> None:
    await save_chain(store, make_stored, [10, 20, 30])
    assert [await store.expire(now) for now in (10, 15, 20, 29)] == [0, 0, 0, 0]
    assert await list_left(store, 3) == [0, 1, 2]
    assert await store.expire(30) == 3
    assert await list_left(store, 3) == []


async def test_long_chain_is_deleted_when_its_last_response_expires(store: Store, make_stored: MakeStored) -> None:
    await save_chain(store, make_stored, [10 + number // 50 for number in range(LONG)])
    assert [await store.expire(now) for now in range(10, 14)] == [0, 0, 0, 0]
    assert await store.expire(14) == LONG
    assert await list_left(store, LONG) == []


async def test_long_chain_is_deleted_by_the_first_sweep(store: Store, make_stored: MakeStored) -> None:
    await save_chain(store, make_stored, [10 + number // 50 for number in range(LONG)])
    assert await store.expire(14) == LONG
    assert await list_left(store, LONG) == []


async def test_expired_ancestors_of_a_live_response_stay(store: Store, make_stored: MakeStored) -> None:
    await save_chain(store, make_stored, [10, 30, 10, 10])
    assert await store.expire(10) == 2
    assert await list_left(store, 4) == [0, 1]
    assert await store.expire(30) == 2


async def test_ancestors_of_a_response_without_expiry_stay(store: Store, make_stored: MakeStored) -> None:
    await save_chain(store, make_stored, [10, 20, None])
    assert [await store.expire(now) for now in (10, 20, 10_000)] == [0, 0, 0]
    assert [link.id for link in await store.load_chain("p", "resp_2")] == ["resp_0", "resp_1", "resp_2"]


async def test_forked_response_is_deleted_with_its_last_fork(store: Store, make_stored: MakeStored) -> None:
    for number, end in enumerate((10, 40, 20, 30)):
        await store.save("p", make_stored(f"resp_{number}", previous="resp_0" if number else None, expires_at=end))
    assert [await store.expire(now) for now in (10, 20, 30)] == [0, 1, 1]
    assert await list_left(store, 4) == [0, 1]
    assert await store.expire(40) == 2


async def test_ancestors_of_a_deleted_response_expire(store: Store, make_stored: MakeStored) -> None:
    await save_chain(store, make_stored, [10] * LONG + [None])
    assert await store.expire(10) == 0
    await store.delete("p", f"resp_{LONG}")
    assert await list_left(store, LONG) == list(range(LONG))
    assert await store.expire(10) == LONG


async def test_ancestor_of_a_queued_response_stays(store: Store, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_0", expires_at=10))
    await store.enqueue("p", make_stored("resp_1", previous="resp_0", status="queued", expires_at=20), b"{}")
    assert await store.expire(10) == 0
    await store.save("p", make_stored("resp_1", previous="resp_0", expires_at=30))
    assert await store.expire(20) == 0
    assert await store.expire(30) == 2


async def test_response_expires_when_a_later_save_stops_continuing_it(store: Store, make_stored: MakeStored) -> None:
    await save_chain(store, make_stored, [10, 10, 20])
    assert await store.expire(10) == 0
    await store.save("p", make_stored("resp_2", previous="resp_0", expires_at=20))
    assert await store.expire(10) == 1
    assert await list_left(store, 3) == [0, 2]
    await store.save("p", make_stored("resp_2", expires_at=20))
    assert await store.expire(10) == 1
    assert await list_left(store, 3) == [2]


async def test_response_saved_again_stays_until_its_new_expiry(store: Store, make_stored: MakeStored) -> None:
    await save_chain(store, make_stored, [10, 20])
    assert await store.expire(10) == 0
    await store.save("p", make_stored("resp_0", expires_at=30))
    assert [await store.expire(now) for now in (20, 29, 30)] == [1, 0, 1]


async def test_response_of_another_project_does_not_prevent_expiry(store: Store, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_0", expires_at=10))
    await store.save("q", make_stored("resp_1", previous="resp_0"))
    assert await store.expire(10) == 1
    assert await list_left(store, 1) == []


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_cycle_of_responses_expires(store: Store, make_stored: MakeStored, size: int) -> None:
    for number in range(size):
        await store.save("p", make_stored(f"resp_{number}", previous=f"resp_{(number - 1) % size}", expires_at=10))
    await store.save("p", make_stored(f"resp_{size}", previous=f"resp_{size - 1}", expires_at=20))
    assert await store.expire(10) == 0
    assert await store.expire(20) == size + 1
    assert await list_left(store, size + 1) == []
