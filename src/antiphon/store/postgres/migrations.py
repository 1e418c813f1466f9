"""Migration of a PostgreSQL database to the current schema. The table `antiphon_schema` has the version."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from antiphon.errors import ConfigError
from antiphon.store.migration_files import Migration, list_tables
from antiphon.store.postgres.connection import run_transaction
from antiphon.store.postgres.driver import asyncpg

if TYPE_CHECKING:
    from asyncpg import Connection

# The key of the advisory lock under which one process migrates. The schema is part of the key.
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('antiphon schema ' || current_schema(), 0))"

# Not to_regclass(): it may use a cache from before the wait for the lock.
_HAS_TABLE = """
SELECT EXISTS (SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'antiphon_schema')
"""

_CREATE = """
CREATE TABLE antiphon_schema (version integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL)
"""

_STATE = "SELECT current_schema(), pg_is_in_recovery(), current_setting('transaction_read_only')::bool"

NO_SCHEMA = (
    "the search_path of its user has no schema that exists and that it may use. Create the schema, grant it USAGE on "
    "the schema, or correct the search_path"
)

_VERSION = "SELECT coalesce(max(version), 0) FROM antiphon_schema"

_RECORD = "INSERT INTO antiphon_schema (version, name, applied_at) VALUES ($1, $2, now())"

# has_table_privilege() with a list is true if there is any of the rights.
_FORBIDDEN = """
SELECT relname::text FROM pg_class
WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) AND relname = ANY ($1::text[])
    AND NOT (has_table_privilege(oid, 'SELECT') AND has_table_privilege(oid, 'INSERT')
        AND has_table_privilege(oid, 'UPDATE') AND has_table_privilege(oid, 'DELETE'))
ORDER BY relname
"""
_SHOWN_TABLES = 3

_EXISTING = """
SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema() AND tablename = ANY ($1::text[])
ORDER BY tablename
"""


async def read_version(connection: "Connection[Any]") -> int:
    """Return the version of the schema, or 0 if there is none."""
    if not await connection.fetchval(_HAS_TABLE):
        return 0
    version: int = await connection.fetchval(_VERSION)
    return version


async def migrate(connection: "Connection[Any]", migrations: Sequence[Migration], *, name: str) -> str:
    """Apply the missing migrations in one transaction. Return the name of the schema.

    Any number of processes can call this at the same time: one migrates, and the others wait for it. A database with
    the current version is not locked, so a user without the right to create tables can use it.
    """
    newest = migrations[-1].version
    async with run_transaction(connection):
        schema, is_replica, is_read_only = await connection.fetchrow(_STATE)
        if schema is None:
            raise ConfigError(f"The store {name} cannot be opened: {NO_SCHEMA}.")
        if is_replica:
            raise ConfigError(
                f"The store {name} cannot be opened: the server is a read-only replica. Use the URL of the primary."
            )
        if is_read_only:
            raise ConfigError(
                f"The store {name} cannot be opened: the database is read-only. Turn default_transaction_read_only off "
                "for its user."
            )
        version = _check_version(await read_version(connection), newest, name=name)
    if version < newest:
        async with run_transaction(connection):
            await connection.execute(_LOCK)
            version = _check_version(await read_version(connection), newest, name=name)
            if version == 0:
                await connection.execute(_CREATE)
            for migration in migrations[version:]:
                await _apply(connection, migration, name=name)
    return str(schema)


async def explain_missing_rights(connection: "Connection[Any]", migrations: Sequence[Migration]) -> str | None:
    """Return the reason why the user cannot read and change all tables, with the remedy, or None if it can."""
    forbidden = [
        table for (table,) in await connection.fetch(_FORBIDDEN, ["antiphon_schema", *list_tables(migrations)])
    ]
    if not forbidden:
        return None
    more = f" and {len(forbidden) - _SHOWN_TABLES} more" if len(forbidden) > _SHOWN_TABLES else ""
    return (
        f"its user may not read and change all tables ({', '.join(forbidden[:_SHOWN_TABLES])}{more}). "
        "Grant it SELECT, INSERT, UPDATE and DELETE on all tables of the schema"
    )


async def find_other_tables(connection: "Connection[Any]", migrations: Sequence[Migration]) -> list[str]:
    """Return the tables of another program with names that the migrations need. A new schema has none of ours."""
    if await read_version(connection):
        return []
    return [table for (table,) in await connection.fetch(_EXISTING, list_tables(migrations))]


async def _apply(connection: "Connection[Any]", migration: Migration, *, name: str) -> None:
    try:
        await connection.execute(migration.script)
    except (asyncpg.DuplicateTableError, asyncpg.DuplicateFunctionError, asyncpg.DuplicateObjectError) as error:
        raise ConfigError(
            f"The store {name} cannot be opened: its schema has other tables ({error}). "
            "Use a database or a schema of its own."
        ) from None
    await connection.execute(_RECORD, migration.version, migration.name)


def _check_version(version: int, newest: int, *, name: str) -> int:
    if version > newest:
        raise ConfigError(
            f"The store {name} has schema version {version}, but this version of Antiphon supports only versions "
            f"up to {newest}. Update Antiphon, or use another database."
        )
    return version
