"""Expiry on a node whose clock differs from that of the database."""

import time
from collections.abc import Callable

import pytest

from antiphon.store.base import StoredResponse
from antiphon.store.containers import ContainerLimits, ContainerRow
from antiphon.store.files.rows import FileRow, StoreRow, UploadRow
from antiphon.store.postgres.files import PostgresFileDatabase
from antiphon.store.postgres.store import PostgresStore
from antiphon.store.sql_expiry import logger
from antiphon.store.usage import UsageRow

MakeStored = Callable[..., StoredResponse]

DAY = 24 * 60 * 60


def read_wrong_time() -> float:
    return time.time() + 2 * DAY


def make_container(name: str, *, last_active_at: int) -> ContainerRow:
    return ContainerRow(
        id=name,
        name=name,
        created_at=last_active_at,
        last_active_at=last_active_at,
        idle_seconds=DAY,
        memory_limit="1g",
    )


async def test_responses_and_containers_outlive_a_clock_that_is_ahead(
    store: PostgresStore, make_stored: MakeStored, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger.name)
    store._now = read_wrong_time
    now = int(time.time())
    await store.save("p", make_stored("resp_old", expires_at=now - DAY))
    await store.save("p", make_stored("resp_new", expires_at=now + DAY))
    for name, last_active_at in (("cntr_old", now - 2 * DAY), ("cntr_new", now)):
        row = make_container(name, last_active_at=last_active_at)
        await store.create_container("p", row, limits=ContainerLimits(9, 9, 9, 9))
    assert [await store.expire(int(store._now())) for _ in range(2)] == [1, 0]
    assert await store.list_expired_containers(limit=9) == [("p", "cntr_old")]
    await store.purge_container("p", "cntr_new")
    assert await store.delete_purged_containers(int(store._now()) - DAY) == 0
    store._now = time.time
    assert await store.load_response("p", "resp_new") is not None
    (record,) = caplog.records
    assert "seconds ahead of the database's. Expired data is deleted by the clock of" in record.message


async def test_files_and_vector_stores_outlive_a_clock_that_is_ahead(postgres_url: str) -> None:
    database = PostgresFileDatabase(postgres_url)
    await database.open()
    try:
        database._now = read_wrong_time
        now = int(time.time())
        for name, expires_at in (("old", now - DAY), ("new", now + DAY)):
            await database.save_file("p", FileRow(f"file_{name}", now, expires_at, "a.txt", 1, "user_data"))
            upload = UploadRow(
                f"upload_{name}", now, expires_at, "a.txt", 1, "user_data", "text/plain", None, "pending"
            )
            await database.save_upload("p", upload)
            active_at = expires_at - DAY
            await database.create_vector_store(
                "p", StoreRow(f"vs_{name}", now, active_at, name, None, None, 1, "m"), []
            )
        assert await database.expire_files(int(database._now())) == ["file_old"]
        assert await database.load_upload("p", "upload_old") is None
        assert await database.load_upload("p", "upload_new") is not None
        stores, _ = await database.list_vector_stores("p", after=None, before=None, limit=9, order="asc")
        stores += [store for name in ("vs_old", "vs_new") if (store := await database.load_vector_store("p", name))]
        assert [(store.name, store.is_expired) for store in stores] == [("old", True), ("new", False)] * 2
    finally:
        await database.close()


async def test_usage_outlives_a_clock_that_is_ahead(store: PostgresStore) -> None:
    started_at = int(time.time()) // 60 * 60
    row = UsageRow(started_at, "p", "", "m", 1, 2, 0, 3, 0.25)
    await store.add_usage([row], write_id="1")
    store._now = lambda: time.time() + 1000 * DAY
    await store.roll_up_usage(int(store._now()))
    assert await store.list_usage(0, 2**40, width=60) == [row]


async def test_slow_answer_is_no_difference_between_the_clocks(
    store: PostgresStore, caplog: pytest.LogCaptureFixture
) -> None:
    began_at = iter([time.time() - DAY])
    store._now = lambda: next(began_at, time.time())
    await store.expire(1)
    assert caplog.records == []


async def test_clock_that_is_behind_is_reported_once(store: PostgresStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger.name)
    store._now = lambda: time.time() - 2 * DAY
    await store.expire(1)
    await store.expire(1)
    store._now = time.time
    await store.expire(1)
    (record,) = caplog.records
    assert "seconds behind the database's. Data that this node stores expires too early" in record.message
