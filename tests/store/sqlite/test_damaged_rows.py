"""Rows that were damaged on disk: an error for their id only, and a queue that goes on."""

import asyncio
import logging
import random
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from antiphon.errors import AntiphonError, ServerError
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Message
from antiphon.store.base import StoredResponse
from antiphon.store.sqlite.store import SqliteStore

MakeStored = Callable[..., StoredResponse]
Call = Callable[[SqliteStore], Awaitable[object]]

DAMAGES = {
    "empty": b"",
    "zero": b"\0",
    "no JSON": b'[{"type":',
    "no UTF-8": b'[{"type":"message","role":"user","content":"\xff"}]',
    "other JSON": b"17",
    "text": "text",
    "number": 17,
    "fraction": 1.5,
}

READS: dict[str, list[Call]] = {
    "responses": [
        lambda store: store.load("p", "resp_1"),
        lambda store: store.load_response("p", "resp_1"),
        lambda store: store.load_bare_response("p", "resp_1"),
        lambda store: store.load_chain("p", "resp_1", with_tools=True),
        lambda store: store.load_chain("p", "resp_2", with_tools=True),
        lambda store: store.load_outputs("p", ["resp_1"]),
        lambda store: store.find_item("p", "msg_resp_1"),
    ],
    "conversations": [
        lambda store: store.load_conversation("p", "conv_1"),
        lambda store: store.load_conversation_items("p", "conv_1"),
    ],
    "items": [
        lambda store: store.load_conversation_items("p", "conv_1"),
        lambda store: store.load_item("p", "conv_1", "item_1"),
        lambda store: store.list_items("p", "conv_1", after=None, limit=5, order="asc"),
        lambda store: store.find_item("p", "item_1"),
    ],
    "events": [
        lambda store: store.read_events("p", "resp_1", -1),
        lambda store: store.read_events("p", "resp_1", -1, max_bytes=10),
    ],
}

COLUMNS = [
    *(("responses", column) for column in ("previous_response_id", "created_at", "final", "input", "output", "body")),
    *(("conversations", column) for column in ("created_at", "metadata")),
    ("items", "content"),
    *(("events", column) for column in ("last", "lines")),
]

RUN_COLUMNS = [
    *("project", "response_id", "owner", "leased_until", "attempt", "watched", "cancelled", "request"),
    *("interruptions", "lease", "model", "configuration_id", "free_since"),
]


@pytest.fixture
async def store(tmp_path: Path, make_stored: MakeStored) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    await fill(store, make_stored)
    yield store
    await store.close()


async def fill(store: SqliteStore, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_1"))
    await store.save("p", make_stored("resp_2", previous="resp_1"))
    await store.save("p", make_stored("resp_other"))
    await store.create_conversation("p", Conversation("conv_1", 1), [Message("user", "Hello", "item_1")])
    await store.create_conversation("p", Conversation("conv_other", 1), [Message("user", "Hello", "item_2")])
    await store.append_events("p", "resp_1", 0, [b'{"type":"a"}', b'{"type":"b"}'])


def write(store: SqliteStore, table: str, column: str, value: object) -> object:
    """Write a value into a row, and return the value before."""
    keys = {
        "responses": "id = 'resp_1'",
        "conversations": "id = 'conv_1'",
        "items": "conversation_id = 'conv_1'",
        "runs": "position = (SELECT min(position) FROM runs)",
        "events": "response_id = 'resp_1'",
    }
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        (before,) = other.execute(f"SELECT {column} FROM {table} WHERE {keys[table]}").fetchone()
        other.execute(f"UPDATE {table} SET {column} = ? WHERE {keys[table]}", (value,))
        return before


@pytest.mark.parametrize(("table", "column"), COLUMNS)
async def test_damaged_row_fails_only_requests_for_its_id(
    store: SqliteStore, make_stored: MakeStored, table: str, column: str
) -> None:
    for damage in DAMAGES.values():
        original = write(store, table, column, damage)
        outcomes = await asyncio.gather(*(call(store) for call in READS[table]), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert [type(error) for error in errors] == [ServerError] * len(errors)
        assert all("_1 cannot be read" in str(error) and error.__cause__ is None for error in errors)
        assert await store.load("p", "resp_other") == make_stored("resp_other")
        assert await store.load_conversation_items("p", "conv_other") == [Message("user", "Hello", "item_2")]
        await store.save("p", make_stored("resp_new"))
        write(store, table, column, original)
    assert store.failure is None


@pytest.mark.parametrize("column", ["input", "output", "body"])
async def test_damaged_response_can_be_deleted(store: SqliteStore, column: str) -> None:
    write(store, "responses", column, b"{")
    assert await store.delete("p", "resp_1") is True
    assert await store.load("p", "resp_1") is None


async def test_damage_is_logged_in_one_line(store: SqliteStore, caplog: pytest.LogCaptureFixture) -> None:
    write(store, "responses", "body", b"{")
    with pytest.raises(ServerError):
        await store.load("p", "resp_1")
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "the stored response resp_1 cannot be read" in record.getMessage()
    assert record.exc_info is None


@pytest.mark.parametrize("column", RUN_COLUMNS)
async def test_damaged_run_does_not_block_the_queue(store: SqliteStore, make_stored: MakeStored, column: str) -> None:
    for number, damage in enumerate(DAMAGES.values()):
        for response_id in (f"resp_damaged_{number}", f"resp_waiting_{number}"):
            await store.enqueue("p", make_stored(response_id, status="queued"), b"{}")
        write(store, "runs", column, damage)
        claimed = await store.claim("us", as_of=1e12, lease=5, limit=5)
        assert f"resp_waiting_{number}" in [run.response_id for run in claimed]
        await store.renew("us", lease=5)
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("DELETE FROM runs")


async def test_owner_with_the_name_of_a_path_deletes_no_file(store: SqliteStore, make_stored: MakeStored) -> None:
    await store.enqueue("p", make_stored("resp_3", status="queued"), b"{}")
    await store.claim("them", as_of=0, lease=5, limit=5)
    write(store, "runs", "owner", "../store.db")
    await store.claim("us", as_of=0, lease=5, limit=5)
    await store.check()


@pytest.mark.parametrize("seed", range(6))
async def test_flipped_bits_in_the_file_give_only_errors_of_the_store(
    tmp_path: Path, make_stored: MakeStored, seed: int
) -> None:
    path = tmp_path / "flipped.db"
    store = SqliteStore(path)
    await store.open()
    await fill(store, make_stored)
    await store.enqueue("p", make_stored("resp_3", status="queued"), b"{}")
    await store.close()
    flip_bits(path, random.Random(seed))
    store = SqliteStore(path)
    with suppress(AntiphonError):
        await store.open()
        for call in [call for calls in READS.values() for call in calls]:
            with suppress(AntiphonError):
                await call(store)
        with suppress(AntiphonError):
            await store.claim("us", as_of=1e12, lease=5, limit=5)
        with suppress(AntiphonError):
            await store.save("p", make_stored("resp_new"))
    await store.close()


def flip_bits(path: Path, source: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(20):
        content[source.randrange(100, len(content))] ^= 1 << source.randrange(8)
    path.write_bytes(content)
