"""Commits on PostgreSQL whose answer is lost with the connection."""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from antiphon.engine.usage import UsageRecorder
from antiphon.errors import ServerError, StoreUnavailable
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Message
from antiphon.protocol.response import Usage
from antiphon.store.base import LeaseLost, StoredResponse
from antiphon.store.sql_usage import _add
from antiphon.store.usage import Spending, UsageRow
from support.postgres_server import EmptySchema

pytest.importorskip("asyncpg")

import asyncpg

from antiphon.store.postgres.steps import _run
from antiphon.store.postgres.store import PostgresStore

MakeStored = Callable[..., StoredResponse]


async def test_events_whose_commit_is_uncertain_can_be_appended_again(
    store: PostgresStore, make_stored: MakeStored, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    await store.claim("us", as_of=0, lease=10, limit=1)
    lose_answer(store, monkeypatch)
    with pytest.raises(StoreUnavailable):
        await store.append_events("p", "resp_1", 0, [b"0", b"1"], owner="us")
    assert await store.read_events("p", "resp_1", -1) == [(0, b"0"), (1, b"1")]
    assert await store.append_events("p", "resp_1", 0, [b"0", b"1", b"2"], owner="us") is True
    with pytest.raises(ServerError, match="already reaches number 0"):
        await store.append_events("p", "resp_1", 0, [b"0", b"1", b"2"], owner="us")
    lose_answer(store, monkeypatch)
    with pytest.raises(StoreUnavailable):
        await store.append_events("p", "resp_1", 3, [b"3"], owner="us")
    await store.save("p", make_stored("resp_1"), owner="us", events=(3, [b"3", b"4"]))
    assert await store.read_events("p", "resp_1", -1) == [(number, b"%d" % number) for number in range(5)]


async def test_end_of_run_whose_commit_is_uncertain_can_be_saved_again(
    store: PostgresStore, make_stored: MakeStored, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    await store.claim("us", as_of=0, lease=10, limit=1)
    await store.append_events("p", "resp_1", 0, [b"0"], owner="us")
    events = 1, [b"1", b"2"]
    lose_answer(store, monkeypatch)
    with pytest.raises(StoreUnavailable):
        await store.save("p", make_stored("resp_1"), owner="us", events=events)
    with pytest.raises(LeaseLost):  # another owner has saved its own answer
        await store.save("p", make_stored("resp_1", text="Other"), owner="us", events=events)
    await store.save("p", make_stored("resp_1"), owner="us", events=events)
    assert await store.load("p", "resp_1") == make_stored("resp_1")
    assert await store.read_events("p", "resp_1", -1) == [(number, b"%d" % number) for number in range(3)]
    with pytest.raises(LeaseLost):
        await store.save("p", make_stored("resp_1"), owner="us", events=events)


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_save_repeated_after_a_lost_answer_keeps_a_deletion(
    store: PostgresStore,
    make_stored: MakeStored,
    monkeypatch: pytest.MonkeyPatch,
    postgres_schema: EmptySchema,
    is_deleted: bool,
) -> None:
    await store.save("p", make_stored("resp_0"))

    def delete() -> None:
        if is_deleted:
            postgres_schema.execute("DELETE FROM responses WHERE id = 'resp_1'")

    lose_answer(store, monkeypatch, delete)
    saved = remove_output(make_stored("resp_1"))
    await store.save("p", saved)
    found = [await store.load("p", response_id) for response_id in ("resp_0", "resp_1")]
    assert found == [make_stored("resp_0"), None if is_deleted else saved]


def remove_output(stored: StoredResponse) -> StoredResponse:
    """Remove the items for which other rows than that of the response are written."""
    stored.response.output.clear()
    return stored


@pytest.mark.parametrize("items", [[], [Message("user", "Hi", "msg_of_the_client")]])
async def test_failure_saved_after_a_lost_answer_keeps_a_deletion(
    store: PostgresStore,
    make_stored: MakeStored,
    monkeypatch: pytest.MonkeyPatch,
    postgres_schema: EmptySchema,
    items: list[Message],
) -> None:
    """A response that could not be saved is saved again as failed, in an operation of its own."""
    await store.save("p", make_stored("resp_0"))
    stored = remove_output(make_stored("resp_1"))
    stored.input.extend(items)
    lose_answer(store, monkeypatch)
    other_work = store.create_conversation("p", Conversation(id="conv_1", created_at=1), [])  # it cannot be repeated
    results = await asyncio.gather(store.save("p", stored), other_work, return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnavailable, StoreUnavailable]
    assert await store.delete("p", "resp_1") is True
    await store.save("p", remove_output(make_stored("resp_1", status="failed")))
    assert await store.load("p", "resp_1") is None
    assert postgres_schema.fetch("SELECT response_id FROM deletions") == [("resp_1",)]
    await store.save("p", make_stored("resp_1"))  # nothing is uncertain any more
    assert await store.load("p", "resp_1") == make_stored("resp_1")


async def test_usage_whose_commit_is_uncertain_is_added_once(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = UsageRecorder(store, {}, now=lambda: 60.0)
    for is_written in (True, False, True):
        usage.record("p", "key_1", "m", Usage(10, 5, 15))
        if not is_written:
            lose_answer(store, monkeypatch)
        assert await usage.flush() is is_written
    await usage.close()
    assert await store.list_usage(0, 120, width=60) == [UsageRow(60, "p", "key_1", "m", 3, 30, 0, 15, 0.0)]
    assert await store.read_spending(0) == [Spending("p", "key_1", 45, 0.0)]


@pytest.mark.parametrize("is_committed", [True, False])
async def test_repeated_write_of_usage_waits_for_the_end_of_the_first(
    store: PostgresStore, postgres_url: str, is_committed: bool
) -> None:
    """The server may still execute the first write when its connection is lost."""
    row = UsageRow(60, "p", "key_1", "m", 1, 10, 0, 5, 0.0)
    has_written, gate = asyncio.Event(), asyncio.Event()

    async def write_slowly(connection: Any) -> None:
        await _run(connection, _add, ([row], "1"), None)
        has_written.set()
        await gate.wait()
        if not is_committed:
            raise ValueError

    other = PostgresStore(postgres_url)
    await other.open()
    first = other._writer.submit(write_slowly, ())
    await has_written.wait()
    repeated = asyncio.create_task(store.add_usage([row], write_id="1"))
    assert (await store.list_usage(0, 120, width=60), repeated.done()) == ([], False)
    gate.set()
    await asyncio.gather(first, repeated, return_exceptions=True)
    await other.close()
    assert await store.list_usage(0, 120, width=60) == [row]


async def test_conversation_whose_commit_is_uncertain_is_not_created_again(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, postgres_schema: EmptySchema
) -> None:
    await store.create_conversation("p", Conversation(id="conv_0", created_at=1), [])
    lose_answer(store, monkeypatch, lambda: postgres_schema.execute("DELETE FROM conversations WHERE id = 'conv_1'"))
    with pytest.raises(StoreUnavailable):
        await store.create_conversation("p", Conversation(id="conv_1", created_at=1), [Message("user", "Hi", "msg_1")])
    found = [await store.load_conversation("p", conversation_id) for conversation_id in ("conv_0", "conv_1")]
    assert found == [Conversation(id="conv_0", created_at=1), None]
    assert await store.find_item("p", "msg_1") is None


async def test_deletions_are_forgotten_after_a_day_and_not_recorded_for_expired_responses(
    store: PostgresStore, make_stored: MakeStored, postgres_schema: EmptySchema
) -> None:
    postgres_schema.execute("INSERT INTO deletions VALUES ('p', 'resp_old', clock_timestamp() - interval '25 hours')")
    await store.save("p", make_stored("resp_1", expires_at=1))
    await store.expire(2)
    assert postgres_schema.fetch("SELECT response_id FROM deletions") == [("resp_old",)]
    await store.save("p", make_stored("resp_2"))
    await store.delete("p", "resp_2")
    assert postgres_schema.fetch("SELECT response_id FROM deletions") == [("resp_2",)]


def lose_answer(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, on_lost: Callable[[], None] = lambda: None
) -> None:
    """Let the connection of the writer break after its next commit, before the answer arrives."""
    connection: Any = store._writer._connection
    kind = type(connection)
    execute, fetchmany = kind.execute, kind.fetchmany

    def lose() -> NoReturn:
        monkeypatch.undo()
        connection.terminate()
        on_lost()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    async def execute_and_lose(self: Any, statement: str, *parameters: object) -> Any:
        result = await execute(self, statement, *parameters)
        if self is connection and statement == "COMMIT":
            lose()
        return result

    async def fetch_and_lose(self: Any, *given: Any) -> Any:
        rows = await fetchmany(self, *given)
        if self is connection and not self.is_in_transaction():
            lose()
        return rows

    monkeypatch.setattr(kind, "execute", execute_and_lose)
    monkeypatch.setattr(kind, "fetchmany", fetch_and_lose)
