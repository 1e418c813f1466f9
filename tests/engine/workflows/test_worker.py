"""Background responses that DBOS hands out: within its limits, and whatever becomes of what it knows."""

import asyncio
import logging
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dbos import DBOS, SetWorkflowID, error

from antiphon.backends.base import Deltas, Turn
from antiphon.backends.scripted import ScriptedBackend
from antiphon.config import DbosSettings
from antiphon.engine.attempt import QueuedRequest
from antiphon.engine.policy import Policy
from antiphon.engine.workflows import comparison, instance, worker
from antiphon.engine.workflows.client import Client
from antiphon.errors import ConfigError, ModelNotFound, ServerError
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.store.base import ClaimedRun, StoredResponse
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore
from engine_bench import Bench, judge

# DBOS has made it, and ended before it began.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*coroutine object execute_dequeued_workflow:pytest.PytestUnraisableExceptionWarning"
)

SLOW = {"default": [{"text": ["so", " far"]}, {"wait": "gate"}, {"text": [" and", " on"]}]}
DONE = ("completed", "so far and on")

Start = Callable[..., Awaitable[Bench]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of DBOS that has its tables and our queue: making these takes longer than a test."""
    path = tmp_path_factory.mktemp("dbos") / "system.db"

    async def prepare() -> None:
        bench = Bench({}, MemoryStore(), Policy(dbos=DbosSettings(database=f"sqlite:///{path}", polling_seconds=0.01)))
        await bench.engine.start()
        await finish(bench, await ask(bench))
        await bench.engine.close()

    asyncio.run(prepare())
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM workflow_status")
        database.commit()
    return path


@pytest.fixture
def start(make_bench: Any, tmp_path: Path, prepared: Path) -> Start:
    """An engine on a store and a DBOS that outlive it."""
    shutil.copy(prepared, tmp_path / "dbos.db")

    async def start_engine(script: dict[str, Any], *, slots: int = 9, home: str | None = None, **limits: Any) -> Bench:
        bench: Bench = await make_bench(
            script,
            store=SqliteStore(tmp_path / "store.db", home=home),
            background_lease_seconds=0.3,
            background_slots=slots,
            dbos=DbosSettings(database=f"sqlite:///{tmp_path}/dbos.db", polling_seconds=0.01, **limits),
        )
        return bench

    return start_engine


async def ask(bench: Bench, asked: str = "hi", project: str = "default") -> str:
    """The id of a new background response."""
    run = await bench.ask(asked, project=project, background=True)
    return run.response.id


async def finish(bench: Bench, response_id: str, project: str = "default") -> tuple[str, str]:
    """How a response ends, and with which words."""
    batches = await bench.engine.follow(project, response_id, after=-1)
    response = judge([codec.decode_event(event.raw) async for batch in batches for event in batch])
    return response.status, response.output_text


async def wait_until(happens: Callable[[], Awaitable[bool]]) -> None:
    """For what DBOS can only be asked for again and again."""
    for _ in range(3000):
        if await happens():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


async def list_statuses(response_id: str) -> list[str]:
    """What DBOS says of a workflow. There may be no DBOS, which knows of nothing."""
    try:
        found = await asyncio.to_thread(DBOS.list_workflows, workflow_ids=[response_id])
    except error.DBOSException:
        return []
    return [workflow.status for workflow in found]


async def wait_for_status(response_id: str, status: str) -> None:
    async def has_status() -> bool:
        return await list_statuses(response_id) == [status]

    await wait_until(has_status)


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


@pytest.mark.parametrize("running", [True, False])
async def test_a_workflow_that_is_cancelled_in_dbos_is_a_cancelled_response(start: Start, running: bool) -> None:
    bench = await start(SLOW, concurrency=1)
    first = await ask(bench)
    await bench.backend.reached("gate")
    second = await ask(bench)
    response_id = first if running else second
    await wait_for_status(response_id, "PENDING" if running else "ENQUEUED")
    await asyncio.to_thread(DBOS.cancel_workflow, response_id)
    status, _ = await finish(bench, response_id)
    assert status == "cancelled"


async def test_a_waiting_response_is_cancelled_without_waiting_for_its_turn(start: Start) -> None:
    bench = await start(SLOW, concurrency=1)
    first = await ask(bench)
    await bench.backend.reached("gate")
    second = await ask(bench)
    assert (await bench.engine.cancel("default", second)).status == "cancelled"
    bench.backend.release("gate")
    assert await finish(bench, first) == DONE


@pytest.mark.parametrize("homes", [("here", "here"), ("here", "there")])
async def test_what_was_under_way_or_waiting_goes_on_at_the_next_start(start: Start, homes: tuple[str, str]) -> None:
    """Whether it serves the same models then, or others beside this one."""
    first = await start(SLOW, concurrency=1, home=homes[0])
    running, waiting = await ask(first), await ask(first)
    await first.backend.reached("gate")
    await first.engine.close()
    second = await start({"default": "so far and on"}, concurrency=1, home=homes[1])
    assert [await finish(second, each) for each in (running, waiting)] == [DONE, DONE]
    await wait_for_status(running, "SUCCESS")
    await wait_for_status(waiting, "SUCCESS")


async def test_what_dbos_was_not_told_of_is_run_all_the_same(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await start({})
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):

        async def fail(*args: Any) -> None:
            raise OSError("no disk")

        patch.setattr(Client, "enqueue", fail)
        response_id = await ask(bench)

        async def is_told() -> bool:
            return "background responses wait: DBOS's database cannot be used: no disk" in caplog.messages

        await wait_until(is_told)
    assert (await finish(bench, response_id))[0] == "completed"


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


async def test_what_dbos_believes_to_have_ended_is_run_all_the_same(start: Start) -> None:
    bench = await start(SLOW)
    await ask(bench)
    await bench.backend.reached("gate")  # there is a DBOS at work
    response_id = "resp_" + "1" * 44

    def run_for_nothing() -> None:
        with SetWorkflowID(response_id):
            handle: Any = DBOS.start_workflow(instance.respond, "default", response_id)
        handle.get_result(polling_interval_sec=0.01)  # there is no such response yet

    await asyncio.to_thread(run_for_nothing)
    stored = StoredResponse(
        response=Response(id=response_id, created_at=0, status="queued", model="scripted", background=True),
        input=[],
        expires_at=None,
    )
    queued = QueuedRequest(request=CreateRequest(model="scripted", background=True), minted=0)
    await bench.store.enqueue("default", stored, codec.encode(queued))
    await bench.backend.reached("gate")
    bench.backend.release("gate")
    bench.backend.release("gate")
    assert await finish(bench, response_id) == DONE


async def test_what_dbos_has_handed_out_to_nobody_is_handed_out_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a process had ended before it could claim the run."""
    first = await start({})
    with monkeypatch.context() as patch:
        never = asyncio.Event()
        patch.setattr(worker.WorkflowWorker, "perform", lambda self, key: never.wait())
        response_id = await ask(first)
        await wait_for_status(response_id, "PENDING")
        await first.engine.close()
    second = await start({"default": "so far and on"})
    assert await finish(second, response_id) == DONE


async def test_what_dbos_believes_to_be_under_way_though_it_has_ended_takes_up_no_room(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a process had ended before it could say so, or the limits had not been DBOS's for a while."""
    first = await start({}, concurrency=1)
    with monkeypatch.context() as patch:
        never = asyncio.Event()
        patch.setattr(worker.WorkflowWorker, "perform", lambda self, key: never.wait())
        ended = await ask(first)
        await wait_for_status(ended, "PENDING")
        await first.engine.delete("default", ended)
        await first.engine.close()
    second = await start({"default": "so far and on"}, concurrency=1)
    assert await finish(second, await ask(second)) == DONE


@pytest.mark.parametrize("deleted", [True, False])
async def test_what_is_no_longer_wanted_does_not_wait_in_dbos_any_more(start: Start, deleted: bool) -> None:
    bench = await start(SLOW, concurrency=1)
    await ask(bench)
    await bench.backend.reached("gate")
    unwanted = await ask(bench)
    await wait_for_status(unwanted, "ENQUEUED")
    if deleted:
        await bench.engine.delete("default", unwanted)
    else:
        await bench.engine.cancel("default", unwanted)

    async def is_forgotten() -> bool:
        return await list_statuses(unwanted) == []

    await wait_until(is_forgotten)


async def test_a_run_that_was_left_is_not_behind_those_that_wait(start: Start) -> None:
    """However many they are, and though none of them may begin before it ends."""
    first = await start(SLOW, concurrency=1, concurrency_per_project=1)
    running = await ask(first, project="other")
    await first.backend.reached("gate")
    waiting = [await ask(first) for _ in range(120)]
    await first.engine.close()
    second = await start({"default": "so far and on"}, concurrency=1, concurrency_per_project=1)
    assert await finish(second, running, "other") == DONE
    assert await finish(second, waiting[0]) == DONE


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


async def test_what_is_for_other_processes_is_left_to_them(start: Start, tmp_path: Path) -> None:
    bench = await start({})
    theirs = SqliteStore(tmp_path / "store.db", home="there")
    await theirs.open()
    stored = StoredResponse(
        response=Response(id="resp_" + "2" * 44, created_at=0, status="queued", model="theirs", background=True),
        input=[],
    )
    await theirs.enqueue("default", stored, b"")
    await theirs.renew("them", lease=100)
    assert (await finish(bench, await ask(bench)))[0] == "completed"
    last = await ask(bench)
    await finish(bench, last)
    await wait_for_status(last, "SUCCESS")
    assert await list_statuses(stored.response.id) == []
    assert [run.key.response_id for run in await theirs.list_runs("them", as_of=0)] == [stored.response.id]
    await theirs.close()


@pytest.mark.parametrize("replaced", [True, False])
async def test_a_database_that_is_lost_while_it_is_in_use_is_made_anew(
    start: Start, tmp_path: Path, prepared: Path, replaced: bool
) -> None:
    bench = await start(SLOW)
    running = await ask(bench)
    await bench.backend.reached("gate")
    for ending in ("", "-wal", "-shm"):
        (tmp_path / f"dbos.db{ending}").unlink()
    if replaced:
        shutil.copy(prepared, tmp_path / "dbos.db")
    others = [await ask(bench) for _ in range(5)]
    for _ in others:
        await bench.backend.reached("gate")
    for _ in (running, *others):
        bench.backend.release("gate")
    assert [await finish(bench, each) for each in (running, *others)] == [DONE] * 6


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


async def test_what_waits_is_handed_out_in_its_order_by_another_configuration(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(SLOW, home="here", slots=1)
    await ask(first)
    await first.backend.reached("gate")
    waiting = [await ask(first) for _ in range(8)]
    await first.engine.close()
    begun: list[str | None] = []
    stream = ScriptedBackend.stream

    async def note(backend: ScriptedBackend, turn: Turn) -> Deltas:
        begun.append(turn.response_id)
        return await stream(backend, turn)

    monkeypatch.setattr(ScriptedBackend, "stream", note)
    second = await start({}, home="there", slots=1)
    for each in waiting:
        await finish(second, each)
    assert [each for each in begun if each in waiting] == waiting


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


async def test_workflows_that_ended_long_ago_are_forgotten(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = await start({})
    response_id = await ask(bench)
    await finish(bench, response_id)
    await wait_for_status(response_id, "SUCCESS")
    monkeypatch.setattr(comparison, "SHOWN_SECONDS", -1)
    monkeypatch.setattr(worker, "CLEARING_SECONDS", -1)

    async def is_forgotten() -> bool:
        return await asyncio.to_thread(DBOS.list_workflows) == []

    await wait_until(is_forgotten)


async def test_a_second_engine_of_the_process_is_refused_and_a_later_one_is_not(start: Start) -> None:
    first = await start({})
    with pytest.raises(ConfigError, match="dbos: DBOS is one for each process"):
        await start({})
    await first.engine.close()
    assert await asyncio.to_thread(str, 1) == "1"
    second = await start({})
    assert (await finish(second, await ask(second)))[0] == "completed"


async def test_an_application_with_a_dbos_of_its_own_keeps_it(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = DBOS(config={"name": "theirs", "system_database_url": f"sqlite:///{tmp_path}/theirs.db"})
    bench = await start({})
    with caplog.at_level(logging.WARNING):
        response_id = await ask(bench)

        async def is_told() -> bool:
            return any("this process already uses DBOS for something else" in line for line in caplog.messages)

        await wait_until(is_told)
    assert DBOS(config={"name": "another"}) is theirs
    DBOS.destroy()
    assert (await finish(bench, response_id))[0] == "completed"


async def test_a_database_that_cannot_be_used_is_a_configuration_error_and_leaves_nothing_behind(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "dbos.db").write_text("this is no database, and long enough to be taken for one" * 100)
    with pytest.raises(ConfigError, match=r"dbos: its database .* cannot be used: .*not a database"):
        await start({})
    (tmp_path / "dbos.db").unlink()
    bench = await start({})
    assert (await finish(bench, await ask(bench)))[0] == "completed"
