"""Inspection of a PostgreSQL store that servers may be using."""

import time

import asyncpg

from antiphon.store.condition import StoreCondition
from antiphon.store.migration_files import read_migrations
from antiphon.store.postgres.connection import PostgresConnector, ServerAddress, close, explain_refusal
from antiphon.store.postgres.migrations import read_version

_STATE = "SELECT current_setting('transaction_read_only')::bool, extract(epoch FROM clock_timestamp())::float8"


async def inspect_database(url: str) -> StoreCondition:
    """Return the condition of a database. Raises ConfigError if it cannot be reached."""
    address = ServerAddress(url)
    try:
        connection = await PostgresConnector(address).connect()
        try:
            schema = await read_version(connection)
            # Older schemas do not have the table.
            has_table = await connection.fetchval("SELECT to_regclass('api_keys') IS NOT NULL")
            has_keys = has_table and await connection.fetchval("SELECT EXISTS (SELECT 1 FROM api_keys)")
            started = time.time()
            is_read_only, now = await connection.fetchrow(_STATE)
            ended = time.time()
        finally:
            await close(connection)
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise explain_refusal(address, error) from error
    return StoreCondition(
        schema=schema,
        newest=read_migrations("postgres")[-1].version,
        refusal="the database is read-only" if is_read_only else None,
        clock_offset=now - (started + ended) / 2,
        has_keys=has_keys,
    )
