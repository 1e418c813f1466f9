"""Construction of a store from its URL."""

import time
from collections.abc import Callable
from pathlib import Path

from antiphon.errors import ConfigError
from antiphon.ledger import Ledger
from antiphon.store.base import Store
from antiphon.store.files.location import FileLocation
from antiphon.store.limits import DEFAULT_LIMITS, StoreLimits

FORMS = "sqlite:///relative/path.db, sqlite:////absolute/path.db, postgresql://user:password@host/name or memory:"


def locate_store(
    url: str,
    *,
    now: Callable[[], float] | None = None,
    configuration_id: str | None = None,
    limits: StoreLimits = DEFAULT_LIMITS,
) -> Store:
    """Return the store for a URL. It is not open yet.

    `now` is the clock for expiry and leases, for tests. `configuration_id` is described at `RunQueue`.

    Error messages do not contain the URL, because it may contain a password. Only the module of this store is imported.
    """
    scheme, colon, rest = url.partition(":")
    if not colon:
        raise ConfigError(f"The store must be a URL: {FORMS}.")
    if scheme == "memory":
        if rest:
            raise ConfigError("The URL of the memory store is memory: with nothing after the colon.")
        from antiphon.store.memory.store import MemoryStore

        return MemoryStore(now=now or time.time, limits=limits)
    if scheme == "sqlite":
        from antiphon.store.sqlite.store import SqliteStore

        return SqliteStore(_parse_path(rest), now=now or time.time, configuration_id=configuration_id, limits=limits)
    if is_postgres(url):
        from antiphon.store.postgres.store import PostgresStore

        return PostgresStore(url, now=now, configuration_id=configuration_id, limits=limits)
    raise ConfigError(f"There is no {scheme!r} store. Use {FORMS}.")


def locate_existing_store(url: str) -> Store:
    """Return the store for a URL, without creating its file. Raises ConfigError if there is no such file."""
    path = find_missing_file(url)
    if path is not None:
        raise ConfigError(f"There is no store at {path}.")
    return locate_store(url)


def find_missing_file(url: str) -> Path | None:
    """Return the path of the file of a SQLite store, if there is no such file."""
    path: Path | None = getattr(locate_store(url), "path", None)
    return None if path is None or path.is_file() else path


def locate_files(url: str, *, contents: str = "") -> FileLocation:
    """Return the location of the files that belong to a store: its database, or a folder beside a SQLite file.

    `contents` is a folder for the contents of files, instead of a PostgreSQL database.
    """
    scheme, _, rest = url.partition(":")
    if is_postgres(url):
        return FileLocation(Path(contents) if contents else None, url)
    if contents:
        raise ConfigError("files.directory: only a PostgreSQL store has a folder for the contents of files.")
    if scheme == "memory":
        return FileLocation()
    path = _parse_path(rest)
    return FileLocation(path.with_name(f"{path.name}-files"))


def locate_ledger(url: str, path: Path) -> Ledger:
    """Return the ledger of agent runs: in the database of a PostgreSQL store, else in a SQLite file at `path`."""
    if is_postgres(url):
        from antiphon.store.postgres.ledger import PostgresLedger

        return PostgresLedger(url)
    from antiphon.store.ledger import SqliteLedger

    return SqliteLedger(path)


def is_postgres(url: str) -> bool:
    """Return True if this is the URL of a PostgreSQL database."""
    return url.partition(":")[0] in ("postgresql", "postgres")


def locate_containers(store: Store) -> Path | None:
    """Return the folder for the files of containers, beside the file of a store. None means a temporary one."""
    path: Path | None = getattr(store, "path", None)
    return None if path is None else path.absolute().with_name(f"{path.name}-containers")


def _parse_path(rest: str) -> Path:
    path = rest.removeprefix("///")
    if path == rest or not path:
        raise ConfigError(
            "The URL of a SQLite store has three slashes and a path: sqlite:///relative.db or sqlite:////absolute.db"
        )
    if path == ":memory:":
        raise ConfigError("Use memory: for a store without a file.")
    if "?" in path or "#" in path:
        raise ConfigError("The URL of a SQLite store has no options: '?' and '#' are not allowed.")
    if path.startswith("~"):
        raise ConfigError("'~' is not expanded in the URL of a SQLite store. Use the full path.")
    return Path(path)
