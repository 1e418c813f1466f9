"""DBOS's own database: what a file needs to be one that several processes can share, and be killed with."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.errors import ConfigError

if TYPE_CHECKING:
    import sqlalchemy

_SQLITE = "sqlite:///"
# After a failover nobody answers on the old connections, and nobody closes them: seconds, but for the last.
_CONNECTION_LIMITS = {
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
# How long a file may be locked by others that start at the same time.
_PATIENCE_SECONDS = 10.0
_PAUSE_SECONDS = 0.05


def is_file(url: str) -> bool:
    return url.startswith(_SQLITE)


def connect(url: str) -> "sqlalchemy.Engine | None":
    """The engine for a SQLite file. For anything else None: DBOS makes that itself.

    The one that it would make begins a transaction with the first write. What it has read before that, how many are at
    work for instance, may not be so any more, and tables are made one by one.
    """
    if not is_file(url):
        return None
    prepare(url)

    import sqlalchemy  # takes a while

    engine = sqlalchemy.create_engine(url)

    @sqlalchemy.event.listens_for(engine, "connect")
    def open_connection(connection: Any, record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA busy_timeout = 30000")
        connection.execute("PRAGMA foreign_keys = ON")

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection: "sqlalchemy.Connection") -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def prepare(url: str) -> None:
    """Make the file if there is none. Raises ConfigError if it is of no use."""
    path = _find_path(url)
    try:
        _make_file(path)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"dbos: its database {path} cannot be used: {error}") from None


def identify(url: str) -> tuple[int, int] | None:
    """Which file this is, whatever its name. None if there is none, and for a database that is no file.

    Connections that are open go on with a file that was deleted, and new ones make another.
    """
    if not is_file(url):
        return None
    try:
        found = _find_path(url).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def complete(url: str) -> str:
    """For a server, with limits of how long a connection that has gone silent is waited for, unless it has its own."""
    if is_file(url):
        return url

    import sqlalchemy

    parsed = sqlalchemy.make_url(url)
    missing = {name: value for name, value in _CONNECTION_LIMITS.items() if name not in parsed.query}
    return parsed.update_query_dict(missing).render_as_string(hide_password=False)


def _find_path(url: str) -> Path:
    return Path(url.removeprefix(_SQLITE))


def _make_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with closing(sqlite3.connect(path)) as connection:
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")  # it stays with the file
            except sqlite3.OperationalError as error:  # this does not wait for others that do the same
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_SECONDS)
            else:
                return
