from pathlib import Path

import pytest

from antiphon.errors import ConfigError
from antiphon.store.location import locate_store
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///store.db", "store.db"),
        ("sqlite:///data/my store.db", "data/my store.db"),
        ("sqlite:////var/lib/store.db", "/var/lib/store.db"),
    ],
)
def test_three_slashes_are_relative_and_four_absolute(url: str, path: str) -> None:
    store = locate_store(url)
    assert isinstance(store, SqliteStore)
    assert store.path == Path(path)


def test_memory_url_gives_a_memory_store() -> None:
    assert isinstance(locate_store("memory:"), MemoryStore)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_postgresql_url_gives_a_postgresql_store(scheme: str) -> None:
    pytest.importorskip("asyncpg")
    from antiphon.store.postgres.store import PostgresStore

    store = locate_store(f"{scheme}://me:secret@one:5432,two:5433/data?sslmode=require")
    assert isinstance(store, PostgresStore)
    assert str(store.address) == "one:5432,two:5433/data"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "must be a URL: sqlite:///relative/path.db, sqlite:////absolute/path.db, postgresql://.* or memory:"),
        ("store.db", "must be a URL: sqlite:///relative/path.db, .*, postgresql://user:password@host/name or memory:"),
        ("postgresql://me:secret@[host/db", "URL of the PostgreSQL store is invalid"),
        ("postgresql://me:a/secret@host/db", "write %2F for '/', %3F for '\\?' and %40 for '@'"),
        ("postgresql://me:a?secret@host/db", "write %2F for '/'"),
        ("postgresql://me:a@secret@host/db", "write %2F for '/'"),
        ("postgresql://secret:x/db", "write %2F for '/'"),
        ("postgres:/me:secret@host/db", "must begin with postgresql://"),
        ("postgresql:me:secret@host/db", "must begin with postgresql://"),
        ("postgresql://me:secret@host/db#x", "must not contain '#'"),
        ("redis://:secret@host", "no 'redis' store. Use sqlite:///relative/path.db, .* or memory:"),
        ("memory:x", "with nothing after the colon"),
        ("sqlite:", "three slashes and a path"),
        ("sqlite:store.db", "three slashes and a path"),
        ("sqlite://store.db", "three slashes and a path"),
        ("sqlite:///", "three slashes and a path"),
        ("sqlite:///:memory:", "Use memory:"),
        ("sqlite:///store.db?mode=ro", "has no options"),
        ("sqlite:///store.db#x", "has no options"),
        ("sqlite:///~/store.db", "Use the full path"),
    ],
)
def test_unsupported_url_error_names_the_allowed_forms(url: str, message: str) -> None:
    if url.startswith("postgres"):
        pytest.importorskip("asyncpg")
    with pytest.raises(ConfigError, match=message) as refusal:
        locate_store(url)
    assert "secret" not in str(refusal.value)
