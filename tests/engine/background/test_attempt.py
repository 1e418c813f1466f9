"""Attempts that take over runs: released runs, damaged logs, and models that this process does not serve."""

import asyncio
import gc
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.backends.base import Turn
from antiphon.backends.scripted.backend import ScriptedBackend
from antiphon.engine.background import attempt
from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.engine.respond.run import Run
from antiphon.engine.sealing import Sealer
from antiphon.errors import ModelNotFound, ServerError
from antiphon.protocol import codec
from antiphon.protocol.response import Response
from antiphon.store.sqlite.store import SqliteStore
from antiphon.stream.deltas import Deltas
from support.engine_harness import EngineHarness, judge

SLOW = {"default": [{"text": ["so", " far"]}, {"wait": "gate"}, {"text": [" and", " on"]}]}
# Longer than any test: a test that waits for it hangs.
LONG = 3600.0


async def read(harness: EngineHarness, response_id: str) -> list[Any]:
    batches = await harness.engine.follow("default", response_id, after=-1)
    return [codec.decode_event(event.raw) async for batch in batches for event in batch]


async def leave_watched(make_harness: Any, path: Path, **fields: Any) -> str:
    """Begin a response with a reader and stop in the middle of it. Return its id."""
    harness = await make_harness(
        {"models": ["scripted", "alpha"], **SLOW}, store=SqliteStore(path), background_lease_seconds=0.3
    )
    run = await harness.ask(background=True, **fields)
    response_id: str = run.response.id
    watching = await harness.engine.follow("default", response_id, after=-1)
    async for batch in watching:
        if b" far" in batch[-1].raw:
            break
    await watching.aclose()
    await harness.engine.close()
    return response_id


async def test_repeatedly_released_run_is_not_given_up(make_harness: Any, tmp_path: Path) -> None:
    response_id = await leave_watched(make_harness, tmp_path / "store.db")
    for _ in range(2 * attempt.MAX_INTERRUPTIONS):
        harness = await make_harness(SLOW, store=SqliteStore(tmp_path / "store.db"))
        await harness.backend.reached("gate")
        await harness.engine.close()
    harness = await make_harness(SLOW, store=SqliteStore(tmp_path / "store.db"))
    harness.backend.release("gate")
    assert judge(await read(harness, response_id)).output_text == "so far and on"


