"""The SQLite store: use of indexes, several processes, crashes, migration of old files."""

import asyncio
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item, Message
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store import (
    sql_chains,
    sql_containers,
    sql_conversations,
    sql_events,
    sql_expiry,
    sql_hosted_steps,
    sql_keys,
    sql_prompts,
    sql_references,
    sql_responses,
    sql_runs,
)
from antiphon.store.base import ClaimedRun, StoredResponse
from antiphon.store.migration_files import read_migrations
from antiphon.store.record import pack_response
from antiphon.store.sql_steps import RowInsert, Statement, Variants
from antiphon.store.sqlite import events, input_parts, runs
from antiphon.store.sqlite.migrations import migrate
from antiphon.store.sqlite.steps import translate
from antiphon.store.sqlite.store import SqliteStore
from support.store_process import start_store_process

MakeStored = Callable[..., StoredResponse]

MODULES = (
    events,
    input_parts,
    runs,
    sql_chains,
    sql_containers,
    sql_conversations,
    sql_events,
    sql_expiry,
    sql_hosted_steps,
    sql_prompts,
    sql_references,
    sql_responses,
    sql_runs,
)


def complete(statement: Statement | RowInsert) -> str:
    """Return a statement as the SQLite store executes it."""
    return translate(statement.for_rows(3) if isinstance(statement, RowInsert) else statement)


STATEMENTS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": complete(statement)
    for module in MODULES
    for name, statement in vars(module).items()
    if name.isupper() and name[0] != "_" and isinstance(statement, str | RowInsert | Variants)
}
STATEMENTS["keys.FIND"] = sql_keys.FIND  # the others read or change the few keys on behalf of an administrator


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


def explain(connection: sqlite3.Connection, statement: str) -> list[str]:
    numbered = {int(number) for number in re.findall(r"\?(\d+)", statement)}
    parameters = [None] * max(numbered, default=statement.count("?"))
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]


@pytest.mark.parametrize("name", STATEMENTS)
def test_statement_uses_an_index(empty_database: Path, name: str) -> None:
    with connected(empty_database) as other:
        plan = explain(other, STATEMENTS[name])
    # These scan the rows of a subquery, which has a plan of its own, or a list in the parameters.
    allowed = (
        "SCAN walked",
        "SCAN due",
        "SCAN located",
        "SCAN json_each ",
        "SCAN CONSTANT ROW",
        "SCAN 3 CONSTANT ROWS",
    )
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
async def test_cascading_delete_uses_an_index(store: SqliteStore, table: str, column: str, migration: int) -> None:
    statement = f"DELETE FROM {table} WHERE project = old.project AND {column} = old.id"
    assert statement in read_migrations("sqlite")[migration - 1].script
    with connected(store.path) as other:
        (step,) = explain(other, statement.replace("old.project", "?").replace("old.id", "?"))
    assert step.startswith(f"SEARCH {table} USING ")


async def test_trigger_on_continued_responses_uses_an_index(store: SqliteStore) -> None:
    found = "WHERE project = old.project AND id = old.previous_response_id AND continued = 1;"
    assert read_migrations("sqlite")[2].script.count(found) == 2
    statement = f"UPDATE responses SET continued = 0 {found}"
    with connected(store.path) as other:
        (step,) = explain(other, statement.replace("old.project", "?").replace("old.previous_response_id", "?"))
    assert step == "SEARCH responses USING INDEX sqlite_autoindex_responses_1 (project=? AND id=?)"


