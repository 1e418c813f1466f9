"""Export and import of a SQLite store: its database, that of files, the contents beside it, and the ledger."""

import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from antiphon.errors import ConfigError
from antiphon.store.files.content import append_piece, locate_below, read_pieces
from antiphon.store.ledger import migrate_ledger
from antiphon.store.migration_files import read_migrations
from antiphon.store.session import create_session_tables
from antiphon.store.sqlite.database import connect, create_file
from antiphon.store.sqlite.migrations import check_version, migrate
from antiphon.store.sqlite.open_errors import describe_open_error
from antiphon.store.transfer import (
    AGENT_TABLES,
    ALL_TABLES,
    CONTAINER_FILES,
    CONTENTS,
    RUN_TABLES,
    SESSION_TABLES,
    Table,
)

_CONTENT_IDS = "SELECT id FROM files UNION SELECT id FROM upload_parts ORDER BY id"
_CONTAINER_CONTENTS = "SELECT id, container_id, path FROM container_files ORDER BY id"
_ADD_WORDS = """
INSERT INTO chunk_words (rowid, scope, text) SELECT chunks.id, chunks.scope, chunks.text
FROM chunks JOIN entries ON entries.position = chunks.entry AND entries.status = 'completed'
"""


# The tables in the file of the store, and in the database of files.
_OWN_TABLES = [table for table in ALL_TABLES if not table.is_file_table and table not in AGENT_TABLES]
_FILE_TABLES = [table for table in ALL_TABLES if table.is_file_table and table is not CONTENTS]

# The tables of the ledger have names that others have, too.
_NAMES = {"agent_runs": "ledger.runs", "agent_entries": "ledger.entries"}
_RUN_IDS = "SELECT run_id FROM ledger.runs"
_SESSION_IDS = "SELECT session_id FROM {0}.agent_sessions UNION SELECT session_id FROM {0}.agent_session_items"
_HAS_AGENTS = f"SELECT EXISTS ({_RUN_IDS} UNION {_SESSION_IDS.format('ledger')})"
# The table that is created last.
_HAS_SESSIONS = "SELECT 1 FROM {}.sqlite_schema WHERE type = 'table' AND name = 'agent_session_items'"


class StoreFolders:
    """The folders beside a store: of files and their database, and of the files of containers.

    An import writes them, and deletes what it has written if it fails. Another process may write other files there.
    """

    def __init__(self, path: Path) -> None:
        path = path.absolute()
        self._files = path.with_name(f"{path.name}-files")
        self._contents = self._files / "contents"
        self._containers = path.with_name(f"{path.name}-containers")
        self.database = self._files / "files.db"
        self._is_new_database = False
        self._written: set[Path] = set()
        self._has_containers = False

    def locate_content(self, content_id: str) -> Path:
        """Return the path of a content. Raises ConfigError if it would be in another folder."""
        return locate_below(self._contents, content_id)

    def locate_container_file(self, container_id: str, path: str) -> Path:
        """Return the path of a file of a container. Raises ConfigError if it would be in another folder."""
        return locate_below(locate_below(self._containers, container_id) / "data", *path.split("/"))

    def has_link(self, container_id: str, path: str) -> bool:
        """Return True if a part of the path of a container's file is a link, which may lead to any file."""
        folder = locate_below(self._containers, container_id) / "data"
        return (folder / path).resolve() != folder.resolve() / path

    def create_database(self) -> None:
        """Create the database of files, for an import, or update its tables."""
        self._is_new_database = not self.database.exists()
        self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_file(self.database)
        connection = connect(self.database)
        try:
            migrate(connection, read_migrations("files"), path=str(self.database))
        finally:
            connection.close()

    def measure(self) -> int:
        """Return the size of all files."""
        folders = (self._files, self._containers)
        return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())

    def find_existing(self) -> Path | None:
        """Return a folder that exists."""
        return next((folder for folder in (self._files, self._containers) if folder.exists()), None)

    def write_content(self, content_id: str, data: bytes) -> None:
        """Add a piece to a content. The first one replaces what an import that was killed has left."""
        path = self.locate_content(content_id)
        if path not in self._written:
            self._written.add(path)
            path.unlink(missing_ok=True)
        append_piece(path, data)

    def replace_containers(self) -> None:
        """Delete the files of containers that an import which was killed has left.

        The store is locked and has no container. As the row of a container is written before its files, no process
        needs them.
        """
        self._has_containers = True
        shutil.rmtree(self._containers, ignore_errors=True)

    def delete_written(self) -> None:
        """Delete the contents of files, and the files of containers, that a failed import has written."""
        for path in self._written:
            with suppress(OSError):
                path.unlink()
        if self._has_containers:
            shutil.rmtree(self._containers, ignore_errors=True)

    def delete_unused(self) -> None:
        """Delete the database of files that the import has created, and its folder, if they have no files.

        The database must be closed. If it still has a log, a server that was started meanwhile uses it.
        """
        log = self.database.with_name(f"{self.database.name}-wal")
        if self._is_new_database and not log.exists():
            with suppress(OSError):  # it has files
                self._contents.rmdir()
                _delete_database(self.database)
                self._files.rmdir()


