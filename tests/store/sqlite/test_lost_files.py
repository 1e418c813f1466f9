"""Files of a store that are deleted, moved, replaced or truncated while it is open, and disks that take no data."""

import asyncio
import logging
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from antiphon.errors import ServerError, StoreFull, StoreLost, StoreUnavailable
from antiphon.store import operations
from antiphon.store.base import StoredResponse
from antiphon.store.limits import StoreLimits
from antiphon.store.sqlite import files
from antiphon.store.sqlite.store import SqliteStore

MakeStored = Callable[..., StoredResponse]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "store.db"


@pytest.fixture
async def store(path: Path, monkeypatch: pytest.MonkeyPatch, make_stored: MakeStored) -> AsyncIterator[SqliteStore]:
    monkeypatch.setattr(operations, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(files, "CHECK_SECONDS", 0.0)
    store = SqliteStore(path)
    await store.open()
    await store.save("p", make_stored("resp_before"))
    yield store
    await store.close()


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}-{suffix}")


def replace_by_copy(path: Path) -> None:
    shutil.copyfile(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


LOSSES: dict[str, Callable[[Path], object]] = {
    "database deleted": lambda path: path.unlink(),
    "database moved": lambda path: path.rename(path.with_name("elsewhere")),
    "database replaced": replace_by_copy,
    "database truncated": lambda path: os.truncate(path, 0),
    "folder moved": lambda path: path.parent.rename(path.parent.with_name("elsewhere")),
    "folder deleted": lambda path: shutil.rmtree(path.parent),
    "all files deleted": lambda path: [path.unlink(), beside(path, "wal").unlink(), beside(path, "shm").unlink()],
    "log deleted": lambda path: beside(path, "wal").unlink(),
    "log replaced": lambda path: replace_by_copy(beside(path, "wal")),
    "log truncated": lambda path: os.truncate(beside(path, "wal"), 0),
    "log cut off": lambda path: os.truncate(beside(path, "wal"), 10_000),
    "shared memory deleted": lambda path: beside(path, "shm").unlink(),
    "path is a folder": lambda path: [path.unlink(), path.mkdir()],
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_write_to_lost_files_is_refused(
    path: Path, store: SqliteStore, make_stored: MakeStored, caplog: pytest.LogCaptureFixture, loss: str
) -> None:
    LOSSES[loss](path)
    outcomes = await asyncio.gather(
        *(store.save("p", make_stored(f"resp_{number}")) for number in range(3)),
        store.enqueue("p", make_stored("resp_queued", status="queued"), b"{}"),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [StoreLost] * 4
    assert isinstance(store.failure, StoreLost)
    for _ in range(3):
        with pytest.raises(StoreLost, match="deleted or replaced"):
            await store.check()
        with pytest.raises(StoreLost):
            await store.delete("p", "resp_before")
    errors = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(errors) == 1
    assert str(path.parent) in errors[0].getMessage()
    assert errors[0].exc_info is None


async def test_check_notices_the_loss_without_a_write(path: Path, store: SqliteStore) -> None:
    await store.check()
    LOSSES["database deleted"](path)
    with pytest.raises(StoreLost):
        await store.check()


@pytest.mark.parametrize("name", ["store.db", "store.db-wal", "store.db-shm"])
async def test_store_works_again_when_the_same_file_is_back(
    path: Path, store: SqliteStore, make_stored: MakeStored, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = path.with_name(name)
    file.rename(path.with_name("elsewhere"))
    with pytest.raises(StoreLost):
        await store.save("p", make_stored("resp_1"))
    path.with_name("elsewhere").rename(file)
    await store.check()
    assert store.failure is None
    await store.save("p", make_stored("resp_2"))
    await store.close()
    assert {"resp_before", "resp_2"} <= read_ids(path)
    assert ["works again" in record.getMessage() for record in caplog.records] == [False, True]


def read_ids(path: Path) -> set[str]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return {response_id for (response_id,) in connection.execute("SELECT id FROM responses")}


async def test_store_stays_lost_while_another_file_is_at_the_path(
    path: Path, store: SqliteStore, make_stored: MakeStored
) -> None:
    LOSSES["all files deleted"](path)
    other = SqliteStore(path)
    await other.open()
    with pytest.raises(StoreLost):
        await store.save("p", make_stored("resp_lost"))
    await other.save("p", make_stored("resp_new"))
    await store.close()
    # Closing the first store must not delete the log of the second.
    assert beside(path, "wal").exists()
    await other.check()
    await other.save("p", make_stored("resp_newer"))
    await other.close()
    assert read_ids(path) == {"resp_new", "resp_newer"}


async def test_responses_saved_before_the_log_was_deleted_are_rescued_at_the_end(
    path: Path, store: SqliteStore, make_stored: MakeStored
) -> None:
    beside(path, "wal").unlink()
    with pytest.raises(StoreLost):
        await store.save("p", make_stored("resp_1"))
    await store.close()
    assert "resp_before" in read_ids(path)


@pytest.mark.parametrize("size", [0, 10_000])
async def test_truncated_log_is_not_copied_into_the_database(
    path: Path, store: SqliteStore, make_stored: MakeStored, size: int
) -> None:
    store._writer._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    await store.save("p", make_stored("resp_1"))
    await store.save("p", make_stored("resp_2"))
    os.truncate(beside(path, "wal"), size)
    with pytest.raises(StoreLost):
        await store.save("p", make_stored("resp_3"))
    await store.close()
    # The copy is opened as after a restart: the process does not release the files of a lost store.
    copy = path.with_name("copy.db")
    shutil.copyfile(path, copy)
    shutil.copyfile(beside(path, "wal"), beside(copy, "wal"))
    assert read_ids(copy) == {"resp_before"}


async def test_log_truncated_between_two_commits_is_noticed_later(
    path: Path, store: SqliteStore, make_stored: MakeStored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy server, a commit may restore the size of the log before the next check. It leaves a hole."""
    monkeypatch.setattr(files, "CHECK_SECONDS", 3600.0)
    await store.check()
    os.truncate(beside(path, "wal"), 0)
    with suppress(ServerError):  # SQLite may read a page from the log
        await store.save("p", make_stored("resp_1"))
    store._files._next_check = 0.0
    with pytest.raises(StoreLost):
        await store.save("p", make_stored("resp_2"))


async def test_stored_responses_can_be_read_from_a_deleted_file(
    path: Path, store: SqliteStore, make_stored: MakeStored
) -> None:
    LOSSES["database deleted"](path)
    assert await store.load("p", "resp_before") == make_stored("resp_before")


async def test_symbolic_link_is_followed(tmp_path: Path, make_stored: MakeStored) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "target" / "store.db")
    store = SqliteStore(tmp_path / "link.db")
    await store.open()
    await store.save("p", make_stored("resp_1"))
    await store.check()
    (tmp_path / "target" / "store.db-wal").unlink()
    with pytest.raises(StoreLost):
        await store.save("p", make_stored("resp_2"))
    await store.close()


async def test_checkpoint_by_another_process_is_no_loss(
    path: Path, store: SqliteStore, make_stored: MakeStored
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        for number in range(5):
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            await store.save("p", make_stored(f"resp_{number}"))
            await store.check()
    assert store.failure is None


# Disks that take no data


async def fill(store: SqliteStore, make_stored: MakeStored) -> None:
    """Let SQLite report a full disk: the database may not grow any more."""
    connection = store._writer._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFull, match="no space left"):
        for number in range(100):
            await store.save("p", make_stored(f"resp_full_{number}", text="x" * 20_000))


async def test_full_disk_is_reported_until_there_is_space(
    path: Path, store: SqliteStore, make_stored: MakeStored, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(store, make_stored)
    with pytest.raises(StoreFull):
        await store.enqueue("p", make_stored("resp_1", status="queued", text="x" * 50_000), b"{}")
    assert isinstance(store.failure, StoreFull)
    store._writer._connection.execute("PRAGMA max_page_count = 1000000")
    await store.check()
    assert store.failure is None
    await store.save("p", make_stored("resp_2", text="x" * 20_000))
    lines = [record.getMessage() for record in caplog.records]
    assert [("database or disk is full" in line, "works again" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]
    await store.close()
    assert {"resp_before", "resp_2"} <= read_ids(path)


async def test_observer_gets_the_failures_of_a_full_disk(path: Path, make_stored: MakeStored) -> None:
    writes: list[tuple[float, int]] = []
    store = SqliteStore(path.with_name("observed.db"))
    store.on_write = lambda seconds, failures: writes.append((seconds, failures))
    await store.open()
    await store.save("p", make_stored("resp_1"))
    assert [failures for _, failures in writes] == [0]
    await fill(store, make_stored)
    assert writes[-1][1] == 1
    assert all(seconds > 0 for seconds, _ in writes)
    await store.close()


async def test_check_reports_little_free_space(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "CHECK_SECONDS", 0.0)
    store = SqliteStore(path, limits=StoreLimits(min_free_bytes=2**62))
    await store.open()
    with pytest.raises(StoreFull):
        await store.check()
    assert store.failure is None
    await store.close()


async def test_read_only_database_is_reported(path: Path, store: SqliteStore, make_stored: MakeStored) -> None:
    store._writer._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreUnavailable, match="cannot be written to"):
        await store.save("p", make_stored("resp_1"))
    assert type(store.failure) is StoreUnavailable
    store._writer._connection.execute("PRAGMA query_only = OFF")
    await store.check()
    assert store.failure is None


async def test_check_does_not_wait_for_a_blocked_store(
    path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "CHECK_TIMEOUT_SECONDS", 0.05)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="does not respond"):
            await store.check()
        other.execute("COMMIT")
    await store.load("p", "resp_before")


async def test_concurrent_checks_share_one_result(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "CHECK_SECONDS", 3600.0)
    statements: list[str] = []
    store._writer._connection.set_trace_callback(statements.append)
    await asyncio.gather(*(store.check() for _ in range(50)))
    await store.check()
    assert statements.count("BEGIN IMMEDIATE") == 1


async def test_result_of_a_check_is_not_used_after_a_failure(
    path: Path, store: SqliteStore, make_stored: MakeStored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "CHECK_SECONDS", 3600.0)
    await store.check()
    LOSSES["database deleted"](path)
    with pytest.raises(StoreLost):
        await store.save("p", make_stored("resp_1"))
    with pytest.raises(StoreLost):
        await store.check()


async def test_other_errors_do_not_change_the_condition(store: SqliteStore, make_stored: MakeStored) -> None:
    with pytest.raises(ServerError, match="The store failed"):
        await store.save("\ud800", make_stored("resp_1"))
    assert store.failure is None
