"""Which store a URL means."""

import time
from collections.abc import Callable
from pathlib import Path

from antiphon.errors import ConfigError
from antiphon.store.base import Store
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore

FORMS = "sqlite:///relative/path.db, sqlite:////absolute/path.db or memory:"


def locate_store(url: str, *, now: Callable[[], float] = time.time, home: str | None = None) -> Store:
    """The store for a URL, not yet opened. `now` tells it what has expired, `home` whose runs are ours besides those of
    this very process.

    The messages leave the URL out: it may hold a password.
    """
    scheme, colon, rest = url.partition(":")
    if not colon:
        raise ConfigError(f"The store must be a URL: {FORMS}.")
    if scheme == "memory":
        if rest:
            raise ConfigError("The memory store takes nothing after its colon: memory:")
        return MemoryStore(now=now)
    if scheme == "sqlite":
        return SqliteStore(_parse_path(rest), now=now, home=home)
    if scheme in ("postgresql", "postgres"):
        raise ConfigError(f"The PostgreSQL store comes later. There are {FORMS}.")
    raise ConfigError(f"There is no {scheme!r} store. There are {FORMS}.")


def _parse_path(rest: str) -> Path:
    path = rest.removeprefix("///")
    if path == rest or not path:
        raise ConfigError(
            "A SQLite store needs three slashes and a path: sqlite:///relative.db or sqlite:////absolute.db"
        )
    if path == ":memory:":
        raise ConfigError("For a store without a file, write memory:")
    if "?" in path or "#" in path:
        raise ConfigError("A SQLite store takes no options: '?' and '#' cannot be part of its URL.")
    if path.startswith("~"):
        raise ConfigError("'~' is not expanded in a SQLite store's URL: write the whole path.")
    return Path(path)
