"""Export and import of a SQLite store."""

import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from antiphon.errors import ConfigError
from antiphon.store.sqlite.database import connect, create_file
from antiphon.store.sqlite.migrations import migrate, read_migrations
from antiphon.store.transfer import TABLES, Column, Table

# Tables whose rows are ordered by their arrival, which SQLite has in the row id.
_ROWID = {"responses": "rowid", "prompts": "place", "runs": "place", "items": "place"}


class SqliteTransfer:
    """A connection to a store for an export or an import."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def describe(self) -> dict[str, Any]:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        (pages,), (page_size,) = (
            self._connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
        )
        rows = {}
        if version == read_migrations()[-1].version:
            for table in TABLES:
                (rows[table.name],) = self._connection.execute(f"SELECT count(*) FROM {table.name}").fetchone()
        return {"schema": version, "newest": read_migrations()[-1].version, "bytes": pages * page_size, "rows": rows}

    async def export_rows(self, table: Table) -> AsyncIterator[Sequence[Any]]:
        columns = ", ".join(_name(column) for column in table.columns)
        order = _ROWID.get(table.name) or table.order.replace("position", "place")
        for row in self._connection.execute(f"SELECT {columns} FROM {table.name} ORDER BY {order}"):
            yield row

    async def import_rows(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        columns = ", ".join(_name(column) for column in table.columns)
        values = ", ".join("?" * len(table.columns))
        self._connection.executemany(f"INSERT INTO {table.name} ({columns}) VALUES ({values})", rows)


def _name(column: Column) -> str:
    return column.old_name or column.name


@contextmanager
def open_sqlite(path: Path, *, is_import: bool) -> Iterator[SqliteTransfer]:
    """Yield a transfer in one transaction. An export reads one state of the store. A failed import changes nothing."""
    if not is_import and not path.is_file():
        raise ConfigError(f"There is no store at {path}.")
    try:
        create_file(path)
        connection = connect(path)
        try:
            if is_import:
                migrate(connection, read_migrations(), path=str(path))
            connection.execute("BEGIN IMMEDIATE" if is_import else "BEGIN")
            if is_import:
                _check_empty(connection, path)
            yield SqliteTransfer(connection)
            connection.execute("COMMIT" if is_import else "ROLLBACK")
        finally:
            connection.close()
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"The store {path} cannot be used: {error}") from error


def _check_empty(connection: sqlite3.Connection, path: Path) -> None:
    for table in TABLES:
        if connection.execute(f"SELECT 1 FROM {table.name} LIMIT 1").fetchone():
            raise ConfigError(f"The store {path} is not empty: it has {table.name}. Import into a new store.")