async def test_every_index_is_used_by_a_statement(store: SqliteStore) -> None:
    with connected(store.path) as other:
        indexes = {name for (name,) in other.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        used = " ".join(step for statement in STATEMENTS.values() for step in explain(other, statement)).split()
    assert indexes - set(used) == set()


async def test_foreign_items_are_indexed_while_their_response_is_stored(
    store: SqliteStore,
) -> None:
    ids = {"resp_T": ["msg_T0000", "fc_T0001"], "resp_U": ["msg_U0000", "msg_T0000", "msg_mine", "mine"]}
    for response_id, item_ids in ids.items():
        items: list[Item | Unknown] = [Message("user", "hi", item_id) for item_id in item_ids]
        response = Response(id=response_id, created_at=1, model="m", status="completed", output=items[1:])
        await store.save("p", StoredResponse(response=response, input=items[:1]))
    select = "SELECT response_id, item_id FROM foreign_items ORDER BY item_id"
    with connected(store.path) as other:
        assert other.execute(select).fetchall() == [("resp_U", each) for each in ("mine", "msg_T0000", "msg_mine")]
        await store.delete("p", "resp_U")
        assert other.execute(select).fetchall() == []


async def test_killed_process_loses_no_acknowledged_change(store: SqliteStore, make_stored: MakeStored) -> None:
    await store.create_conversation("p", Conversation("conv_1", 1), [])
    await store.save("p", make_stored("resp_log"))
    with start_store_process("change_for_ever", store.path) as child:
        assert child.stdout is not None
        for _ in range(20):
            child.stdout.readline()
        child.kill()
        rest = child.stdout.read().split("\n")
    turns = 2 * (20 + len(rest) - 1)  # the last line may be cut off
    assert turns >= 40

    items = await store.load_conversation_items("p", "conv_1")
    assert items is not None
    assert len(items) % 3 == 0
    assert [item.id for item in items][: 3 * turns] == [f"holo_{n}_{index}" for n in range(turns) for index in range(3)]
    logged = await store.read_events("p", "resp_log", -1)
    assert logged[: 2 * turns] == [(number, b'"%d"' % number) for number in range(2 * turns)]

    # The runs that the child had claimed are free. Their marks are stored.
    claimed = (await store.claim("us", as_of=9, lease=10, limit=9_999))[:turns]
    expected = [
        ClaimedRun(
            "p", f"resp_{n}", b"%d" % n, 2, n % 2 == 1, n % 2 == 1, 1, "m", same_configuration=False, free_since=0
        )
        for n in range(turns)
    ]
    assert [claim._replace(free_since=0) for claim in claimed] == expected


async def test_blocks_of_two_processes_do_not_interleave(store: SqliteStore) -> None:
    await store.create_conversation("p", Conversation("conv_1", 1), [])
    with (
        start_store_process("append_many", store.path, "a", 60) as first,
        start_store_process("append_many", store.path, "b", 60) as second,
    ):
        outcomes = [await asyncio.to_thread(child.communicate, timeout=60) for child in (first, second)]
    assert outcomes == [("", ""), ("", "")]

    items = await store.load_conversation_items("p", "conv_1")
    assert items is not None
    ids = [str(item.id) for item in items]
    names = [ids[start].removesuffix("_0") for start in range(0, len(ids), 3)]
    assert ids == [f"{name}_{number}" for name in names for number in range(3)]
    for process in "ab":
        own = [name for name in names if name.startswith(process)]
        assert own == [f"{process}_{turn}_{half}" for turn in range(60) for half in "ab"]


async def test_two_processes_never_claim_the_same_run(store: SqliteStore, make_stored: MakeStored) -> None:
    await asyncio.gather(*(store.enqueue("p", make_stored(f"resp_{n}", status="queued"), b"{}") for n in range(200)))
    with (
        start_store_process("claim_all", store.path, "a") as first,
        start_store_process("claim_all", store.path, "b") as second,
    ):
        outcomes = [await asyncio.to_thread(child.communicate, timeout=60) for child in (first, second)]
    assert [errors for _, errors in outcomes] == ["", ""]
    claimed = sorted(line for printed, _ in outcomes for line in printed.splitlines())
    assert claimed == sorted(f"resp_{n} 1" for n in range(200))


async def test_expire_does_not_block_other_writers(store: SqliteStore, make_stored: MakeStored) -> None:
    expired = [make_stored(f"resp_{n}", expires_at=1) for n in range(3 * sql_expiry.EXPIRY_STEP)]
    await asyncio.gather(*(store.save("p", stored) for stored in expired))
    expiring = asyncio.ensure_future(store.expire(1))
    await asyncio.sleep(0)
    await store.save("p", make_stored("resp_other"))
    assert not expiring.done()
    assert await expiring == len(expired)
    assert await store.load("p", "resp_other") == make_stored("resp_other")


async def test_migration_from_version_2_keeps_the_expiry_of_chains(tmp_path: Path, make_stored: MakeStored) -> None:
    path = tmp_path / "old.db"
    with connected(path) as other:
        migrate(other, read_migrations("sqlite")[:2], path=str(path))
        for turn in range(3):
            stored = make_stored(f"resp_{turn}", previous=f"resp_{turn - 1}" if turn else None, expires_at=10 + turn)
            other.execute(sql_responses.INSERT.one_row, ("p", *pack_response(stored)))
    store = SqliteStore(path, now=lambda: 0)
    await store.open()
    assert [await store.expire(now) for now in (10, 11)] == [0, 0]
    assert [link.id for link in await store.load_chain("p", "resp_2")] == ["resp_0", "resp_1", "resp_2"]
    assert await store.expire(12) == 3
    await store.close()


async def test_expire_skips_responses_marked_as_continued(store: SqliteStore, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_0", expires_at=10))
    await store.save("p", make_stored("resp_1", previous="resp_0"))
    with connected(store.path) as other:
        due = translate(sql_expiry.DUE)
        assert other.execute(due, (15, 9)).fetchall() == [("p", "resp_0", "resp_1")]
        assert await store.expire(15) == 0
        assert other.execute(due, (15, 9)).fetchall() == []
        await store.delete("p", "resp_1")
        assert other.execute(due, (15, 9)).fetchall() == [("p", "resp_0", None)]


async def test_page_of_a_conversation_is_read_by_index(store: SqliteStore) -> None:
    with connected(store.path) as other:
        for statement in (sql_conversations.ASCEND, sql_conversations.DESCEND):
            (step,) = explain(other, statement)
            assert step == "SEARCH items USING INDEX items_in_order (project=? AND conversation_id=? AND rowid" + (
                ">?)" if statement == sql_conversations.ASCEND else "<?)"
            )


async def test_run_of_another_configuration_is_skipped_for_the_given_time(
    store: SqliteStore, make_stored: MakeStored
) -> None:
    other = SqliteStore(store.path)
    await other.open()
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    await store.enqueue("p", make_stored("resp_2", status="queued"), b"{}")
    await store.request_cancel("p", "resp_2")
    now, wait_by_model = time.time(), {"scripted": 3600.0}

    async def claim(later: float, **models: float) -> list[str]:
        claimed = await other.claim("them", as_of=now + later, lease=10, limit=9, wait_by_model=wait_by_model | models)
        assert not any(run.same_configuration for run in claimed)
        return [run.response_id for run in claimed]

    assert await claim(3540) == ["resp_2"]  # ending a cancelled run needs no model
    (ours,) = await store.claim("us", as_of=now, lease=10, limit=9, wait_by_model=wait_by_model)
    assert ours.same_configuration
    await store.return_run("us", "p", "resp_1", free_since=ours.free_since)
    assert await claim(3540) == []
    assert await claim(3660) == ["resp_1"]
    await other.stop_renewing("them", "p", "resp_1")  # its lease expires in ten seconds
    assert await claim(3600) == []
    assert await claim(3680) == ["resp_1"]
    await other.close()


async def test_run_is_left_to_its_configuration_while_that_is_alive(
    store: SqliteStore, make_stored: MakeStored
) -> None:
    other = SqliteStore(store.path)
    await other.open()
    await store.renew("us", lease=1000)
    with connected(store.path) as connection:
        # A process without waiting runs writes nothing.
        assert connection.execute("SELECT count(*) FROM configurations").fetchone() == (0,)
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    await store.renew("us", lease=1000)
    now, wait_by_model = time.time(), {"scripted": 500.0}
    assert await other.claim("them", as_of=now + 1400, lease=10, limit=9, wait_by_model=wait_by_model) == []
    (claimed,) = await other.claim("them", as_of=now + 1600, lease=10, limit=9, wait_by_model=wait_by_model)
    assert now + 900 < claimed.free_since <= now + 1000
    await other.close()


async def test_run_of_the_same_configuration_is_claimed_at_once(tmp_path: Path, make_stored: MakeStored) -> None:
    for _ in range(2):  # the second store finds the run of the first
        store = SqliteStore(tmp_path / "store.db", configuration_id="here")
        await store.open()
        if await store.load("p", "resp_1") is None:
            await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
        (claimed,) = await store.claim("us", as_of=time.time(), lease=10, limit=9, wait_by_model={"scripted": 60.0})
        assert (claimed.response_id, claimed.same_configuration) == ("resp_1", True)
        await store.release("us")
        await store.close()


async def test_migration_from_version_4_keeps_runs_claimable(tmp_path: Path, make_stored: MakeStored) -> None:
    path = tmp_path / "old.db"
    with connected(path) as connection:
        migrate(connection, read_migrations("sqlite")[:4], path=str(path))
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
