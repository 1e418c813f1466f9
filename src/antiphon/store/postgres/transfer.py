"""Export and import of a PostgreSQL store."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.errors import ConfigError
from antiphon.store.files.content import append_piece, locate_below, read_pieces
from antiphon.store.migration_files import read_migrations
from antiphon.store.postgres.connection import (
    OPENING_ERRORS,
    PostgresConnector,
    ServerAddress,
    close,
    explain_refusal,
    summarize_error,
)
from antiphon.store.postgres.driver import asyncpg
from antiphon.store.postgres.migrations import migrate, read_version
from antiphon.store.postgres.steps import make_item_key, translate
from antiphon.store.postgres.words import INSERT_WORDS, make_scope_word, split_text
from antiphon.store.transfer import AGENT_TABLES, ALL_TABLES, CHUNKS, CONTENTS, RUN_TABLES, Table

if TYPE_CHECKING:
    from asyncpg import Connection

_SIZE = """
SELECT coalesce(sum(pg_total_relation_size(quote_ident(tablename)::regclass)), 0)::bigint
FROM pg_tables WHERE schemaname = current_schema()
"""

# Rows that are read at once.
_FETCH_ROWS = 200
_FETCH_PIECES = 8

_EXPORT_CONTENTS = """
SELECT id, coalesce(piece, 0), coalesce(data, '') FROM contents LEFT JOIN content_pieces ON content = number
WHERE id IS NOT NULL ORDER BY id, piece
"""
_CONTENT_IDS = """
SELECT id FROM files UNION SELECT id FROM upload_parts
UNION SELECT content FROM container_files WHERE content IS NOT NULL ORDER BY 1
"""
_ADD_CONTENT = """
INSERT INTO contents (id, created_at) VALUES ($1, extract(epoch FROM clock_timestamp()))
"""
_ADD_PIECE = """
INSERT INTO content_pieces (content, piece, data) SELECT number, $2, $3 FROM contents WHERE id = $1
"""
_RUN_IDS = "SELECT run_id FROM agent_runs"
_SESSION_IDS = "SELECT session_id FROM agent_sessions UNION SELECT session_id FROM agent_session_items"
# Tables whose positions are imported.
_POSITIONS = {
    "files": "position",
    "upload_parts": "position",
    "vector_stores": "position",
    "entries": "position",
    "chunks": "id",
}


class PostgresTransfer:
    """A connection to a store for an export or an import. `folder` has the contents if the database does not."""

    def __init__(self, connection: "Connection[Any]", folder: Path | None = None) -> None:
        self._connection = connection
        self._folder = None if folder is None else folder / "contents"
        self._known_ids: dict[str, set[str]] = {}
        self._written: set[Path] = set()

    async def read_schema(self) -> tuple[int, int]:
        return await read_version(self._connection), read_migrations("postgres")[-1].version

    async def describe(self) -> dict[str, Any]:
        version, newest = await self.read_schema()
        rows = {}
        if version == newest:
            rows = {table.name: await self._count(table) for table in ALL_TABLES}
        return {"schema": version, "newest": newest, "bytes": await self._connection.fetchval(_SIZE), "rows": rows}

    async def _count(self, table: Table) -> int:
        count: int = await self._connection.fetchval(f"SELECT count(*) FROM {table.name}")
        return count

    async def export_rows(self, table: Table) -> AsyncIterator[Sequence[Any]]:
        columns = ", ".join(column.name for column in table.columns)
        query = f"SELECT {columns} FROM {table.name} ORDER BY {table.order}"
        rows = _FETCH_ROWS
        if table is CONTENTS and self._folder is not None:
            for (content_id,) in await self._connection.fetch(_CONTENT_IDS):
                for number, data in read_pieces(locate_below(self._folder, content_id)):
                    yield content_id, number, data
            return
        if table is CONTENTS:
            query, rows = _EXPORT_CONTENTS, _FETCH_PIECES
        async for row in self._connection.cursor(query, prefetch=rows):
            yield tuple(row)

    async def import_rows(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        if table is CONTENTS:
            await self._import_contents(rows)
            return
        if table in AGENT_TABLES:
            known = await self._list_known(_RUN_IDS if table in RUN_TABLES else _SESSION_IDS)
            rows = [row for row in rows if row[0] not in known]
        columns = ", ".join(column.name for column in table.columns)
        values = ", ".join(f"${number}" for number in range(1, len(table.columns) + 1))
        converted = [_convert_row(table, row) for row in rows]
        await self._connection.executemany(f"INSERT INTO {table.name} ({columns}) VALUES ({values})", converted)
        if table is CHUNKS:
            words = [(row[0], row[1], split_text(row[4]), make_scope_word(row[3])) for row in rows]
            await self._connection.executemany(
                translate(INSERT_WORDS),
                [(chunk, entry, len(text) + 1, " ".join(text), scope) for chunk, entry, text, scope in words],
            )

    async def _list_known(self, query: str) -> set[str]:
        """Return the ids of the runs or sessions of agents before the import."""
        if query not in self._known_ids:
            self._known_ids[query] = {known for (known,) in await self._connection.fetch(query)}
        return self._known_ids[query]

    async def _import_contents(self, rows: Sequence[Sequence[Any]]) -> None:
        if self._folder is not None:
            for content_id, _, data in rows:
                path = locate_below(self._folder, content_id)
                self._written.add(path)
                append_piece(path, data)
            return
        first = [(content_id,) for content_id, piece, _ in rows if piece == 0]
        await self._connection.executemany(_ADD_CONTENT, first)
        for row in rows:
            if row[2]:
                await self._connection.execute(_ADD_PIECE, *row)

    def delete_written(self) -> None:
        """Delete the contents that a failed import has written to the folder."""
        for path in self._written:
            path.unlink(missing_ok=True)
        if self._folder is not None and self._written:
            with suppress(OSError):  # it has contents of others
                self._folder.rmdir()

    async def finish_import(self) -> None:
        """Let new rows get positions after the imported ones."""
        for table, column in _POSITIONS.items():
            await self._connection.execute(
                f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), "
                f"greatest((SELECT max({column}) FROM {table}), 1))"
            )
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
async def open_postgres(url: str, *, is_import: bool, folder: Path | None = None) -> "AsyncIterator[PostgresTransfer]":
    """Yield a transfer in one transaction. An export reads one state of the store. A failed import changes nothing.

    `folder` is the setting `files.directory`. An import needs an empty one.
    """
    _check_folder(folder, is_import=is_import)
    address = ServerAddress(url)
    try:
        connection = await PostgresConnector(address).connect()
        try:
            if is_import:
                await migrate(connection, read_migrations("postgres"), name=str(address))
            isolation: Any = "read_committed" if is_import else "repeatable_read"
            async with connection.transaction(isolation=isolation, readonly=not is_import):
                # The transfer waits for the reader or the writer of the file.
                await connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
                transfer = PostgresTransfer(connection, folder)
                try:
                    if is_import:
                        await _check_empty(connection, address)
                    yield transfer
                    if is_import:
                        await transfer.finish_import()
                except BaseException:
                    transfer.delete_written()
                    raise
        finally:
            await close(connection)
    except (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError) as error:
        raise ConfigError(
            f"The store {address} refuses a row: {summarize_error(error)}. Nothing was imported."
        ) from error
    except OPENING_ERRORS as error:
        raise explain_refusal(address, error) from error


def _check_folder(folder: Path | None, *, is_import: bool) -> None:
    if is_import and folder is not None and (folder / "contents").exists():
        raise ConfigError(
            f"files.directory: {folder} is not empty: it has the folder contents. Import into a new folder, or delete "
            "contents if nothing needs it: an import that was killed leaves it."
        )


async def _check_empty(connection: "Connection[Any]", address: ServerAddress) -> None:
    for table in ALL_TABLES:
        await connection.execute(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE")
        if table not in AGENT_TABLES and await connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {table.name})"):
            raise ConfigError(f"The store {address} is not empty: it has {table.name}. Import into a new store.")
