"""The steps of hosted tools and claims of effects, in all stores."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.errors import ServerError
from antiphon.store.base import Store, StoredResponse

MakeStored = Callable[..., StoredResponse]


@pytest.fixture
async def owned(store: Store, make_stored: MakeStored) -> Store:
    """Return a store in which the owner `us` has the run of resp_1."""
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"request")
    await store.claim("us", as_of=0, lease=60, limit=1)
    return store


async def test_steps_are_loaded_in_order(owned: Store) -> None:
    assert await owned.append_hosted_steps("p", "resp_1", 0, [b"1", b"2"], owner="us")
    assert await owned.append_hosted_steps("p", "resp_1", 2, [b"3"], owner="us")
    assert await owned.load_hosted_steps("p", "resp_1") == [b"1", b"2", b"3"]
    assert await owned.load_hosted_steps("q", "resp_1") == []


async def test_steps_of_another_owner_are_not_written(owned: Store) -> None:
    assert not await owned.append_hosted_steps("p", "resp_1", 0, [b"1"], owner="them")
    assert not await owned.append_hosted_steps("q", "resp_1", 0, [b"1"], owner="us")
    assert await owned.load_hosted_steps("p", "resp_1") == []


@pytest.mark.parametrize("first", [0, 2])
async def test_step_number_is_used_once_and_without_gaps(owned: Store, first: int) -> None:
    await owned.append_hosted_steps("p", "resp_1", 0, [b"1"], owner="us")
    with pytest.raises(ServerError, match="has 1 hosted steps"):
        await owned.append_hosted_steps("p", "resp_1", first, [b"2"], owner="us")
    assert await owned.load_hosted_steps("p", "resp_1") == [b"1"]


async def test_repeated_steps_are_stored_once(owned: Store) -> None:
    for first, steps in ((0, [b"1"]), (1, [b"2", b"3"]), (1, [b"2", b"3"])):
        assert await owned.append_hosted_steps("p", "resp_1", first, steps, owner="us")
    with pytest.raises(ServerError, match="has 3 hosted steps"):
        await owned.append_hosted_steps("p", "resp_1", 0, [b"1"], owner="us")
    assert not await owned.append_hosted_steps("p", "resp_1", 1, [b"2", b"3"], owner="them")
    assert await owned.load_hosted_steps("p", "resp_1") == [b"1", b"2", b"3"]


async def test_steps_are_deleted_with_the_run(owned: Store, make_stored: MakeStored) -> None:
    await owned.append_hosted_steps("p", "resp_1", 0, [b"1"], owner="us")
    await owned.save("p", make_stored("resp_1"), owner="us")
    assert await owned.load_hosted_steps("p", "resp_1") == []


async def test_steps_are_deleted_with_the_response(owned: Store) -> None:
    await owned.append_hosted_steps("p", "resp_1", 0, [b"1"], owner="us")
    await owned.delete("p", "resp_1")
    assert await owned.load_hosted_steps("p", "resp_1") == []


async def test_effect_is_claimed_once_per_project(store: Store) -> None:
    claims = await asyncio.gather(*(store.claim_effect("p", "key") for _ in range(5)))
    assert sorted(claims) == [False, False, False, False, True]
    assert await store.claim_effect("q", "key")
    assert await store.claim_effect("p", "other")


async def test_expired_claim_is_deleted(store: Store, clock: Any) -> None:
    await store.claim_effect("p", "old", expires_at=100)
    await store.claim_effect("p", "new", expires_at=200)
    await store.claim_effect("p", "lasting")
    await store.expire(100)
    assert [await store.claim_effect("p", key) for key in ("old", "new", "lasting")] == [True, False, False]