async def test_repeatedly_interrupted_run_is_given_up(
    make_harness: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    response_id = await leave_watched(make_harness, tmp_path / "store.db")
    store = SqliteStore(tmp_path / "store.db", now=lambda: 0.0)
    await store.open()
    for number in range(attempt.MAX_INTERRUPTIONS):
        assert len(await store.claim(f"dead {number}", as_of=9, lease=1, limit=1)) == 1
    await store.close()
    harness = await make_harness(SLOW, store=SqliteStore(tmp_path / "store.db"))
    response = judge(await read(harness, response_id))
    assert response.error is not None
    assert (response.status, response.error.code, response.output_text) == ("failed", "interrupted", "so far")
    assert f"a background response was given up: {response.error.message}" in caplog.messages


@pytest.mark.parametrize("interruptions", [0, 1])
async def test_turn_is_suspect_after_its_process_died(
    make_harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruptions: int
) -> None:
    response_id = await leave_watched(make_harness, tmp_path / "store.db")
    store = SqliteStore(tmp_path / "store.db", now=lambda: 0.0)
    await store.open()
    for number in range(interruptions):
        assert len(await store.claim(f"dead {number}", as_of=9, lease=1, limit=1)) == 1
    await store.close()
    served: list[Turn] = []
    stream = ScriptedBackend.stream

    async def note(backend: ScriptedBackend, turn: Turn) -> Deltas:
        served.append(turn)
        return await stream(backend, turn)

    monkeypatch.setattr(ScriptedBackend, "stream", note)
    harness = await make_harness(SLOW, store=SqliteStore(tmp_path / "store.db"))
    harness.backend.release("gate")
    assert judge(await read(harness, response_id)).status == "completed"
    assert [turn.is_suspect for turn in served] == [interruptions > 0]


async def test_ended_background_run_is_freed_without_garbage_collection(harness: EngineHarness) -> None:
    gc.disable()
    try:
        queued = await harness.ask(background=True)
        assert judge(await read(harness, queued.response.id)).status == "completed"
        await harness.engine.close()
        runs = [each.begun.id for each in gc.get_objects() if isinstance(each, Run)]
        assert queued.response.id not in runs
    finally:
        gc.enable()


# Damaged logs

LAST_BATCH = "WHERE last = (SELECT max(last) FROM events)"
DAMAGES = {
    "no JSON": f"UPDATE events SET lines = x'0000' {LAST_BATCH}",
    "no bytes": f"UPDATE events SET lines = 'xx' {LAST_BATCH}",
    "nothing": f"UPDATE events SET lines = x'' {LAST_BATCH}",
    "cut off": f"UPDATE events SET lines = substr(lines, 1, length(lines) - 9) {LAST_BATCH}",
    "a gap": "UPDATE events SET last = last + 1000",
    "the request": "UPDATE runs SET request = x'7b7d'",
    "the response": "UPDATE responses SET body = x'7b7d'",
    "the input": "UPDATE responses SET input = x'7b7d'",
}


async def leave_damaged(make_harness: Any, path: Path, damage: str) -> str:
    response_id = await leave_watched(make_harness, path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute(DAMAGES[damage]).rowcount > 0
    return response_id


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_event_log_ends_as_failed_with_readable_end(
    make_harness: Any, tmp_path: Path, damage: str
) -> None:
    response_id = await leave_damaged(make_harness, tmp_path / "store.db", damage)
    harness = await make_harness(store=SqliteStore(tmp_path / "store.db"), background_lease_seconds=0.1)
    response = await wait_for_end(harness, response_id)
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", "interrupted")
    *_, error, last = await read(harness, response_id)
    assert (error.type, last.type, last.response) == ("error", "response.failed", response)
    assert await harness.engine.cancel("default", response_id) == response


async def wait_for_end(harness: EngineHarness, response_id: str) -> Response:
    """Return the response after its run is gone. Until then it may be unreadable."""
    for _ in range(1_000):
        if not await harness.store.mark_watched("default", response_id):
            return await harness.engine.retrieve("default", response_id)
        await asyncio.sleep(0.01)
    raise AssertionError(f"{response_id} never ended")


@pytest.mark.parametrize("damage", ["no JSON", "a gap", "the request"])
async def test_run_with_damaged_log_can_be_cancelled_at_once(make_harness: Any, tmp_path: Path, damage: str) -> None:
    response_id = await leave_damaged(make_harness, tmp_path / "store.db", damage)
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as connection:
        connection.execute("UPDATE runs SET cancelled = 1")
    harness = await make_harness(store=SqliteStore(tmp_path / "store.db"), background_lease_seconds=LONG)
    cancelled = await harness.engine.cancel("default", response_id)
    *_, last = await read(harness, response_id)
    assert (cancelled.status, last.type, last.response) == ("cancelled", "response.incomplete", cancelled)


# Models of other processes


class Shared(SqliteStore):
    """A store that signals when a run was put back."""

    def __init__(self, path: Path, *, configuration_id: str | None = None) -> None:
        super().__init__(path, configuration_id=configuration_id)
        self.put = asyncio.Event()

    async def return_run(self, owner: str, project: str, response_id: str, *, free_since: float) -> None:
        await super().return_run(owner, project, response_id, free_since=free_since)
        self.put.set()


@asynccontextmanager
async def serving(
    says: str, store: SqliteStore, *, any_model: bool, lease: float = LONG
) -> AsyncIterator[EngineHarness]:
    """A process that lists only the model beta, and may accept any other name."""
    harness = EngineHarness({"models": ["beta"], "default": says}, store)
    harness.backend.capabilities = msgspec.structs.replace(harness.backend.capabilities, any_model=any_model)
    policy = Policy(background_lease_seconds=lease)
    harness.engine = Engine(backends={"test": harness.backend}, store=store, policy=policy, sealer=Sealer([bytes(32)]))
    await harness.engine.start()
    try:
        yield harness
    finally:
        await harness.engine.close()


async def leave_queued(make_harness: Any, path: Path, *, configuration_id: str | None = None) -> str:
    """Queue a response of the model alpha and stop before a worker claims it. Return its id."""
    harness = await make_harness(
        {"models": ["alpha"]}, store=SqliteStore(path, configuration_id=configuration_id), background_slots=0
    )
    run = await harness.ask(background=True, model="alpha")
    await harness.engine.close()
    return str(run.response.id)


@pytest.mark.parametrize("any_model", [True, False])
async def test_run_left_to_others_stays_queued_without_model_call(
    make_harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_model: bool
) -> None:
    requested: list[Turn] = []

    async def note(_: ScriptedBackend, turn: Turn) -> Deltas:
        requested.append(turn)
        raise ServerError("nobody should be asked")

    monkeypatch.setattr(ScriptedBackend, "stream", note)
    response_id = await leave_queued(make_harness, tmp_path / "store.db")
    store = Shared(tmp_path / "store.db")
    async with serving("in vain", store, any_model=any_model) as harness:
        await store.put.wait()
        assert (await harness.engine.retrieve("default", response_id)).status == "queued"
    assert requested == []


async def test_run_of_same_configuration_is_served_at_once(make_harness: Any, tmp_path: Path) -> None:
    response_id = await leave_queued(make_harness, tmp_path / "store.db", configuration_id="here")
    store = Shared(tmp_path / "store.db", configuration_id="here")
    async with serving("at once", store, any_model=True) as harness:
        assert judge(await read(harness, response_id)).output_text == "at once"
    assert not store.put.is_set()


async def test_run_whose_model_upstream_lacks_is_left_to_others(
    make_harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: ScriptedBackend, turn: Turn) -> Deltas:
        raise ModelNotFound(f"no {turn.request.model}")

    response_id = await leave_queued(make_harness, tmp_path / "store.db")
    store = Shared(tmp_path / "store.db")
    monkeypatch.setattr(ScriptedBackend, "stream", refuse)
    await make_harness({"models": ["alpha"]}, store=store, background_lease_seconds=LONG)
    await store.put.wait()
    monkeypatch.undo()
    harness = await make_harness({"models": ["alpha"], "default": "here"}, store=SqliteStore(tmp_path / "store.db"))
    assert judge(await read(harness, response_id)).output_text == "here"


@pytest.mark.parametrize("any_model", [True, False])
async def test_run_is_left_to_process_that_lists_its_model(make_harness: Any, tmp_path: Path, any_model: bool) -> None:
    """A backend for any model name also serves this one, but leaves it to a process that lists it."""
    response_id = await leave_watched(make_harness, tmp_path / "store.db", model="alpha")
    store = Shared(tmp_path / "store.db")
    async with serving("something else", store, any_model=any_model):
        await store.put.wait()
        harness = await make_harness({"models": ["alpha"], **SLOW}, store=SqliteStore(tmp_path / "store.db"))
        harness.backend.release("gate")
        assert judge(await read(harness, response_id)).output_text == "so far and on"


async def test_unlisted_model_is_served_by_backend_for_any_model(make_harness: Any, tmp_path: Path) -> None:
    response_id = await leave_watched(make_harness, tmp_path / "store.db", model="alpha")
    store = Shared(tmp_path / "store.db")
    async with serving("so far, so good", store, any_model=True, lease=0.3) as harness:
        assert judge(await read(harness, response_id)).output_text == "so far, so good"


async def test_own_run_of_unlisted_model_is_served_at_once(tmp_path: Path) -> None:
    store = Shared(tmp_path / "store.db")
    async with serving("at once", store, any_model=True) as harness:
        run = await harness.ask(background=True, model="alpha")
        assert judge(await read(harness, run.response.id)).output_text == "at once"
    assert not store.put.is_set()


async def test_own_run_of_missing_model_fails_at_once(make_harness: Any, tmp_path: Path) -> None:
    gone = [{"raise": {"message": "no such model", "status": 404, "code": "model_not_found"}}]
    harness = await make_harness(
        {"default": gone}, store=SqliteStore(tmp_path / "store.db"), background_lease_seconds=LONG
    )
    response = judge(await read(harness, (await harness.ask(background=True)).response.id))
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", "model_not_found")


async def test_run_of_unknown_model_fails_after_wait(
    make_harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    response_id = await leave_watched(make_harness, tmp_path / "store.db", model="alpha")
    monkeypatch.setitem(attempt.LEASES_TO_WAIT, "unknown", 0)
    harness = await make_harness({"models": ["beta"]}, store=SqliteStore(tmp_path / "store.db"))
    response = judge(await read(harness, response_id))
    assert response.error is not None
    assert (response.status, response.error.code, response.output_text) == ("failed", "model_not_found", "so far")
