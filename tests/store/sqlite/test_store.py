"""What the SQLite store promises of state: its statements use indexes, and other processes and crashes lose nothing."""

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item, Message
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ClaimedRun, StoredResponse
from antiphon.store.record import pack_response
from antiphon.store.sqlite import conversations, events, leases, responses, runs
from antiphon.store.sqlite import store as store_module
from antiphon.store.sqlite.migrations import migrate, read_migrations
from antiphon.store.sqlite.store import SqliteStore

MakeStored = Callable[..., StoredResponse]

CHILD = Path(__file__).with_name("child.py")

STATEMENTS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": statement
    for module in (conversations, events, leases, store_module, responses, runs)
    for name, statement in vars(module).items()
    if name.isupper() and isinstance(statement, str)
}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    yield store
    await store.close()


@contextmanager
def connected(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILD), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def explain(connection: sqlite3.Connection, statement: str) -> list[str]:
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", [None] * statement.count("?"))]


@pytest.mark.parametrize("name", STATEMENTS)
async def test_every_statement_finds_its_rows_by_index(store: SqliteStore, name: str) -> None:
    with connected(store.path) as other:
        plan = explain(other, STATEMENTS[name])
    # The walk of a chain reads the rows it has found itself, and json_each() a list among the parameters.
    allowed = ("SCAN walked", "SCAN CONSTANT ROW", "SCAN json_each ")
    assert [step for step in plan if step.startswith("SCAN") and not step.startswith(allowed)] == []
    assert [step for step in plan if "TEMP B-TREE" in step or "AUTOMATIC" in step] == []


@pytest.mark.parametrize(
    ("table", "column", "migration"),
    [
        ("items", "conversation_id", 2),
        ("runs", "response_id", 2),
        ("events", "response_id", 2),
        ("foreign_items", "response_id", 4),
        ("deleted_items", "conversation_id", 6),
        ("blocks", "conversation_id", 6),
    ],
)
async def test_what_goes_with_a_deleted_row_is_found_by_index(
    store: SqliteStore, table: str, column: str, migration: int
) -> None:
    statement = f"DELETE FROM {table} WHERE project = old.project AND {column} = old.id"
    assert statement in read_migrations()[migration - 1].script
    with connected(store.path) as other:
        (step,) = explain(other, statement.replace("old.project", "?").replace("old.id", "?"))
    assert step.startswith(f"SEARCH {table} USING ")


async def test_what_a_deleted_or_changed_response_continued_is_found_by_index(store: SqliteStore) -> None:
    found = "WHERE project = old.project AND id = old.previous_response_id AND continued = 1;"
    assert read_migrations()[2].script.count(found) == 2
    statement = f"UPDATE responses SET continued = 0 {found}"
    with connected(store.path) as other:
        (step,) = explain(other, statement.replace("old.project", "?").replace("old.previous_response_id", "?"))
    assert step == "SEARCH responses USING INDEX sqlite_autoindex_responses_1 (project=? AND id=?)"


