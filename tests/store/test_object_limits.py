"""Limits on the number of conversations, prompts and keys of a project, in every store."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from antiphon.errors import QuotaExceeded
from antiphon.protocol.conversation import Conversation
from antiphon.store.base import Store
from antiphon.store.keys import generate_key
from antiphon.store.limits import StoreLimits
from antiphon.store.location import locate_store

LIMITS = StoreLimits(max_conversations=2, max_prompts=2, max_keys=2)


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    store = locate_store(store_url, limits=LIMITS)
    await store.open()
    yield store
    await store.close()


async def create_conversation(store: Store, project: str, name: str) -> None:
    await store.create_conversation(project, Conversation(f"conv_{name}", 1, {}), ())


async def save_prompt(store: Store, project: str, name: str) -> None:
    await store.save_prompt(project, f"pmpt_{name}", "1", b"{}", 1)


async def save_key(store: Store, project: str, name: str) -> None:
    key, _ = generate_key(project, name, (), created_at=1)
    await store.save_key(key._replace(id=f"key_{project}_{name}"))


async def delete_conversation(store: Store, name: str) -> None:
    assert await store.delete_conversation("p", f"conv_{name}")


async def delete_prompt(store: Store, name: str) -> None:
    assert await store.delete_prompt("p", f"pmpt_{name}")


async def revoke_key(store: Store, name: str) -> None:
    assert await store.revoke_key(f"key_p_{name}", 2)


Create = Callable[[Store, str, str], Awaitable[None]]
Delete = Callable[[Store, str], Awaitable[None]]

OBJECTS = pytest.mark.parametrize(
    ("create", "delete", "message"),
    [
        (
            create_conversation,
            delete_conversation,
            "2 conversations, and at most 2 are allowed (setting max_conversations). Delete some first.",
        ),
        (
            save_prompt,
            delete_prompt,
            "2 versions of prompts, and at most 2 are allowed (setting max_prompts). Delete some first.",
        ),
        (
            save_key,
            revoke_key,
            "2 API keys, and at most 2 are allowed (setting max_keys). Revoke some first.",
        ),
    ],
)


@OBJECTS
async def test_objects_beyond_the_limit_are_refused(store: Store, create: Create, delete: Delete, message: str) -> None:
    for name in ("a", "b"):
        await create(store, "p", name)
    with pytest.raises(QuotaExceeded) as caught:
        await create(store, "p", "c")
    assert (caught.value.message, caught.value.code) == (f"This project has {message}", "insufficient_quota")
    await create(store, "q", "c")
    await delete(store, "a")
    await create(store, "p", "d")
    with pytest.raises(QuotaExceeded):
        await create(store, "p", "e")


@OBJECTS
async def test_concurrent_creations_do_not_exceed_the_limit(
    store: Store, store_url: str, create: Create, delete: Delete, message: str
) -> None:
    others = [store]
    if not store_url.startswith("memory"):
        others.append(locate_store(store_url, limits=LIMITS))
        await others[-1].open()
    creations = [create(others[number % len(others)], "p", f"n{number}") for number in range(8)]
    outcomes = await asyncio.gather(*creations, return_exceptions=True)
    for other in others[1:]:
        await other.close()
    assert [type(outcome) for outcome in outcomes].count(QuotaExceeded) == 6
    assert outcomes.count(None) == 2


async def test_expired_conversations_are_not_counted(store: Store) -> None:
    for name in ("a", "b"):
        await store.create_conversation("p", Conversation(f"conv_{name}", 1, {}), (), expires_at=5)
    await store.expire(10)
    await create_conversation(store, "p", "c")
