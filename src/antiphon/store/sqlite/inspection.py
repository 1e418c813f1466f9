"""Inspection of a SQLite store that a server may be using."""

import sqlite3
from pathlib import Path

from antiphon.errors import ConfigError
from antiphon.store.condition import StoreCondition
from antiphon.store.migration_files import read_migrations
from antiphon.store.sqlite.migrations import find_other_tables
from antiphon.store.sqlite.open_errors import describe_open_error

_LOCK_SECONDS = 2.0


def inspect_file(path: Path, *, schema: str = "sqlite") -> StoreCondition:
    """Return the condition of an existing file with these tables. Raises ConfigError if it cannot be opened."""
    migrations = read_migrations(schema)
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_LOCK_SECONDS, isolation_level=None
        )
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            has_keys = _has_keys(connection)
            other_tables = find_other_tables(connection, migrations)
            refusal = _find_refusal(connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ConfigError(f"The store {path} cannot be opened: {describe_open_error(path, error)}.") from None
    return StoreCondition(
        schema=version,
        newest=migrations[-1].version,
        refusal=refusal,
        has_keys=has_keys,
        other_tables=tuple(other_tables),
    )


def _has_keys(connection: sqlite3.Connection) -> bool:
    # Older schemas do not have the table.
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'api_keys'").fetchone() is None:
        return False
    return connection.execute("SELECT 1 FROM api_keys LIMIT 1").fetchone() is not None


def _find_refusal(connection: sqlite3.Connection) -> str | None:
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        return str(error)
    return None