class SqliteTransfer:
    """A connection to a store for an export or an import.

    `has_files`: the database of files is attached to it. `has_ledger`: that of agent runs is. `session_schemas` are the
    databases that have sessions of agents. If two have the same session, that of the first one is exported.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        folders: StoreFolders,
        *,
        has_files: bool,
        has_ledger: bool,
        session_schemas: Sequence[str],
    ) -> None:
        self._connection = connection
        self._folders = folders
        self._has_files = has_files
        self._has_ledger = has_ledger
        self._session_schemas = session_schemas
        self._known_ids: dict[str, set[str]] = {}
        # Ids of contents of container files, with their paths and times, in an import.
        self._container_files: dict[str, tuple[Path, int]] = {}

    async def read_schema(self) -> tuple[int, int]:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        return version, read_migrations("sqlite")[-1].version

    async def describe(self) -> dict[str, Any]:
        version, newest = await self.read_schema()
        (pages,), (page_size,) = (
            self._connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
        )
        rows = {}
        if version == newest:
            rows = {table.name: self._count(table) for table in ALL_TABLES}
        size = pages * page_size + self._folders.measure()
        return {"schema": version, "newest": newest, "bytes": size, "rows": rows}

    def _count(self, table: Table) -> int:
        if table is CONTENTS:
            return sum(1 for _ in self._list_contents())
        if not self._has(table):
            return 0
        count: int = self._connection.execute(f"SELECT count(*) FROM {self._name(table)}").fetchone()[0]
        return count

    def _has(self, table: Table) -> bool:
        if table in RUN_TABLES:
            return self._has_ledger
        if table in SESSION_TABLES:
            return bool(self._session_schemas)
        return self._has_files or not table.is_file_table

    def _name(self, table: Table) -> str:
        """Return the name of a table in the database, or a query that has its rows."""
        if table not in SESSION_TABLES:
            return _NAMES.get(table.name, table.name)
        first, *others = self._session_schemas
        if not others:
            return f"{first}.{table.name}"
        known = _SESSION_IDS.format(first)
        added = (f" UNION ALL SELECT * FROM {each}.{table.name} WHERE session_id NOT IN ({known})" for each in others)
        return f"(SELECT * FROM {first}.{table.name}{''.join(added)})"

    async def export_rows(self, table: Table) -> AsyncIterator[Sequence[Any]]:
        if table is CONTENTS:
            for row in self._read_contents():
                yield row
        elif self._has(table):
            columns = ", ".join(column.name for column in table.columns)
            order = "rowid" if table.name == "responses" else table.order  # it has no column `position`
            for row in self._connection.execute(f"SELECT {columns} FROM {self._name(table)} ORDER BY {order}"):
                # In another store the content needs an id.
                yield (*row[:-1], row[2]) if table is CONTAINER_FILES else row

    def _list_contents(self) -> Iterator[tuple[str, Path]]:
        """Yield the ids and paths of all contents."""
        ids = self._connection.execute(_CONTENT_IDS).fetchall() if self._has_files else []
        found = [(content_id, self._folders.locate_content(content_id)) for (content_id,) in ids]
        rows = self._connection.execute(_CONTAINER_CONTENTS).fetchall()
        found += [
            (file_id, self._folders.locate_container_file(container, path))
            for file_id, container, path in rows
            if not self._folders.has_link(container, path)
        ]
        yield from sorted(found)

    def _read_contents(self) -> Iterator[Sequence[Any]]:
        # A content that is lost on the disk, or that code replaced with a link, has no pieces. Its row is exported, and
        # reading it fails as before.
        for content_id, path in self._list_contents():
            for number, data in read_pieces(path):
                yield content_id, number, data

    async def import_rows(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        if table is CONTENTS:
            self._write_contents(rows)
            return
        if table is CONTAINER_FILES:
            rows = [self._locate_file(row) for row in rows]
        elif table in AGENT_TABLES:
            known = self._list_known(_RUN_IDS if table in RUN_TABLES else _SESSION_IDS.format("ledger"))
            rows = [row for row in rows if row[0] not in known]
        columns = ", ".join(column.name for column in table.columns)
        values = ", ".join("?" * len(table.columns))
        self._connection.executemany(f"INSERT INTO {self._name(table)} ({columns}) VALUES ({values})", rows)

    def _list_known(self, query: str) -> set[str]:
        """Return the ids of the runs or sessions of agents before the import."""
        if query not in self._known_ids:
            self._known_ids[query] = {known for (known,) in self._connection.execute(query)}
        return self._known_ids[query]

    def _locate_file(self, row: Sequence[Any]) -> Sequence[Any]:
        """Remember where the content of a container's file belongs."""
        _, container_id, _, path, _, _, _, modified_ns, _, content = row
        if content is not None:
            self._container_files[content] = self._folders.locate_container_file(container_id, path), modified_ns
        return (*row[:-1], None)

    def _write_contents(self, rows: Sequence[Sequence[Any]]) -> None:
        for content_id, _, data in rows:
            if content_id not in self._container_files:
                self._folders.write_content(content_id, data)
                continue
            path, modified_ns = self._container_files[content_id]
            append_piece(path, data)
            os.utime(path, ns=(modified_ns, modified_ns))

    def finish_import(self) -> bool:
        """Fill the text index. Return False if there is no file."""
        self._connection.execute(_ADD_WORDS)
        return _find_rows(self._connection, _FILE_TABLES) is not None


