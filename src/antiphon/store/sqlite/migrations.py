"""Migration of a SQLite file to the current schema. `PRAGMA user_version` is the version of a file."""

import sqlite3
from collections.abc import Iterator, Sequence

from antiphon.errors import ConfigError
from antiphon.store.migration_files import Migration, list_tables


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration], *, path: str) -> None:
    """Apply the missing migrations in one transaction. Several processes can call this at the same time."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _read_version(connection)
        check_version(version, migrations, path=path)
        other_tables = find_other_tables(connection, migrations)
        if other_tables:
            raise ConfigError(
                f"The store {path} cannot be opened: it has tables of another program ({', '.join(other_tables)}). "
                "Use another file."
            )
        for migration in migrations:
            if migration.version > version:
                _apply(connection, migration)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def check_version(version: int, migrations: Sequence[Migration], *, path: str) -> None:
    """Raise ConfigError if a file is of a newer version of this program."""
    newest = migrations[-1].version
    if version > newest:
        raise ConfigError(
            f"The store {path} has schema version {version}, but this version of Antiphon supports only versions "
            f"up to {newest}. Update Antiphon, or use another file."
        )


def find_other_tables(connection: sqlite3.Connection, migrations: Sequence[Migration]) -> list[str]:
    """Return the tables of another program with names that the migrations need. A new file has none of ours."""
    if _read_version(connection):
        return []
    known = set(list_tables(migrations))
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
    return [name for (name,) in tables if name in known]


def _read_version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _apply(connection: sqlite3.Connection, migration: Migration) -> None:
    for statement in _split(migration.script):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {migration.version}")


def _split(script: str) -> Iterator[str]:
    # executescript() cannot be used: it commits the current transaction.
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        yield statement
