"""API keys, in all stores."""

from antiphon.store.base import Store
from antiphon.store.keys import StoredKey

FIRST = StoredKey("key_b", b"\x00one", "p", "first", ("inference", "read"), 10, 99)
SECOND = StoredKey("key_a", b"\xfftwo", "q", "", ("admin",), 20)


async def test_keys_are_found_by_digest_and_listed_by_age(store: Store) -> None:
    assert (await store.has_keys(), await store.list_keys()) == (False, [])
    for key in (SECOND, FIRST):
        await store.save_key(key)
    assert (await store.has_keys(), await store.list_keys()) == (True, [FIRST, SECOND])
    assert [await store.find_key(digest) for digest in (b"\x00one", b"\xfftwo", b"one")] == [FIRST, SECOND, None]


async def test_revoked_key_stays_listed_and_is_revoked_once(store: Store) -> None:
    await store.save_key(FIRST)
    assert [await store.revoke_key(key_id, 50) for key_id in ("key_b", "key_b", "key_x")] == [True, False, False]
    assert await store.find_key(b"\x00one") == FIRST._replace(revoked_at=50)
    assert await store.rotate_key("key_b", b"new", None) is False
    assert (await store.has_keys(), await store.list_keys()) == (True, [FIRST._replace(revoked_at=50)])


async def test_rotated_key_has_a_new_digest_and_expiry(store: Store) -> None:
    await store.save_key(FIRST)
    assert [await store.rotate_key(key_id, b"new", 120) for key_id in ("key_b", "key_x")] == [True, False]
    assert await store.find_key(b"\x00one") is None
    assert await store.find_key(b"new") == FIRST._replace(digest=b"new", expires_at=120)


async def test_last_use_is_written_once_per_interval(store: Store) -> None:
    await store.save_key(FIRST)
    seen = []
    for used_at in (100, 159, 160):
        await store.record_key_use("key_b", used_at, interval=60)
        seen.append((await store.list_keys())[0].last_used_at)
    assert seen == [100, 100, 160]
    await store.record_key_use("key_x", 100, interval=60)
    assert await store.list_keys() == [FIRST._replace(last_used_at=160)]
