"""Background responses that DBOS hands out, within its limits, while there are any."""

import asyncio
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from dbos import DBOS

from antiphon.backends.base import Deltas, Turn
from antiphon.backends.scripted import ScriptedBackend
from antiphon.engine.workflows import worker
from antiphon.engine.workflows.client import Client
from antiphon.errors import ConfigError, ModelNotFound, ServerError
from antiphon.protocol import codec
from antiphon.store.base import ClaimedRun
from engine_bench import judge
from workflow_bench import DONE, SLOW, Start, ask, finish, wait_for_status, wait_until

# DBOS has made it, and ended before it began.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*coroutine object execute_dequeued_workflow:pytest.PytestUnraisableExceptionWarning"
)


async def test_a_response_is_a_workflow_that_ends_with_it(start: Start) -> None:
    bench = await start(SLOW)
    response_id = await ask(bench)
    await bench.backend.reached("gate")
    await wait_for_status(response_id, "PENDING")
    bench.backend.release("gate")
    assert await finish(bench, response_id) == DONE
    await wait_for_status(response_id, "SUCCESS")


async def test_no_more_are_worked_on_at_once_than_all_processes_may(start: Start) -> None:
    bench = await start(SLOW, concurrency=1)
    first, second = await ask(bench), await ask(bench)
    await bench.backend.reached("gate")
    bench.backend.release("gate")
    assert await finish(bench, first) == DONE
    await bench.backend.reached("gate")
    bench.backend.release("gate")
    assert await finish(bench, second) == DONE


async def test_a_project_does_not_keep_the_others_waiting(start: Start) -> None:
    bench = await start(SLOW, concurrency_per_project=1)
    first, second, other = await ask(bench), await ask(bench), await ask(bench, project="other")
    await bench.backend.reached("gate")
    await bench.backend.reached("gate")
    statuses = [(await bench.engine.retrieve("default", each)).status for each in (first, second)]
    statuses.append((await bench.engine.retrieve("other", other)).status)
    assert statuses == ["in_progress", "queued", "in_progress"]
    for _ in range(3):
        bench.backend.release("gate")
    ended = [await finish(bench, first), await finish(bench, second), await finish(bench, other, "other")]
    assert ended == [DONE] * 3


async def test_no_more_begin_in_a_minute_than_may(start: Start) -> None:
    bench = await start({}, starts_per_minute=2)
    first, second, third = await ask(bench), await ask(bench), await ask(bench)
    assert [status for status, _ in (await finish(bench, first), await finish(bench, second))] == ["completed"] * 2
    assert (await bench.engine.retrieve("default", third)).status == "queued"
    await wait_for_status(third, "ENQUEUED")


async def test_a_waiting_response_is_cancelled_without_waiting_for_its_turn(start: Start) -> None:
    bench = await start(SLOW, concurrency=1)
    first = await ask(bench)
    await bench.backend.reached("gate")
    second = await ask(bench)
    assert (await bench.engine.cancel("default", second)).status == "cancelled"
    bench.backend.release("gate")
    assert await finish(bench, first) == DONE


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


