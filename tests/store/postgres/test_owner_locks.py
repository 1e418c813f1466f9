"""Takeover of the runs of a process whose connection to PostgreSQL has ended, long before its leases expire."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from antiphon.store.base import StoredResponse
from antiphon.store.limits import StoreLimits
from antiphon.store.location import locate_store
from support.postgres_server import EmptySchema

pytest.importorskip("asyncpg")

from antiphon.store.postgres import notifications, owner_locks
from antiphon.store.postgres.notifications import LISTENERS
from antiphon.store.postgres.store import PostgresStore

MakeStored = Callable[..., StoredResponse]
OpenStore = Callable[..., Awaitable[PostgresStore]]

LEASE = 3600.0


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check at every claim, and end leases at the second check without the lock."""
    for name in ("CHECK_SECONDS", "GRACE_SECONDS", "SETTLE_SECONDS"):
        monkeypatch.setattr(owner_locks, name, 0.0)


@pytest.fixture
async def open_store(postgres_url: str) -> AsyncIterator[OpenStore]:
    """Return a function that opens the store of another process. It listens, unless its limits name another URL."""
    async with AsyncExitStack() as stack, asyncio.timeout(60):

        async def open_store(limits: StoreLimits | None = None) -> PostgresStore:
            store = locate_store(postgres_url, limits=limits or StoreLimits())
            assert isinstance(store, PostgresStore)
            await store.open()
            stack.push_async_callback(store.close)
            store.on_change = lambda _: None
            if limits is None:
                assert store.peer_link is not None
                await store.peer_link.wait_connected()
            return store

        yield open_store


@pytest.fixture
async def dying(open_store: OpenStore, make_stored: MakeStored, postgres_schema: EmptySchema) -> PostgresStore:
    """A store whose owner `dying` has a run and holds its lock."""
    store = await open_store()
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    assert await claim(store, "dying") == ["resp_1"]
    await hold_lock(store, "dying")
    assert read_runs(postgres_schema) == [("dying", "dying")]
    return store


async def claim(store: PostgresStore, owner: str) -> list[str]:
    claimed = await store.claim(owner, as_of=time.time(), lease=LEASE, limit=9)
    return [run.response_id for run in claimed]


async def hold_lock(store: PostgresStore, owner: str) -> None:
    """Poll the queue until the owner holds its lock. It gets no run meanwhile."""
    while not store._owner_locks.is_recorded(owner):
        assert await claim(store, owner) == []


async def assert_not_taken(store: PostgresStore) -> None:
    """Poll more often than a takeover needs."""
    assert [await claim(store, "other") for _ in range(5)] == [[]] * 5


def read_runs(schema: EmptySchema) -> list[tuple[str | None, str | None]]:
    return [(owner, locked) for owner, locked in schema.fetch("SELECT owner, locked_owner FROM runs")]


async def disconnect(store: PostgresStore) -> None:
    """End the connection that listens, and wait until its locks are released."""
    listener = store._notifications.listener
    await store._reader.submit("SELECT pg_terminate_backend($1, 60000)", (listener,))
    while store._notifications.listener == listener:
        await store.check()


async def test_runs_of_a_process_that_has_ended_are_claimed(
    dying: PostgresStore, open_store: OpenStore, postgres_schema: EmptySchema, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="antiphon.store.postgres.runs")
    other = await open_store()
    await hold_lock(other, "other")
    await assert_not_taken(other)
    await dying.close()  # without a release
    claimed: list[str] = []
    while not claimed:
        claimed = await claim(other, "other")
    assert claimed == ["resp_1"]
    assert read_runs(postgres_schema) == [("other", "other")]
    assert [record.getMessage() for record in caplog.records] == [
        "a process that shares the database has ended. Its background responses are taken over"
    ]
    assert await other.append_events("p", "resp_1", 0, [b"{}"], owner="dying") is False


@pytest.mark.parametrize("name", ["GRACE_SECONDS", "SETTLE_SECONDS"])
async def test_runs_are_not_claimed_before_other_processes_could_reconnect(
    dying: PostgresStore, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(owner_locks, name, LEASE)
    other = await open_store()
    await hold_lock(other, "other")
    await dying.close()
    await assert_not_taken(other)


async def test_leases_count_after_an_outage_of_the_database(dying: PostgresStore, open_store: OpenStore) -> None:
    other = await open_store()
    await hold_lock(other, "other")
    other._health.report_contact(is_lost=True)
    await dying.close()
    await assert_not_taken(other)


async def test_process_with_a_new_connection_keeps_its_runs(
    dying: PostgresStore, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, postgres_schema: EmptySchema
) -> None:
    monkeypatch.setattr(notifications, "RECONNECT_SECONDS", 0.0)
    other = await open_store()
    await hold_lock(other, "other")
    await disconnect(dying)
    await dying._notifications.listening.wait()
    await assert_not_taken(other)
    assert read_runs(postgres_schema) == [("dying", "dying")]


async def test_process_that_cannot_reconnect_keeps_its_runs_for_the_lease(
    dying: PostgresStore, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, postgres_schema: EmptySchema
) -> None:
    monkeypatch.setattr(notifications, "RECONNECT_SECONDS", LEASE)
    other = await open_store()
    await hold_lock(other, "other")
    await disconnect(dying)
    assert await claim(dying, "dying") == []
    assert read_runs(postgres_schema) == [("dying", None)]
    await assert_not_taken(other)


async def test_owner_of_an_earlier_version_keeps_its_runs_for_the_lease(
    dying: PostgresStore, open_store: OpenStore, postgres_schema: EmptySchema
) -> None:
    postgres_schema.execute("UPDATE runs SET owner = 'earlier'")
    other = await open_store()
    await hold_lock(other, "other")
    await dying.close()
    await assert_not_taken(other)


async def test_owner_that_listens_to_another_database_is_not_locked(
    open_store: OpenStore, make_stored: MakeStored, other_database: str, postgres_schema: EmptySchema
) -> None:
    store = await open_store(StoreLimits(listen_url=other_database))
    assert await claim(store, "us") == []
    while store._notifications.can_listen:
        await store.check()
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    assert await claim(store, "us") == ["resp_1"]
    assert read_runs(postgres_schema) == [("us", None)]


async def test_released_owner_is_not_locked_on_later_connections(
    dying: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "RECONNECT_SECONDS", 0.0)
    await dying.release("dying")
    await disconnect(dying)
    await dying._notifications.listening.wait()
    assert dying._notifications.locked_owners == set()
    # The connections of an earlier test may end late.
    while await dying._reader.submit(LISTENERS, (dying._notifications.channel,)) != [(dying._notifications.listener,)]:
        await dying.check()
