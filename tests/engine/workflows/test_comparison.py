"""What DBOS knows may be wrong or missing, for whatever reason: the store is right."""

import asyncio
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dbos import DBOS, SetWorkflowID

from antiphon.backends.base import Deltas, Turn
from antiphon.backends.scripted import ScriptedBackend
from antiphon.engine.attempt import QueuedRequest
from antiphon.engine.workflows import comparison, instance, tending, worker
from antiphon.engine.workflows.client import Client
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.store.base import StoredResponse
from antiphon.store.sqlite.store import SqliteStore
from workflow_bench import DONE, SLOW, Start, ask, finish, list_statuses, wait_for_status, wait_until

# DBOS has made it, and ended before it began.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*coroutine object execute_dequeued_workflow:pytest.PytestUnraisableExceptionWarning"
)


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


async def test_what_waits_is_handed_out_in_its_order_by_another_configuration(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(SLOW, home="here", slots=1)
    await ask(first)
    await first.backend.reached("gate")
    asked = [await ask(first) for _ in range(8)]
    await first.engine.close()
    with closing(sqlite3.connect(tmp_path / "dbos.db")) as database:
        pending = "SELECT workflow_uuid FROM workflow_status WHERE status = 'PENDING'"
        handed_out = {response_id for (response_id,) in database.execute(pending)}
    waiting = [each for each in asked if each not in handed_out]
    assert len(waiting) > 4
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


async def test_workflows_that_ended_long_ago_are_forgotten(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = await start({})
    response_id = await ask(bench)
    await finish(bench, response_id)
    await wait_for_status(response_id, "SUCCESS")
    monkeypatch.setattr(comparison, "SHOWN_SECONDS", -1)
    monkeypatch.setattr(tending, "CLEARING_SECONDS", -1)

    async def is_forgotten() -> bool:
        return await asyncio.to_thread(DBOS.list_workflows) == []

    await wait_until(is_forgotten)


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