async def test_a_store_that_fails_for_a_moment_does_not_lose_a_run(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await start({})
    claim_one, failures = bench.store.claim_one, [ServerError("The store failed.")]

    async def claim_late(*args: Any, **options: Any) -> ClaimedRun | None:
        if failures:
            raise failures.pop()
        return await claim_one(*args, **options)

    monkeypatch.setattr(bench.store, "claim_one", claim_late)
    with caplog.at_level(logging.ERROR):
        assert (await finish(bench, await ask(bench)))[0] == "completed"
    assert "a background response cannot be reached" in caplog.messages


async def test_a_run_is_not_given_up_between_its_claim_and_its_beginning(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await start({})
    claim_one, claimed = bench.store.claim_one, []

    async def claim_and_renew(*args: Any, **options: Any) -> ClaimedRun | None:
        run = await claim_one(*args, **options)
        claimed.append(run)
        assert worker._performing is not None
        await worker._performing._renew()
        return run

    monkeypatch.setattr(bench.store, "claim_one", claim_and_renew)
    assert (await finish(bench, await ask(bench)))[0] == "completed"
    assert len(claimed) == 1


async def test_a_run_that_was_claimed_for_nothing_is_free_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when DBOS ends at this moment."""
    bench = await start({})
    claim_one, claimed, gate = bench.store.claim_one, [], asyncio.Event()

    async def claim_late(*args: Any, **options: Any) -> ClaimedRun | None:
        claimed.append(await claim_one(*args, **options))
        if len(claimed) == 1:
            assert worker._performing is not None
            (performance,) = worker._performing._performances
            performance.cancel()
            await gate.wait()
        return claimed[-1]

    monkeypatch.setattr(bench.store, "claim_one", claim_late)
    response_id = await ask(bench)
    put_back = bench.store.put_back
    given: list[str] = []

    async def give(owner: str, project: str, response_id: str, **options: Any) -> None:
        await put_back(owner, project, response_id, **options)
        given.append(response_id)

    monkeypatch.setattr(bench.store, "put_back", give)
    gate.set()
    assert (await finish(bench, response_id))[0] == "completed"
    assert given == [response_id]
    assert [run.interruptions for run in claimed if run is not None] == [0, 0]


async def test_a_model_that_nobody_has_any_more_fails_when_others_have_had_their_time(start: Start) -> None:
    first = await start({"models": ["old"], "default": [{"wait": "gate"}]})
    run = await first.ask(background=True, model="old")
    await first.backend.reached("gate")
    await first.engine.close()
    second = await start({"models": ["new"]})
    batches = await second.engine.follow("default", run.response.id, after=-1)
    response = judge([codec.decode_event(event.raw) async for batch in batches for event in batch])
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", "model_not_found")


async def test_what_its_upstream_does_not_have_is_handed_out_again_when_others_have_had_their_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start({"models": ["alpha"], "default": [{"wait": "gate"}]})
    run = await first.ask(background=True, model="alpha")
    await first.backend.reached("gate")
    await first.engine.close()
    asked: list[str] = []

    async def refuse(_: ScriptedBackend, turn: Turn) -> Deltas:
        asked.append(turn.request.model or "")
        raise ModelNotFound(f"no {turn.request.model}")

    monkeypatch.setattr(ScriptedBackend, "stream", refuse)
    second = await start({"models": ["alpha"]})
    batches = await second.engine.follow("default", run.response.id, after=-1)
    response = judge([codec.decode_event(event.raw) async for batch in batches for event in batch])
    assert response.error is not None
    assert (response.status, response.error.code, asked) == ("failed", "model_not_found", ["alpha", "alpha"])


async def test_a_database_that_fails_for_long_is_opened_anew(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PATIENCE_SECONDS", 0.01)
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


async def test_slow_looks_do_not_end_a_dbos_that_has_work(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends in good order leaves workflows that only a second look can tell from those that begin."""
    first = await start(SLOW, home="here")
    running = await ask(first)
    await first.backend.reached("gate")
    await first.engine.close()
    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.0)
    second = await start({"default": "so far and on"}, home="here")
    assert await finish(second, running) == DONE


async def test_no_more_are_worked_on_in_a_process_than_it_has_room_for(start: Start) -> None:
    """Though another one, which has more, has told DBOS of it last."""
    bench = await start(SLOW, slots=1)
    first = await ask(bench)
    await bench.backend.reached("gate")
    queue = await asyncio.to_thread(DBOS.retrieve_queue, "antiphon.responses")
    assert queue is not None
    await queue.set_worker_concurrency_async(9)
    second = await ask(bench)
    await wait_for_status(second, "PENDING")
    assert [(await bench.engine.retrieve("default", each)).status for each in (first, second)] == [
        "in_progress",
        "queued",
    ]
    bench.backend.release("gate")
    await bench.backend.reached("gate")
    bench.backend.release("gate")
    assert [await finish(bench, each) for each in (first, second)] == [DONE, DONE]


async def test_there_is_a_dbos_only_while_there_are_runs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.01)
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


async def test_a_second_engine_of_the_process_is_refused_and_a_later_one_is_not(start: Start) -> None:
    first = await start({})
    with pytest.raises(ConfigError, match="dbos: DBOS is one for each process"):
        await start({})
    await first.engine.close()
    assert await asyncio.to_thread(str, 1) == "1"
    second = await start({})
    assert (await finish(second, await ask(second)))[0] == "completed"


async def test_a_database_that_cannot_be_used_is_a_configuration_error_and_leaves_nothing_behind(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "dbos.db").write_text("this is no database, and long enough to be taken for one" * 100)
    with pytest.raises(ConfigError, match=r"dbos: its database .* cannot be used: .*not a database"):
        await start({})
    (tmp_path / "dbos.db").unlink()
    bench = await start({})
    assert (await finish(bench, await ask(bench)))[0] == "completed"