@contextmanager
def open_sqlite(path: Path, *, ledger: Path, is_import: bool) -> Iterator[SqliteTransfer]:
    """Yield a transfer in one transaction. An export reads one state of the store. A failed import changes nothing.

    `ledger` is the file with the runs and sessions of agents. An import creates it if there are any. Sessions that a
    program has in the file of the store are exported, too.
    """
    is_new = is_import and not path.exists()
    if not is_import and not path.is_file():
        raise ConfigError(f"There is no store at {path}.")
    try:
        create_file(path)
        connection = connect(path)
        try:
            if is_import:
                with _import(connection, path, ledger, is_new=is_new) as transfer:
                    yield transfer
            else:
                yield _start_export(connection, StoreFolders(path), ledger)
                connection.execute("ROLLBACK")
        finally:
            connection.close()
    except (sqlite3.IntegrityError, OverflowError) as error:
        raise ConfigError(f"The store {path} refuses a row: {error}. Nothing was imported.") from error
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"The store {path} cannot be used: {describe_open_error(path, error)}") from error


def _start_export(connection: sqlite3.Connection, folders: StoreFolders, ledger: Path) -> SqliteTransfer:
    has_files = folders.database.is_file() and _attach_files(connection, folders.database)
    has_ledger = ledger.is_file()
    if has_ledger:
        _attach_ledger(connection, ledger)
    connection.execute("BEGIN")
    schemas = [each for each in ("ledger", "main") if each == "main" or has_ledger]
    return SqliteTransfer(
        connection,
        folders,
        has_files=has_files,
        has_ledger=has_ledger,
        session_schemas=[each for each in schemas if connection.execute(_HAS_SESSIONS.format(each)).fetchone()],
    )


