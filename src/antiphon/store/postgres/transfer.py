"""Export and import of a PostgreSQL store."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from antiphon.errors import ConfigError
from antiphon.store.migration_files import read_migrations
from antiphon.store.postgres.connection import PostgresConnector, ServerAddress, close, explain_refusal, make_item_key
from antiphon.store.postgres.migrations import migrate, read_version
from antiphon.store.transfer import TABLES, Table

if TYPE_CHECKING:
    from asyncpg import Connection

_SIZE = """
SELECT coalesce(sum(pg_total_relation_size(quote_ident(tablename)::regclass)), 0)::bigint
FROM pg_tables WHERE schemaname = current_schema()
"""

# Rows that are read at once.
_FETCH_ROWS = 200


class PostgresTransfer:
    """A connection to a store for an export or an import."""

    def __init__(self, connection: "Connection[Any]") -> None:
        self._connection = connection

    async def describe(self) -> dict[str, Any]:
        version = await read_version(self._connection)
        newest = read_migrations("postgres")[-1].version
        rows = {}
        if version == newest:
            rows = {table.name: await self._count(table) for table in TABLES}
        return {"schema": version, "newest": newest, "bytes": await self._connection.fetchval(_SIZE), "rows": rows}

    async def _count(self, table: Table) -> int:
        count: int = await self._connection.fetchval(f"SELECT count(*) FROM {table.name}")
        return count

    async def export_rows(self, table: Table) -> AsyncIterator[Sequence[Any]]:
        columns = ", ".join(column.name for column in table.columns)
        query = f"SELECT {columns} FROM {table.name} ORDER BY {table.order}"
        async for row in self._connection.cursor(query, prefetch=_FETCH_ROWS):
            yield tuple(row)

    async def import_rows(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        columns = ", ".join(column.name for column in table.columns)
        values = ", ".join(f"${number}" for number in range(1, len(table.columns) + 1))
        converted = [_convert_row(table, row) for row in rows]
        await self._connection.executemany(f"INSERT INTO {table.name} ({columns}) VALUES ({values})", converted)

    async def finish_import(self) -> None:
        """Let new items get positions after the imported ones."""
        await self._connection.execute(
            "SELECT setval(pg_get_serial_sequence('items', 'position'), greatest("
            "(SELECT max(position) FROM items), (SELECT max(position) FROM deleted_items), 1))"
        )


def _convert_row(table: Table, row: Sequence[Any]) -> list[Any]:
    """Return the values of a row as the columns take them."""
    return [
        make_item_key(value) if column.name == "item_id" and value is not None else value
        for column, value in zip(table.columns, row, strict=True)
    ]


@asynccontextmanager
async def open_postgres(url: str, *, is_import: bool) -> "AsyncIterator[PostgresTransfer]":
    """Yield a transfer in one transaction. An export reads one state of the store. A failed import changes nothing."""
    address = ServerAddress(url)
    try:
        connection = await PostgresConnector(address).connect()
        try:
            if is_import:
                await migrate(connection, read_migrations("postgres"), name=str(address))
            isolation: Any = "read_committed" if is_import else "repeatable_read"
            async with connection.transaction(isolation=isolation, readonly=not is_import):
                transfer = PostgresTransfer(connection)
                if is_import:
                    await _check_empty(connection, address)
                yield transfer
                if is_import:
                    await transfer.finish_import()
        finally:
            await close(connection)
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise explain_refusal(address, error) from error


async def _check_empty(connection: "Connection[Any]", address: ServerAddress) -> None:
    for table in TABLES:
        await connection.execute(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE")
        if await connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {table.name})"):
            raise ConfigError(f"The store {address} is not empty: it has {table.name}. Import into a new store.")
