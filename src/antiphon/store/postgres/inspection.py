"""Inspection of a PostgreSQL store that servers may be using."""

import asyncio
import time

from antiphon.store.condition import StoreCondition
from antiphon.store.migration_files import read_migrations
from antiphon.store.postgres.connection import (
    OPENING_ERRORS,
    DatabaseHealth,
    PostgresConnector,
    ServerAddress,
    close,
    explain_refusal,
    make_listener,
)
from antiphon.store.postgres.migrations import (
    NO_SCHEMA,
    explain_missing_rights,
    find_other_tables,
    read_version,
)
from antiphon.store.postgres.notifications import HOLD_LOCK, Notifications, check_database, make_channel
from antiphon.store.postgres.peer_link import PostgresPeerLink
from antiphon.store.postgres.pool import PostgresPool

_STATE = """
SELECT current_schema(), has_schema_privilege(current_schema(), 'CREATE'),
    pg_is_in_recovery(), current_setting('transaction_read_only')::bool,
    extract(epoch FROM clock_timestamp())::float8
"""

_CAN_READ_KEYS = """
SELECT coalesce(has_table_privilege(to_regclass('api_keys'), 'SELECT'), false)
"""


async def ask_processes(url: str, kind: str, *, seconds: float, listen_url: str = "") -> list[bytes] | None:
    """Return the answers of the servers with this database to a question. No tables are created.

    `listen_url` is the setting `store_listen_url`. None if LISTEN is impossible, because its URL leads to a pooler.
    Raises ConfigError if a URL cannot be reached, or if the two lead to different databases.
    """
    address = ServerAddress(url)
    connector = PostgresConnector(address)
    listener = make_listener(listen_url) or connector
    pool = PostgresPool(connector, DatabaseHealth(address), size=1)
    try:
        pool.add(await connector.connect())
        ((schema,),) = await pool.submit("SELECT current_schema()")
        channel = make_channel(schema)
        if listener is not connector:
            await _check_listener(listener, pool, channel)
        if listener.is_pooled:
            return None
        notifications = Notifications(listener, pool, channel=channel)
        link = PostgresPeerLink(notifications, pool, seconds=seconds)
        notifications.listen(lambda *_: None)
        try:
            async with asyncio.timeout(seconds):
                await link.wait_connected()
            return await link.ask_all(kind)
        finally:
            await notifications.close()
    except OPENING_ERRORS as error:
        raise explain_refusal(address, error) from error
    finally:
        await pool.close()


async def _check_listener(listener: PostgresConnector, pool: PostgresPool, channel: str) -> None:
    """Raise ConfigError if `store_listen_url` cannot be reached, or is that of another database."""
    try:
        connection = await listener.connect()
        try:
            if not listener.is_pooled:
                await connection.execute(HOLD_LOCK, channel)
                await check_database(connection, connection.get_server_pid(), listener.address, pool, channel=channel)
        finally:
            await close(connection)
    except OPENING_ERRORS as error:
        raise explain_refusal(listener.address, error) from error


async def inspect_database(url: str) -> StoreCondition:
    """Return the condition of a database. Raises ConfigError if it cannot be reached."""
    address = ServerAddress(url)
    migrations = read_migrations("postgres")
    try:
        connection = await PostgresConnector(address).connect()
        try:
            schema = await read_version(connection)
            refusal = await explain_missing_rights(connection, migrations)
            other_tables = await find_other_tables(connection, migrations)
            # Older schemas do not have the table.
            has_table = await connection.fetchval(_CAN_READ_KEYS)
            has_keys = has_table and await connection.fetchval("SELECT EXISTS (SELECT 1 FROM api_keys)")
            started = time.time()
            name, can_create, is_replica, is_read_only, now = await connection.fetchrow(_STATE)
            ended = time.time()
        finally:
            await close(connection)
    except OPENING_ERRORS as error:
        raise explain_refusal(address, error) from error
    if schema < migrations[-1].version and not can_create:
        refusal = f"its user may not create tables in the schema {name}. Grant it CREATE on the schema"
    if name is None:
        refusal = NO_SCHEMA
    if is_read_only:
        refusal = "the database is read-only. Turn default_transaction_read_only off for its user"
    if is_replica:
        refusal = "the server is a read-only replica. Use the URL of the primary"
    return StoreCondition(
        schema=schema,
        newest=migrations[-1].version,
        refusal=refusal,
        clock_offset=now - (started + ended) / 2,
        has_keys=has_keys,
        other_tables=tuple(other_tables),
    )