def _attach_files(connection: sqlite3.Connection, path: Path) -> bool:
    """Attach the database of files. Return False if it has no tables, because its creation failed."""
    try:
        connection.execute("ATTACH DATABASE ? AS file_database", (str(path),))
        (version,) = connection.execute("PRAGMA file_database.user_version").fetchone()
    except sqlite3.Error as error:
        raise ConfigError(f"The store {path} cannot be used: {describe_open_error(path, error)}") from error
    check_version(version, read_migrations("files"), path=str(path))
    return bool(version)


def _attach_ledger(connection: sqlite3.Connection, ledger: Path) -> None:
    # After the database of files: both have a table `entries`, and a name without a database means the first one.
    migrate_ledger(ledger)
    connection.execute("ATTACH DATABASE ? AS ledger", (str(ledger),))


@contextmanager
def _import(connection: sqlite3.Connection, path: Path, ledger: Path, *, is_new: bool) -> Iterator[SqliteTransfer]:
    opened = path.stat()
    migrate(connection, read_migrations("sqlite"), path=str(path))
    folders = StoreFolders(path)
    # Until the end no other process writes to the store or starts an import. One that failed may have deleted the file.
    connection.execute("BEGIN IMMEDIATE")
    if not os.path.samestat(opened, path.stat()):
        raise ConfigError(f"The store {path} was replaced while the import waited for it. Import again.")
    _check_empty(connection, path, _OWN_TABLES)
    is_new_ledger = not ledger.exists()
    is_complete = has_files = has_agents = False
    try:
        _check_folders(folders, path)
        _lock_files(connection, folders)
        _check_empty(connection, path, _FILE_TABLES)
        folders.replace_containers()
        _attach_ledger(connection, ledger)
        create_session_tables(connection, schema="ledger")
        transfer = SqliteTransfer(connection, folders, has_files=True, has_ledger=True, session_schemas=["ledger"])
        yield transfer
        has_files = transfer.finish_import()
        has_agents = connection.execute(_HAS_AGENTS).fetchone()[0]
        is_complete = True
        connection.execute("COMMIT")
    except BaseException:
        # An interrupt during the commit is raised after it.
        is_committed = is_complete and not connection.in_transaction
        if not is_committed or _find_rows(connection, _OWN_TABLES + _FILE_TABLES) is None:
            has_files = has_agents = False
            folders.delete_written()
            if is_new:
                _delete_database(path)
        raise
    finally:
        _detach(connection)
        if is_new_ledger and not has_agents:
            _delete_database(ledger)
        if not has_files:
            folders.delete_unused()


def _lock_files(connection: sqlite3.Connection, folders: StoreFolders) -> None:
    """Attach the database of files in a transaction, and lock it: until the end no other process adds a file."""
    try:
        folders.create_database()
        connection.execute("ATTACH DATABASE ? AS file_database", (str(folders.database),))
        connection.execute("DELETE FROM file_database.files WHERE false")
    except sqlite3.Error as error:
        reason = describe_open_error(folders.database, error)
        raise ConfigError(f"The store {folders.database} cannot be used: {reason}") from error


def _detach(connection: sqlite3.Connection) -> None:
    """Roll back a failed import, and close the database of files and the ledger."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")
    for name in ("file_database", "ledger"):
        with suppress(sqlite3.OperationalError):  # it could not be attached
            connection.execute(f"DETACH DATABASE {name}")


def _delete_database(path: Path) -> None:
    for ending in ("", "-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)


def _check_folders(folders: StoreFolders, path: Path) -> None:
    """Raise ConfigError if there are files beside the store without their database."""
    existing = None if folders.database.exists() else folders.find_existing()
    if existing is not None:
        raise ConfigError(
            f"The store {path} is not empty: there is {existing}. Import into a new store, or delete the folder if "
            "nothing needs it."
        )


def _check_empty(connection: sqlite3.Connection, path: Path, tables: Sequence[Table]) -> None:
    table = _find_rows(connection, tables)
    if table is not None:
        raise ConfigError(f"The store {path} is not empty: it has {table.name}. Import into a new store.")


def _find_rows(connection: sqlite3.Connection, tables: Sequence[Table]) -> Table | None:
    """Return a table that has rows."""
    return next((each for each in tables if connection.execute(f"SELECT 1 FROM {each.name} LIMIT 1").fetchone()), None)
