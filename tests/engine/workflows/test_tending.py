"""DBOS is at work only while there are runs, and nobody waits for its database."""

import asyncio
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.workflows import tending
from antiphon.engine.workflows.client import Client
from antiphon.errors import ConfigError, ServerError
from workflow_bench import DONE, SLOW, Start, ask, finish, wait_for_status, wait_until

# DBOS has made it, and ended before it began.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*coroutine object execute_dequeued_workflow:pytest.PytestUnraisableExceptionWarning"
)


async def test_a_dbos_that_does_not_answer_holds_up_neither_clients_nor_runs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await start(SLOW)
    running = await ask(bench)
    await bench.backend.reached("gate")
    with monkeypatch.context() as patch:
        never = asyncio.Event()
        patch.setattr(Client, "enqueue", lambda *args: never.wait())
        patch.setattr(Client, "list", lambda *args, **options: never.wait())
        waiting = await ask(bench)
        renewed: asyncio.Queue[None] = asyncio.Queue()
        renew = bench.store.renew

        async def renew_and_tell(*args: Any, **options: Any) -> Any:
            held = await renew(*args, **options)
            renewed.put_nowait(None)
            return held

        patch.setattr(bench.store, "renew", renew_and_tell)
        for _ in range(4):  # longer than a lease
            await renewed.get()
        bench.backend.release("gate")
        assert await finish(bench, running) == DONE
        await bench.engine.close()
    second = await start({"default": "so far and on"})
    assert await finish(second, waiting) == DONE


async def test_a_database_that_fails_for_long_is_opened_anew(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tending, "PATIENCE_SECONDS", 0.01)
    bench = await start({})
    broken: set[Client] = set()
    list_workflows = Client.list

    async def fail(client: Client, **which: Any) -> Any:
        if not broken or client in broken:
            broken.add(client)
            raise OSError("malformed")
        return await list_workflows(client, **which)

    monkeypatch.setattr(Client, "list", fail)
    assert (await finish(bench, await ask(bench)))[0] == "completed"
    assert len(broken) == 1


async def test_what_goes_on_while_dbos_begins_anew_still_counts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tending, "PATIENCE_SECONDS", 0.01)
    bench = await start(SLOW, concurrency=1, slots=1)
    first = await ask(bench)
    await bench.backend.reached("gate")
    broken: set[Client] = set()
    looks: list[Client] = []
    list_workflows = Client.list

    async def fail(client: Client, **which: Any) -> Any:
        if not broken or client in broken:
            broken.add(client)
            raise OSError("malformed")
        looks.append(client)
        return await list_workflows(client, **which)

    monkeypatch.setattr(Client, "list", fail)
    second = await ask(bench)
    await wait_for_status(second, "ENQUEUED")

    async def has_looked() -> bool:
        return len(looks) >= 4

    await wait_until(has_looked)
    assert [(await bench.engine.retrieve("default", each)).status for each in (first, second)] == [
        "in_progress",
        "queued",
    ]
    bench.backend.release("gate")
    assert await finish(bench, first) == DONE
    await bench.backend.reached("gate")
    bench.backend.release("gate")
    assert await finish(bench, second) == DONE


async def test_a_store_that_fails_is_not_dbos_s_fault(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await start(SLOW)
    response_id = await ask(bench)
    await bench.backend.reached("gate")
    list_runs, failures = bench.store.list_runs, [ServerError("The store failed.")]

    async def list_late(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await list_runs(*args, **options)

    async def has_failed() -> bool:
        return not failures

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(bench.store, "list_runs", list_late)
        await wait_until(has_failed)
        bench.backend.release("gate")
        assert await finish(bench, response_id) == DONE
    assert caplog.messages == []


async def test_slow_looks_do_not_end_a_dbos_that_has_work(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends in good order leaves workflows that only a second look can tell from those that begin."""
    first = await start(SLOW, home="here")
    running = await ask(first)
    await first.backend.reached("gate")
    await first.engine.close()
    monkeypatch.setattr(tending, "IDLE_SECONDS", 0.0)
    second = await start({"default": "so far and on"}, home="here")
    assert await finish(second, running) == DONE


async def test_there_is_a_dbos_only_while_there_are_runs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tending, "IDLE_SECONDS", 0.01)
    bench = await start({})
    for _ in range(2):
        assert (await finish(bench, await ask(bench)))[0] == "completed"

        async def is_gone() -> bool:
            return not any(thread.name.startswith("queue-worker") for thread in threading.enumerate())

        await wait_until(is_gone)


def test_a_server_without_runs_does_not_load_dbos(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from antiphon.config import DbosSettings, Settings
from antiphon.engine.assemble import build_engine

async def main():
    store = "sqlite:///{tmp_path}/a.db"
    engine = build_engine(Settings(data_dir=Path({str(tmp_path)!r}), store=store, backends={{}}, dbos=DbosSettings()))
    await engine.start()
    await engine.close()

asyncio.run(main())
print(sorted({{"dbos", "sqlalchemy", "psycopg"}} & sys.modules.keys()))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "[]\n"


async def test_a_database_that_cannot_be_used_is_a_configuration_error_and_leaves_nothing_behind(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "dbos.db").write_text("this is no database, and long enough to be taken for one" * 100)
    with pytest.raises(ConfigError, match=r"dbos: its database .* cannot be used: .*not a database"):
        await start({})
    (tmp_path / "dbos.db").unlink()
    bench = await start({})
    assert (await finish(bench, await ask(bench)))[0] == "completed"
