"""The SQLite file and its threads: failures, a full disk, several processes, crashes."""

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from antiphon.errors import ConfigError, InvalidRequest, NotFound, ServerError, StoreFull
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import StoredResponse
from antiphon.store.sqlite.database import MAX_ROWS, connect
from antiphon.store.sqlite.store import SqliteStore
from support.store_process import start_store_process

MakeStored = Callable[..., StoredResponse]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path)
    await store.open()
    yield store
    await store.close()


@contextmanager
def connected(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def read_ids(path: Path) -> set[str]:
    with connected(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return {response_id for (response_id,) in connection.execute("SELECT id FROM responses")}


async def test_saved_response_is_loaded_after_reopening(
    path: Path, store: SqliteStore, make_stored: MakeStored
) -> None:
    await store.save("p", make_stored("resp_1"))
    await store.close()
    again = SqliteStore(path)
    await again.open()
    assert await again.load("p", "resp_1") == make_stored("resp_1")
    await again.close()


def test_acknowledged_responses_survive_sigkill(path: Path) -> None:
    with start_store_process("save_for_ever", path) as child:
        assert child.stdout is not None
        acknowledged = {child.stdout.readline().strip() for _ in range(300)}
        child.kill()
        rest = child.stdout.read().split("\n")
        acknowledged.update(rest[:-1])  # the last line may be cut off
    assert len(acknowledged) >= 300
    assert acknowledged - read_ids(path) == set()


def test_two_processes_write_one_file_without_losing_data(path: Path) -> None:
    with (
        start_store_process("save_many", path, "a", 20, 40) as first,
        start_store_process("save_many", path, "b", 20, 40) as second,
    ):
        outcomes = [child.communicate(timeout=60)[1] for child in (first, second)]
    assert outcomes == ["", ""]
    expected = {f"resp_{name}_{turn}_{number}" for name in "ab" for turn in range(20) for number in range(40)}
    assert read_ids(path) == expected


async def test_stores_that_create_one_file_concurrently_all_open(tmp_path: Path, make_stored: MakeStored) -> None:
    for turn in range(10):
        stores = [SqliteStore(tmp_path / f"{turn}.db") for _ in range(6)]
        await asyncio.gather(*(store.open() for store in stores))
        await asyncio.gather(*(store.save("p", make_stored(f"resp_{n}")) for n, store in enumerate(stores)))
        loaded = await asyncio.gather(*(store.load("p", f"resp_{n}") for n, store in enumerate(reversed(stores))))
        assert loaded == [make_stored(f"resp_{n}") for n in range(6)]
        await asyncio.gather(*(store.close() for store in stores))


async def test_open_waits_for_a_process_that_creates_the_file(path: Path) -> None:
    store = SqliteStore(path)
    with connected(path) as other:
        other.execute("CREATE TABLE something (x)")
        other.execute("BEGIN IMMEDIATE")
        opening = asyncio.ensure_future(store.open())
        done, _ = await asyncio.wait({opening}, timeout=0.1)
        assert done == set()
        other.execute("COMMIT")
        await opening
    await store.close()


def test_full_disk_fails_the_affected_writes_and_no_later_ones(path: Path) -> None:
    with start_store_process("fill_the_disk", path) as child:
        printed, errors = child.communicate(timeout=60)
    assert errors.splitlines() == [
        f"the store {path} cannot be written to: disk I/O error",
        f"the store {path} works again",
    ]
    outcomes = dict(line.split(" ") for line in printed.splitlines())
    stored = {response_id for response_id, outcome in outcomes.items() if outcome == "None"}
    assert outcomes == {f"resp_{n}": "None" if f"resp_{n}" in stored else "failed" for n in range(100)}
    assert len(stored) < 100
    assert read_ids(path) == stored | {"resp_after"}


@pytest.mark.parametrize("with_output", [False, True], ids=["one statement", "several statements"])
async def test_failed_statement_does_not_affect_its_batch(
    store: SqliteStore, make_stored: MakeStored, with_output: bool
) -> None:
    batch = [make_stored(f"resp_{number}") for number in range(20)]
    for stored in batch:
        stored.response.output = stored.response.output if with_output else []
    saves = [store.save("p", stored) for stored in batch]
    bad = StoredResponse(response=Response(id="resp_bad", created_at=1, model="m"), input=[])
    saves.insert(10, store.save("\ud800", bad))  # not Unicode: SQLite cannot bind it
    outcomes = await asyncio.gather(*saves, return_exceptions=True)
    failure = outcomes.pop(10)
    assert isinstance(failure, ServerError)
    # The client gets only this text. The log has the cause.
    assert (failure.message, type(failure.__cause__)) == ("The store failed.", UnicodeEncodeError)
    assert outcomes == [None] * 20
    assert read_ids(store.path) == {f"resp_{number}" for number in range(20)}


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, ["INSERT"]), (MAX_ROWS, ["INSERT"]), (MAX_ROWS + 1, ["BEGIN", *["INSERT"] * (MAX_ROWS + 1), "COMMIT"])],
)
async def test_batch_of_saves_is_one_transaction(
    store: SqliteStore, make_stored: MakeStored, count: int, expected: list[str]
) -> None:
    batch = [make_stored(f"resp_{number}") for number in range(count)]
    for stored in batch:
        stored.response.output.clear()  # items with ids of other responses would be indexed
    statements: list[str] = []
    store._writer._connection.set_trace_callback(statements.append)
    await asyncio.gather(*(store.save("p", stored) for stored in batch))
    assert [statement.split()[0] for statement in statements] == expected
    assert read_ids(store.path) == {f"resp_{number}" for number in range(count)}


