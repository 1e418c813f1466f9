"""Shared run limits over several processes on one SQLite file."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest

from antiphon.store.base import StoredResponse
from antiphon.store.limits import RunLimits
from antiphon.store.migration_files import read_migrations
from antiphon.store.sqlite.migrations import migrate
from antiphon.store.sqlite.runs import WAITING, WAITING_PROJECTS
from antiphon.store.sqlite.store import SqliteStore
from support.store_process import start_store_process

MakeStored = Callable[..., StoredResponse]


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[list[SqliteStore]]:
    """Three stores on one file, with separate connections as in three processes."""
    stores = [SqliteStore(tmp_path / "store.db") for _ in range(3)]
    for store in stores:
        await store.open()
    yield stores
    for store in stores:
        await store.close()


async def test_concurrent_claims_share_the_limits(stores: list[SqliteStore], make_stored: MakeStored) -> None:
    first = stores[0]
    for number in range(30):
        await first.enqueue("abc"[number % 3], make_stored(f"resp_{number}", status="queued"), b"{}")
    limits = RunLimits(concurrency=5, concurrency_per_project=2)
    ended = 0
    while ended < 30:
        claims = await asyncio.gather(
            *(
                store.claim(f"owner {n}", as_of=time.time(), lease=60, limit=4, limits=limits)
                for n, store in enumerate(stores)
            )
        )
        projects = [run.project for claimed in claims for run in claimed]
        assert 0 < len(projects) <= 5
        assert all(projects.count(project) <= 2 for project in "abc")
        for owner, claimed in enumerate(claims):
            for run in claimed:
                await stores[owner].save(run.project, make_stored(run.response_id), owner=f"owner {owner}")
        ended += len(projects)


async def test_two_processes_share_the_starts_of_a_minute(stores: list[SqliteStore], make_stored: MakeStored) -> None:
    for number in range(12):
        await stores[0].enqueue("p", make_stored(f"resp_{number}", status="queued"), b"{}")
    children = [start_store_process("claim_starts", stores[0].path, name, 7) for name in ("one", "two")]
    started = [line.strip() for child in children for line in iter(child.stdout.readline, "done\n")]  # type: ignore[union-attr]
    for child in children:
        child.communicate()
    assert [child.returncode for child in children] == [0, 0]
    assert sorted(started) == [f"resp_{number}" for number in range(7)]
    # The starts are in the file, though both processes are gone.
    limits = RunLimits(starts_per_minute=7)
    assert await stores[1].claim("us", as_of=time.time(), lease=60, limit=99, limits=limits) == []


async def test_starts_survive_a_restart(tmp_path: Path, make_stored: MakeStored) -> None:
    limits = RunLimits(starts_per_minute=1)
    for number, expected in enumerate((1, 0, 0)):
        store = SqliteStore(tmp_path / "store.db")
        await store.open()
        await store.enqueue("p", make_stored(f"resp_{number}", status="queued"), b"{}")
        claimed = await store.claim(f"owner {number}", as_of=time.time(), lease=60, limit=9, limits=limits)
        assert len(claimed) == expected
        for run in claimed:
            await store.save("p", make_stored(run.response_id), owner=f"owner {number}")
        await store.close()


async def test_old_starts_are_deleted_and_none_are_written_without_a_limit(
    tmp_path: Path, make_stored: MakeStored
) -> None:
    clock = iter([0.0, 0.0, 0.0, 0.0, 1.0, 61.0, 62.0])
    store = SqliteStore(tmp_path / "store.db", now=lambda: next(clock))
    await store.open()
    for number in range(4):
        await store.enqueue("p", make_stored(f"resp_{number}", status="queued"), b"{}")
    found = []
    for limits in (RunLimits(starts_per_minute=9), RunLimits(starts_per_minute=9), RunLimits()):
        await store.claim("us", as_of=0, lease=60, limit=1, limits=limits)
        with closing(sqlite3.connect(store.path)) as connection:
            found.append(connection.execute("SELECT started_at FROM run_starts").fetchall())
    await store.close()
    assert found == [[(1.0,)], [(61.0,)], [(61.0,)]]


async def test_migration_from_version_6_keeps_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, read_migrations("sqlite")[:6], path=str(path))
        insert = (
            "INSERT INTO runs (project, response_id, owner, leased_until, attempt, request) VALUES (?, ?, ?, ?, ?, 'x')"
        )
        rows = [("a", "resp_1", "dead", 10.0, 1), ("a", "resp_2", None, None, 0), ("b", "resp_3", None, None, 0)]
        connection.executemany(insert, rows)
    store = SqliteStore(path, now=lambda: 20.0)
    await store.open()
    limits = RunLimits(concurrency_per_project=1, starts_per_minute=9)
    claimed = await store.claim("us", as_of=20, lease=10, limit=9, limits=limits)
    await store.close()
    assert [(run.response_id, run.attempt) for run in claimed] == [("resp_1", 2), ("resp_3", 1)]


async def test_waiting_runs_are_read_from_the_index_alone(stores: list[SqliteStore]) -> None:
    with closing(sqlite3.connect(stores[0].path)) as connection:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {WAITING}", ("p", 0, True))]
        projects = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {WAITING_PROJECTS}")]
    search = "SEARCH runs USING COVERING INDEX waiting_runs"
    assert plan == [f"{search} (owner=? AND project=? AND position>?)"]
    assert [step for step in projects if "runs" in step] == [
        f"{search} (owner=?)",
        f"{search} (owner=? AND project>?)",
        f"{search} (owner=? AND project=?)",
    ]


async def test_claim_reads_few_rows_of_a_long_queue(tmp_path: Path) -> None:
    path = tmp_path / "long.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, read_migrations("sqlite"), path=str(path))
        insert = "INSERT INTO runs (project, response_id, request, attempt) VALUES (?, ?, 'x', 0)"
        connection.execute("BEGIN")
        connection.executemany(insert, [("abc"[number % 3], f"resp_{number}") for number in range(30_000)])
        connection.execute("COMMIT")
        steps = 0

        def count_steps() -> int:
            nonlocal steps
            steps += 1
            return 0

        connection.set_progress_handler(count_steps, 100)
        assert sorted(connection.execute(WAITING_PROJECTS)) == [("a", 1), ("b", 2), ("c", 3)]
        assert next(connection.execute(WAITING, ("b", 0, True)))[0] == 2
    assert steps < 10