async def test_every_index_serves_a_statement(store: SqliteStore) -> None:
    with connected(store.path) as other:
        indexes = {name for (name,) in other.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        used = " ".join(step for statement in STATEMENTS.values() for step in explain(other, statement)).split()
    assert indexes - set(used) == set()


async def test_only_items_that_were_made_elsewhere_are_noted_and_only_as_long_as_their_response_is_there(
    store: SqliteStore,
) -> None:
    ids = {"resp_T": ["msg_T0000", "fc_T0001"], "resp_U": ["msg_U0000", "msg_T0000", "msg_mine", "mine"]}
    for response_id, item_ids in ids.items():
        asked: list[Item | Unknown] = [Message("user", "hi", item_id) for item_id in item_ids]
        response = Response(id=response_id, created_at=1, model="m", status="completed", output=asked[1:])
        await store.save("p", StoredResponse(response=response, input=asked[:1]))
    noted = "SELECT response_id, item_id FROM foreign_items ORDER BY item_id"
    with connected(store.path) as other:
        assert other.execute(noted).fetchall() == [("resp_U", each) for each in ("mine", "msg_T0000", "msg_mine")]
        await store.delete("p", "resp_U")
        assert other.execute(noted).fetchall() == []


async def test_a_killed_process_loses_nothing_acknowledged(store: SqliteStore, make_stored: MakeStored) -> None:
    await store.create_conversation("p", Conversation("conv_1", 1), [])
    await store.save("p", make_stored("resp_log"))
    with start("change_for_ever", store.path) as child:
        assert child.stdout is not None
        for _ in range(20):
            child.stdout.readline()
        child.kill()
        rest = child.stdout.read().split("\n")
    turns = 2 * (20 + len(rest) - 1)  # the last line may be cut off
    assert turns >= 40

    items = await store.conversation_items("p", "conv_1")
    assert items is not None
    assert len(items) % 3 == 0
    assert [item.id for item in items][: 3 * turns] == [f"holo_{n}_{place}" for n in range(turns) for place in range(3)]
    logged = await store.read_events("p", "resp_log", -1)
    assert logged[: 2 * turns] == [(number, b'"%d"' % number) for number in range(2 * turns)]

    # What the child had claimed is free, with what was recorded of it.
    claimed = (await store.claim("us", as_of=9, lease=10, limit=9_999))[:turns]
    expected = [
        ClaimedRun("p", f"resp_{n}", b"%d" % n, 2, n % 2 == 1, n % 2 == 1, 1, "m", ours=False, free_since=0)
        for n in range(turns)
    ]
    assert [claim._replace(free_since=0) for claim in claimed] == expected


async def test_blocks_of_two_processes_do_not_mingle(store: SqliteStore) -> None:
    await store.create_conversation("p", Conversation("conv_1", 1), [])
    with start("append_many", store.path, "a", 60) as first, start("append_many", store.path, "b", 60) as second:
        outcomes = [await asyncio.to_thread(child.communicate, timeout=60) for child in (first, second)]
    assert outcomes == [("", ""), ("", "")]

    items = await store.conversation_items("p", "conv_1")
    assert items is not None
    ids = [str(item.id) for item in items]
    names = [ids[start].removesuffix("_0") for start in range(0, len(ids), 3)]
    assert ids == [f"{name}_{number}" for name in names for number in range(3)]
    for process in "ab":
        own = [name for name in names if name.startswith(process)]
        assert own == [f"{process}_{turn}_{half}" for turn in range(60) for half in "ab"]


async def test_two_processes_never_claim_the_same_run(store: SqliteStore, make_stored: MakeStored) -> None:
    await asyncio.gather(*(store.enqueue("p", make_stored(f"resp_{n}", status="queued"), b"{}") for n in range(200)))
    with start("claim_all", store.path, "a") as first, start("claim_all", store.path, "b") as second:
        outcomes = [await asyncio.to_thread(child.communicate, timeout=60) for child in (first, second)]
    assert [complaints for _, complaints in outcomes] == ["", ""]
    claimed = sorted(line for printed, _ in outcomes for line in printed.splitlines())
    assert claimed == sorted(f"resp_{n} 1" for n in range(200))


async def test_expiring_lets_others_write_in_between(store: SqliteStore, make_stored: MakeStored) -> None:
    expired = [make_stored(f"resp_{n}", expires_at=1) for n in range(3 * responses.EXPIRY_STEP)]
    await asyncio.gather(*(store.save("p", stored) for stored in expired))
    expiring = asyncio.ensure_future(store.expire(1))
    await asyncio.sleep(0)
    await store.save("p", make_stored("resp_other"))
    assert not expiring.done()
    assert await expiring == len(expired)
    assert await store.load("p", "resp_other") == make_stored("resp_other")


async def test_a_file_of_the_second_version_lets_its_chains_go_with_their_last_response(
    tmp_path: Path, make_stored: MakeStored
) -> None:
    path = tmp_path / "old.db"
    with connected(path) as other:
        migrate(other, read_migrations()[:2], path=str(path))
        for turn in range(3):
            stored = make_stored(f"resp_{turn}", previous=f"resp_{turn - 1}" if turn else None, expires_at=10 + turn)
            other.execute(responses.INSERT, ("p", *pack_response(stored)))
    store = SqliteStore(path, now=lambda: 0)
    await store.open()
    assert [await store.expire(now) for now in (10, 11)] == [0, 0]
    assert [link.id for link in await store.chain("p", "resp_2")] == ["resp_0", "resp_1", "resp_2"]
    assert await store.expire(12) == 3
    await store.close()


async def test_a_sweep_does_not_look_again_at_what_it_has_spared(store: SqliteStore, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_0", expires_at=10))
    await store.save("p", make_stored("resp_1", previous="resp_0"))
    with connected(store.path) as other:
        assert other.execute(responses.DUE, (15,)).fetchall() == [(1,)]
        assert await store.expire(15) == 0
        assert other.execute(responses.DUE, (15,)).fetchall() == []
        await store.delete("p", "resp_1")
        assert other.execute(responses.DUE, (15,)).fetchall() == [(1,)]


async def test_a_page_of_a_long_conversation_reads_only_that_page(store: SqliteStore) -> None:
    with connected(store.path) as other:
        for statement in (conversations.ASCEND, conversations.DESCEND):
            (step,) = explain(other, statement)
            assert step == "SEARCH items USING INDEX items_in_order (project=? AND conversation_id=? AND rowid" + (
                ">?)" if statement == conversations.ASCEND else "<?)"
            )


async def test_a_process_leaves_the_runs_of_some_models_to_others_for_a_while(
    store: SqliteStore, make_stored: MakeStored
) -> None:
    other = SqliteStore(store.path)
    await other.open()
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    await store.enqueue("p", make_stored("resp_2", status="queued"), b"{}")
    await store.request_cancel("p", "resp_2")
    now, patience = time.time(), {"scripted": 60.0}

    async def claim(later: float, **models: float) -> list[str]:
        claimed = await other.claim("them", as_of=now + later, lease=10, limit=9, patience=patience | models)
        assert not any(run.ours for run in claimed)
        return [run.response_id for run in claimed]

    assert await claim(59) == ["resp_2"]  # to end what is cancelled takes no model
    (ours,) = await store.claim("us", as_of=now, lease=10, limit=9, patience=patience)
    assert ours.ours
    await store.put_back("us", "p", "resp_1", free_since=ours.free_since)
    assert await claim(59) == []
    assert await claim(61) == ["resp_1"]
    await other.abandon("them", "p", "resp_1")  # its lease is as good as ten seconds from now
    assert await claim(60) == []
    assert await claim(80) == ["resp_1"]
    await other.close()


async def test_a_run_is_left_to_its_home_for_as_long_as_that_lives(store: SqliteStore, make_stored: MakeStored) -> None:
    other = SqliteStore(store.path)
    await other.open()
    await store.renew("us", lease=10)
    with connected(store.path) as connection:
        assert connection.execute("SELECT count(*) FROM homes").fetchone() == (
            0,
        )  # who waits for nothing writes nothing
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    await store.renew("us", lease=10)
    now, patience = time.time(), {"scripted": 5.0}
    assert await other.claim("them", as_of=now + 14, lease=10, limit=9, patience=patience) == []
    (claimed,) = await other.claim("them", as_of=now + 16, lease=10, limit=9, patience=patience)
    assert now + 9 < claimed.free_since <= now + 10
    await other.close()


async def test_what_was_enqueued_under_the_same_home_is_left_to_nobody(tmp_path: Path, make_stored: MakeStored) -> None:
    for _ in range(2):  # the second time, it is there already
        store = SqliteStore(tmp_path / "store.db", home="here")
        await store.open()
        if await store.load("p", "resp_1") is None:
            await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
        (claimed,) = await store.claim("us", as_of=time.time(), lease=10, limit=9, patience={"scripted": 60.0})
        assert (claimed.response_id, claimed.ours) == ("resp_1", True)
        await store.release("us")
        await store.close()


async def test_a_file_of_the_fourth_version_keeps_its_runs_for_anyone(tmp_path: Path, make_stored: MakeStored) -> None:
    path = tmp_path / "old.db"
    with connected(path) as connection:
        migrate(connection, read_migrations()[:4], path=str(path))
        rows = [("resp_1", None, None, 0), ("resp_2", "dead", 10.0, 1)]
        insert = "INSERT INTO runs (project, response_id, owner, leased_until, attempt, request) VALUES "
        connection.executemany(f"{insert} ('p', ?, ?, ?, ?, 'x')", rows)
    store = SqliteStore(path)
    await store.open()
    claimed = await store.claim("us", as_of=20, lease=10, limit=9)
    await store.close()
    assert [(run.response_id, run.attempt, run.interruptions, run.model, run.free_since) for run in claimed] == [
        ("resp_1", 1, 0, "", 0),
        ("resp_2", 2, 1, "", 10),
    ]