async def test_single_statement_needs_no_transaction_around_it(store: SqliteStore, make_stored: MakeStored) -> None:
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    await store.claim("us", as_of=0, lease=10, limit=1)
    statements: list[str] = []
    store._writer._connection.set_trace_callback(statements.append)
    assert await store.append_events("p", "resp_1", 0, [b"0", b"1"], owner="us") is True
    assert [statement.split()[0] for statement in statements] == ["INSERT"]
    assert await store.read_events("p", "resp_1", -1) == [(0, b"0"), (1, b"1")]
    with pytest.raises(ServerError):
        await store._change("INSERT INTO events (project) VALUES (?)", ("p",))
    store._writer._connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(StoreFull):
        await store.append_events("p", "resp_1", 2, [b"x" * 100_000], owner="us")
    assert isinstance(store.failure, StoreFull)
    store._writer._connection.execute("PRAGMA max_page_count = 1000000")
    assert await store.append_events("p", "resp_1", 2, [b"2"], owner="us") is True
    assert store.failure is None


async def test_response_that_does_not_fit_the_disk_fails_alone(store: SqliteStore, make_stored: MakeStored) -> None:
    batch = [make_stored(f"resp_{number}", text="x" * (10**6 if number == 1 else 10)) for number in range(3)]
    for stored in batch:
        stored.response.output.clear()
    connection = store._writer._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 20}")
    outcomes = await asyncio.gather(*(store.save("p", stored) for stored in batch), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), StoreFull, type(None)]
    assert read_ids(store.path) == {"resp_0", "resp_2"}


async def test_batch_waits_only_once_for_a_locked_file(path: Path, store: SqliteStore, make_stored: MakeStored) -> None:
    store._writer._connection.execute("PRAGMA busy_timeout = 0")
    batch = [make_stored(f"resp_{number}") for number in range(3)]
    for stored in batch:
        stored.response.output.clear()
    statements: list[str] = []
    store._writer._connection.set_trace_callback(statements.append)
    with connected(path) as other:
        other.execute("BEGIN IMMEDIATE")
        outcomes = await asyncio.gather(*(store.save("p", stored) for stored in batch), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ServerError] * 3
    assert len(statements) <= 1
    await store.save("p", batch[0])
    assert read_ids(path) == {"resp_0"}


async def test_response_saved_twice_in_one_batch_has_the_last_version(
    store: SqliteStore, make_stored: MakeStored
) -> None:
    versions = [make_stored("resp_1", text=text) for text in ("one", "two", "three")]
    for stored in versions:
        stored.response.output.clear()
    await asyncio.gather(*(store.save("p", stored) for stored in versions))
    assert await store.load("p", "resp_1") == versions[-1]


async def test_operation_of_several_statements_fails_as_a_whole_and_alone(
    store: SqliteStore, make_stored: MakeStored
) -> None:
    await store.create_conversation("p", Conversation("conv_1", 1), [])
    twice = [Unknown(b'{"type":"hologram_call","id":"holo_2"}')] * 2
    outcomes = await asyncio.gather(
        store.save("p", make_stored("resp_0")),
        store.append_items("p", "conv_1", [Unknown(b'{"type":"hologram_call","id":"holo_1"}'), *twice]),
        store.save("p", make_stored("resp_1"), conversation="conv_1"),
        store.save("p", make_stored("resp_2"), conversation="conv_2"),
        store.enqueue("p", make_stored("resp_3", status="queued"), b"{}"),
        store.enqueue("p", make_stored("resp_3", status="queued"), b"{}"),
        store.append_events("p", "resp_3", 0, [b"0"]),
        store.append_events("p", "resp_3", 0, [b"1"]),
        store.save("p", make_stored("resp_4")),
        return_exceptions=True,
    )
    kinds = [type(outcome) if isinstance(outcome, Exception) else outcome for outcome in outcomes]
    assert kinds == [None, InvalidRequest, None, NotFound, None, ServerError, True, ServerError, None]
    assert read_ids(store.path) == {"resp_0", "resp_1", "resp_3", "resp_4"}
    stored = make_stored("resp_1")
    assert await store.load_conversation_items("p", "conv_1") == [*stored.input, *stored.response.output]
    assert len(await store.claim("us", as_of=0, lease=1, limit=9)) == 1


