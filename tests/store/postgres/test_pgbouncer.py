"""The PostgreSQL store behind PgBouncer in transaction mode. Skipped if PgBouncer is not installed."""

import asyncio
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from antiphon.store.base import StoredResponse
from antiphon.store.changes import Change, ReportsLost, RunsQueued
from antiphon.store.limits import StoreLimits
from antiphon.store.location import locate_store
from antiphon.store.postgres import notifications
from antiphon.store.postgres.connection import IDLE_SECONDS
from antiphon.store.postgres.store import PostgresStore
from support.ports import port_of, reserve_port
from support.postgres_server import EmptySchema, is_installed

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
MakeStored = Callable[..., StoredResponse]

pytestmark = pytest.mark.skipif(PGBOUNCER is None or not is_installed(), reason="needs pgbouncer and make extras")


@pytest.fixture
def pooled_url(postgres_server: str, postgres_url: str) -> Iterator[str]:
    """The URL of the store through a pooler with two sessions."""
    with run_pooler(postgres_server, postgres_url, mode="transaction") as url:
        yield url


@contextmanager
def run_pooler(postgres_server: str, postgres_url: str, *, mode: str) -> Iterator[str]:
    server = urlsplit(postgres_server)
    schema = postgres_url.rpartition("=")[2]
    reserved = reserve_port()
    port = port_of(reserved)
    folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
    config = folder / "pgbouncer.ini"
    config.write_text(
        f"""
[databases]
data = host={server.hostname} port={server.port} dbname=postgres user=postgres pool_size=2
    connect_query='SET search_path = {schema}'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
auth_type = any
pool_mode = {mode}
unix_socket_dir =
max_client_conn = 100
""".replace("\n    connect_query", " connect_query")
    )
    folder.chmod(0o755)
    command = [str(PGBOUNCER), *(["-u", "pgserver"] if os.geteuid() == 0 else []), str(config)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "process up" not in process.stderr.readline():
        assert process.poll() is None
    yield f"postgresql://postgres@127.0.0.1:{port}/data"
    process.terminate()
    process.communicate()
    reserved.close()
    shutil.rmtree(folder)


async def test_store_works_behind_a_pooler_in_transaction_mode(
    pooled_url: str,
    postgres_url: str,
    postgres_schema: EmptySchema,
    make_stored: MakeStored,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="antiphon.store")
    stores = [locate_store(pooled_url, limits=StoreLimits(listen_url=url)) for url in ("", postgres_url, postgres_url)]
    changes: asyncio.Queue[Change] = asyncio.Queue()
    for store in stores:
        await store.open()
    stores[0].on_change = lambda _: None
    assert "Set store_listen_url" in caplog.text
    stores[1].on_change = changes.put_nowait
    assert await changes.get() == ReportsLost()
    assert [store.reports_changes for store in stores] == [False, True, False]

    async def use(number: int) -> None:
        store = stores[number]
        for turn in range(5):
            response_id = f"resp_{number}_{turn}"
            await store.enqueue("p", make_stored(response_id, status="queued"), b"{}")
            await store.append_events("p", response_id, 0, [b"{}"])
            await store.save("q", make_stored(response_id))
            assert await store.load("q", response_id) == make_stored(response_id)
            await store.claim(f"owner{number}", as_of=0, lease=60, limit=1)

    await asyncio.gather(*(use(number) for number in range(3)))
    assert await changes.get() == RunsQueued()
    claimed = [len(await store.renew(f"owner{number}", lease=60)) for number, store in enumerate(stores)]
    assert sum(claimed) == 15
    # A session of the pooler does not end with a process: only an owner with a connection of its own holds a lock.
    async with asyncio.timeout(60):
        while not postgres_schema.fetch("SELECT 1 FROM runs WHERE locked_owner IS NOT NULL"):
            for number, store in enumerate(stores):
                assert await store.claim(f"owner{number}", as_of=0, lease=60, limit=1) == []
    assert sorted(postgres_schema.fetch("SELECT DISTINCT owner, locked_owner FROM runs")) == [
        ("owner0", None),
        ("owner1", "owner1"),
        ("owner2", None),
    ]
    for store in stores:
        await store.close()


async def test_limit_of_idle_transactions_is_not_left_on_the_sessions_of_a_pooler(pooled_url: str) -> None:
    limit = "SELECT current_setting('idle_in_transaction_session_timeout')"
    store = locate_store(pooled_url)
    assert isinstance(store, PostgresStore)
    await store.open()
    try:
        written = await store._writer.submit(lambda connection: connection.fetchval(limit), ())
        read = (await store._reader.submit(limit))[0][0]
        async with store._reader.use() as connection:
            outside = await connection.fetchval(limit)
    finally:
        await store.close()
    assert (written, read, outside) == (f"{IDLE_SECONDS}s", f"{IDLE_SECONDS}s", "0")


async def test_other_processes_cannot_be_reached_through_a_pooler(pooled_url: str) -> None:
    from antiphon.store.postgres.inspection import ask_processes

    assert await ask_processes(pooled_url, "settings", seconds=1) is None
    assert await ask_processes(pooled_url, "settings", seconds=1, listen_url=pooled_url) is None


async def test_other_processes_are_found_with_the_url_of_the_server(pooled_url: str, postgres_url: str) -> None:
    from antiphon.store.postgres.inspection import ask_processes

    assert await ask_processes(pooled_url, "settings", seconds=60, listen_url=postgres_url) == []


async def test_pooler_in_session_mode_passes_notifications_on(postgres_server: str, postgres_url: str) -> None:
    with run_pooler(postgres_server, postgres_url, mode="session") as url:
        stores = [locate_store(postgres_url, limits=StoreLimits(listen_url=each)) for each in (url, "")]
        changes: asyncio.Queue[Change] = asyncio.Queue()
        for store, notify in zip(stores, (changes.put_nowait, lambda _: None), strict=True):
            assert isinstance(store, PostgresStore)
            await store.open()
            store.on_change = notify
            await store.peer_link.wait_connected()
        assert await changes.get() == ReportsLost()
        stores[1].announce(RunsQueued())
        assert await changes.get() == RunsQueued()

        async def repeat(payload: bytes) -> bytes:
            return payload * 2

        stores[0].peer_link.answers["repeat"] = repeat
        assert await stores[1].peer_link.ask("repeat", b"a") == [b"aa"]
        for store in stores:
            await store.close()


async def test_pooler_as_the_url_for_notifications_is_reported(
    pooled_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "POOLER_SECONDS", 0.2)
    caplog.set_level(logging.WARNING, logger="antiphon.store")
    store = locate_store(pooled_url, limits=StoreLimits(listen_url=pooled_url))
    assert isinstance(store, PostgresStore)
    await store.open()
    store.on_change = lambda _: None
    while store._notifications.can_listen:
        await store.check()
    await store.close()
    (record,) = caplog.records
    assert record.message.startswith("notifications are not received: store_listen_url: 127.0.0.1:")
    assert "/data is a connection pooler that does not support LISTEN. Set it to the URL of" in record.message
