"""The size of the database file and of its log."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest

from antiphon.errors import ConfigError
from antiphon.store.base import StoredResponse
from antiphon.store.limits import StoreLimits
from antiphon.store.migration_files import read_migrations
from antiphon.store.sqlite import checkpoints, space
from antiphon.store.sqlite.migrations import migrate
from antiphon.store.sqlite.space import vacuum_file
from antiphon.store.sqlite.store import SqliteStore
from support.store_process import start_store_process

MakeStored = Callable[..., StoredResponse]
TEXT = "x" * 20_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def store(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqliteStore]:
    monkeypatch.setattr(space, "SPARE_PAGES", 8)
    monkeypatch.setattr(space, "PAUSE_SECONDS", 0.0)
    store = SqliteStore(path)
    await store.open()
    yield store
    await store.close()


def create_old_file(path: Path) -> None:
    """Create a database of a version without incremental vacuum."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA page_size = 8192")
        connection.execute("PRAGMA journal_mode = WAL")
        migrate(connection, read_migrations("sqlite"), path=str(path))


def read_pragma(path: Path, name: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
        return value


def read_ids(path: Path) -> set[str]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return {response_id for (response_id,) in connection.execute("SELECT id FROM responses")}


async def save_many(store: SqliteStore, make_stored: MakeStored, count: int, *, expires_at: int | None = None) -> None:
    ids = [f"resp_{number}" for number in range(count)]
    await asyncio.gather(*(store.save("p", make_stored(each, text=TEXT, expires_at=expires_at)) for each in ids))


def measure(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize("how", ["deletion", "expiry"])
async def test_file_shrinks_after_rows_are_gone(
    path: Path, store: SqliteStore, make_stored: MakeStored, how: str
) -> None:
    await store.save("p", make_stored("resp_stays", text=TEXT))
    await save_many(store, make_stored, 100, expires_at=2**40)
    store._writer._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = measure(path)
    if how == "deletion":
        await asyncio.gather(*(store.delete("p", f"resp_{number}") for number in range(100)))
    else:
        assert await store.expire(2**41) == 100
    removed = await store.shrink()
    assert removed > 3_000_000
    assert measure(path) == before - removed < before / 5
    assert measure(path.with_name("store.db-wal")) == 0
    assert await store.load("p", "resp_stays") == make_stored("resp_stays", text=TEXT)
    assert await store.shrink() == 0
    assert read_ids(path) == {"resp_stays"}


async def test_shrinking_takes_many_short_transactions(
    store: SqliteStore, make_stored: MakeStored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "SLICE_PAGES", 10)
    await save_many(store, make_stored, 100)
    await asyncio.gather(*(store.delete("p", f"resp_{number}") for number in range(100)))
    statements: list[str] = []
    store._writer._connection.set_trace_callback(statements.append)
    shrinking = asyncio.ensure_future(store.shrink())
    saved = 0
    while not shrinking.done():
        await store.save("p", make_stored(f"resp_between_{saved}"))
        saved += 1
    removed = await shrinking // 8192
    slices = [statement for statement in statements if "incremental_vacuum" in statement]
    assert len(slices) >= removed // 10
    assert saved > 10
    assert len(read_ids(store.path)) == saved


async def test_free_pages_that_new_rows_need_stay_in_the_file(
    store: SqliteStore, make_stored: MakeStored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "SPARE_PAGES", 100)
    await save_many(store, make_stored, 100)
    await asyncio.gather(*(store.delete("p", f"resp_{number}") for number in range(100)))
    await store.shrink()
    assert read_pragma(store.path, "freelist_count") == 100


@pytest.mark.parametrize("rounds", [1, 3])
def test_killed_process_loses_nothing_while_it_shrinks(path: Path, rounds: int) -> None:
    reported: set[str] = set()
    with start_store_process("shrink_for_ever", path) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line == f"shrinking {rounds}\n":
                break
            reported.add(line.strip())
        child.kill()
        reported.update(line for line in child.stdout.read().split("\n")[:-1])
    stored = {line for line in reported if line.startswith("resp_")}
    assert len(stored) >= 5 * rounds
    assert stored - read_ids(path) == set()


# Databases of older versions


async def test_old_database_is_not_rewritten_by_the_server(path: Path, make_stored: MakeStored) -> None:
    create_old_file(path)
    store = SqliteStore(path)
    await store.open()
    await save_many(store, make_stored, 20)
    await asyncio.gather(*(store.delete("p", f"resp_{number}") for number in range(20)))
    assert await store.shrink() == 0
    await store.close()
    assert read_pragma(path, "auto_vacuum") == 0


async def test_unused_space_of_an_old_database_is_reported(
    path: Path, make_stored: MakeStored, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(space, "WARNING_BYTES", 100_000)
    create_old_file(path)
    store = SqliteStore(path)
    await store.open()
    await save_many(store, make_stored, 20)
    await store.shrink()
    assert caplog.messages == []
    await asyncio.gather(*(store.delete("p", f"resp_{number}") for number in range(20)))
    await store.shrink()
    assert [message for message in caplog.messages if "antiphon vacuum" in message and str(path) in message]
    await store.close()


async def test_vacuum_rewrites_an_old_database(path: Path, make_stored: MakeStored) -> None:
    create_old_file(path)
    store = SqliteStore(path)
    await store.open()
    await save_many(store, make_stored, 100)
    await asyncio.gather(*(store.delete("p", f"resp_{number}") for number in range(95)))
    await store.close()
    order = read_order(path)
    before, after = vacuum_file(path)
    assert (after, read_pragma(path, "auto_vacuum")) == (measure(path), 2)
    assert after < before / 5
    # The order of the rows says which response is newer.
    assert read_order(path) == order == [f"resp_{number}" for number in range(95, 100)]


def read_order(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [each for (each,) in connection.execute("SELECT id FROM responses ORDER BY rowid")]


async def test_vacuum_refuses_a_store_in_use(path: Path) -> None:
    store = SqliteStore(path)
    await store.open()
    await store.claim("us", as_of=0, lease=1, limit=1)
    with pytest.raises(ConfigError, match="A server uses the store"):
        vacuum_file(path)
    await store.close()
    vacuum_file(path)


def test_vacuum_refuses_a_missing_file(path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no store at"):
        vacuum_file(path)
    assert not path.exists()


def test_vacuum_names_the_missing_space(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_old_file(path)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: space.shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(ConfigError, match="needs twice its size"):
        vacuum_file(path)


def test_vacuum_of_a_damaged_file_names_it(path: Path) -> None:
    path.write_bytes(b"This is not a database. " * 1000)
    with pytest.raises(ConfigError, match=f"The store {path} cannot be rewritten"):
        vacuum_file(path)


# The write-ahead log


async def test_log_is_truncated_after_a_large_commit(path: Path, make_stored: MakeStored) -> None:
    store = SqliteStore(path, limits=StoreLimits(wal_bytes=1024 * 1024))
    await store.open()
    await store.save("p", make_stored("resp_1", text="x" * 5_000_000))
    assert measure(path.with_name("store.db-wal")) <= 1024 * 1024
    await store.close()


async def test_log_that_a_reader_holds_is_reported_and_truncated_later(
    path: Path, make_stored: MakeStored, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoints, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "WAIT_MS", 1)
    store = SqliteStore(path, limits=StoreLimits(wal_bytes=1024 * 1024))
    await store.open()
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM responses").fetchall()
        for number in range(4):
            await store.save("p", make_stored(f"resp_{number}", text="x" * 1_000_000))
        assert measure(path.with_name("store.db-wal")) > 4_000_000
        reader.execute("COMMIT")
    assert [message for message in caplog.messages if "holds a read transaction" in message] == caplog.messages
    assert len(caplog.messages) == 1
    await store.save("p", make_stored("resp_last"))
    assert measure(path.with_name("store.db-wal")) <= 1024 * 1024
    await store.close()
    assert len(read_ids(path)) == 5