async def test_read_of_several_statements_sees_one_snapshot(store: SqliteStore) -> None:
    """A conversation that is deleted between two statements is still there for the second."""
    await store.create_conversation("p", Conversation("conv_1", 1), [Unknown(b'{"type":"hologram_call"}')])

    def count_twice(connection: sqlite3.Connection) -> list[tuple[int]]:
        found = connection.execute("SELECT count(*) FROM items").fetchone()
        with connected(store.path) as other:
            other.execute("DELETE FROM conversations")
        return [found, connection.execute("SELECT count(*) FROM items").fetchone()]

    assert await store._reader.submit(count_twice, ()) == [(1,), (1,)]
    assert await store.load_conversation_items("p", "conv_1") is None


async def test_read_does_not_wait_for_a_blocked_write(store: SqliteStore, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_1"))
    with connected(store.path) as other:
        other.execute("BEGIN IMMEDIATE")
        saving = asyncio.ensure_future(store.save("p", make_stored("resp_2")))
        assert await store.load("p", "resp_1") == make_stored("resp_1")
        assert not saving.done()
        other.execute("COMMIT")
    await saving
    assert await store.load("p", "resp_2") == make_stored("resp_2")


async def test_close_finishes_queued_writes(path: Path, store: SqliteStore, make_stored: MakeStored) -> None:
    saves = [asyncio.ensure_future(store.save("p", make_stored(f"resp_{number}"))) for number in range(50)]
    await asyncio.sleep(0)
    await store.close()
    assert await asyncio.gather(*saves) == [None] * 50
    assert read_ids(path) == {f"resp_{number}" for number in range(50)}


async def test_cancelled_save_is_stored_if_it_was_queued(store: SqliteStore, make_stored: MakeStored) -> None:
    saving = asyncio.ensure_future(store.save("p", make_stored("resp_1")))
    await asyncio.sleep(0)
    saving.cancel()
    await store.close()
    assert read_ids(store.path) == {"resp_1"}


def test_process_exits_without_closing_the_store(path: Path) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from antiphon.store.sqlite.store import SqliteStore\n"
        "asyncio.run(SqliteStore(pathlib.Path(sys.argv[1])).open())"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)


async def test_damaged_row_raises_a_server_error(store: SqliteStore, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_1"))
    with connected(store.path) as other:
        other.execute("UPDATE responses SET output = x'00'")
    for question in (store.load("p", "resp_1"), store.load_chain("p", "resp_1")):
        with pytest.raises(ServerError, match="resp_1 cannot be read"):
            await question


def read_mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def walk_folder(path: Path) -> list[Path]:
    return [path, *path.rglob("*")]


async def test_files_are_readable_only_by_the_user(tmp_path: Path, make_stored: MakeStored) -> None:
    before, tmp_mode = os.umask(0), read_mode(tmp_path)
    store = SqliteStore(tmp_path / "new" / "folder" / "store.db")
    try:
        await store.open()
        await store.save("p", make_stored("resp_1"))
        modes = {path.name: read_mode(path) for path in walk_folder(tmp_path)}
    finally:
        os.umask(before)
        await store.close()
    assert modes == {
        tmp_path.name: tmp_mode,
        "new": 0o700,
        "folder": 0o700,
        "store.db": 0o600,
        "store.db-wal": 0o600,
        "store.db-shm": 0o600,
    }


def make_junk(path: Path) -> None:
    path.write_bytes(b"This is not a database. " * 1000)


def make_file_of_parent(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


@pytest.mark.parametrize("obstruct", [make_junk, Path.mkdir, make_file_of_parent])
async def test_open_error_names_the_path(tmp_path: Path, obstruct: Callable[[Path], None]) -> None:
    path = tmp_path / "folder" / "store.db"
    path.parent.mkdir()
    obstruct(path)
    with pytest.raises(ConfigError, match=f"The store {path} cannot be opened: "):
        await SqliteStore(path).open()


async def test_file_of_a_newer_version_is_rejected(path: Path) -> None:
    with connected(path) as connection:
        connection.execute("PRAGMA user_version = 999")
    with pytest.raises(ConfigError, match=f"{path} has schema version 999"):
        await SqliteStore(path).open()


def test_connection_syncs_each_commit(path: Path) -> None:
    with closing(connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
