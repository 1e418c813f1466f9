"""Background responses when the store fails, the lease is lost, or the response is deleted."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.background import attempt, event_writer, follower, responses, worker
from antiphon.errors import NotFound, ServerError, StoreUnavailable
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.response import FINAL_STATUSES, Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ClaimedRun, RunKey, StoredResponse
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore
from support.engine_harness import EngineHarness, judge

SLOW = {"default": [{"text": ["so", " far"]}, {"wait": "gate"}, {"text": [" and", " on"]}]}
# Short enough for a test, long enough for a busy machine.
SHORT = 0.3
# Longer than any test: a test that waits for it hangs.
LONG = 3600.0


class Frail(MemoryStore):
    """A memory store whose methods fail a given number of times."""

    def __init__(self, **failures: int) -> None:
        super().__init__()
        self.failures = failures

    def _give_way(self, name: str) -> None:
        if self.failures.get(name, 0) > 0:
            self.failures[name] -= 1
            raise ServerError(f"{name}: the disk is full")

    async def append_events(self, *where: Any, owner: str | None = None) -> bool:
        self._give_way("append_events")
        return await super().append_events(*where, owner=owner)

    async def stop_renewing(self, owner: str, project: str, response_id: str) -> None:
        self._give_way("stop_renewing")
        await super().stop_renewing(owner, project, response_id)

    async def renew(self, owner: str, *, lease: float) -> dict[RunKey, bool]:
        self._give_way("renew")
        return await super().renew(owner, lease=lease)

    async def request_cancel(self, project: str, response_id: str) -> bool:
        self._give_way("request_cancel")
        return await super().request_cancel(project, response_id)

    async def save(self, project: str, stored: StoredResponse, **bound: Any) -> None:
        if stored.response.status in FINAL_STATUSES:
            self._give_way("save")
        await super().save(project, stored, **bound)


async def read(harness: EngineHarness, response_id: str) -> list[Event | Unknown]:
    batches = await harness.engine.follow("default", response_id, after=-1)
    return [codec.decode_event(event.raw) async for batch in batches for event in batch if isinstance(event, Unknown)]


async def collect(batches: Any) -> list[Any]:
    return [event async for batch in batches for event in batch]


async def finish(harness: EngineHarness, response_id: str) -> Response:
    emitted = judge(await read(harness, response_id))
    assert await harness.engine.retrieve("default", response_id) == emitted
    return emitted


async def wait_until_logged(harness: EngineHarness, response_id: str, words: bytes) -> None:
    """Wait until the log has this text. Reading the store does not count as a reader."""
    for _ in range(10_000):
        if words in b"".join(payload for _, payload in await harness.store.read_events("default", response_id, -1)):
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{words!r} never came")


# Store failures


@pytest.mark.parametrize("failures", [{"append_events": 1}, {"renew": 3}, {"save": 2}, {"save": 2, "stop_renewing": 2}])
async def test_temporary_store_failure_delays_end_of_run(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch, failures: dict[str, int]
) -> None:
    monkeypatch.setattr(attempt, "SAVE_TIMEOUT_SECONDS", 0.0)  # so that the attempt is repeated
    store = Frail(**failures)
    harness = await make_harness({"default": "all in all"}, store=store, background_lease_seconds=SHORT)
    run = await harness.ask(background=True)
    response = await finish(harness, run.response.id)
    assert (response.status, response.output_text) == ("completed", "all in all")


class Unavailable(MemoryStore):
    """A memory store of which one method is unavailable a given number of times."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.failures = 0
        original = getattr(self, method)

        async def fail(*arguments: Any, **options: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise StoreUnavailable("no connection")
            return await original(*arguments, **options)

        setattr(self, method, fail)


@pytest.mark.parametrize("method", ["load", "save", "load_chain"])
async def test_store_failures_before_the_model_call_are_no_interruptions(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(worker, "STORE_RETRY_SECONDS", 0.0)
    store = Unavailable(method)
    harness = await make_harness(store=store, background_lease_seconds=0.1)
    first = await harness.answer("first")
    run = await harness.ask("second", background=True, previous_response_id=first.id)
    store.failures = 5
    response = await finish(harness, run.response.id)
    assert (response.status, response.output_text, store.failures) == ("completed", "You said: second", 0)


async def test_lasting_store_failures_are_interruptions(make_harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STORE_FAILURE_SECONDS", 0.0)
    store = Unavailable("load")
    harness = await make_harness(store=store, background_lease_seconds=0.1)
    store.failures = 1000
    run = await harness.ask(background=True)
    response = await finish(harness, run.response.id)
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", "interrupted")


async def test_finished_answer_is_saved_when_store_recovers(make_harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "RETRY_SECONDS", 0.01)
    script = {"rules": [{"answers": ["once and for all", "something else"]}]}
    harness = await make_harness(script, store=Frail(save=5), background_lease_seconds=LONG)
    run = await harness.ask(background=True)
    response = await finish(harness, run.response.id)
    assert (response.status, response.output_text) == ("completed", "once and for all")


async def test_events_of_failed_flush_are_stored_with_next_flush(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_writer, "RETRY_SECONDS", 0.01)
    harness = await make_harness(SLOW, store=Frail(append_events=3), background_lease_seconds=LONG)
    run = await harness.ask(background=True)
    await wait_until_logged(harness, run.response.id, b" far")
    harness.backend.release("gate")
    assert (await finish(harness, run.response.id)).output_text == "so far and on"


async def test_unreadable_queued_request_ends_as_failed(make_harness: Any) -> None:
    harness = await make_harness(background_lease_seconds=0.1)
    response = Response(id="resp_1", created_at=1, status="queued", model="scripted", background=True)
    await harness.store.enqueue("default", StoredResponse(response=response, input=[]), b"of another version")
    failed = await finish(harness, "resp_1")
    assert failed.error is not None
    assert (failed.status, failed.error.code) == ("failed", "interrupted")


# Lost leases


async def lose(harness: EngineHarness, response_id: str) -> None:
    """Claim the run for another process."""
    (claimed,) = await harness.store.claim("another", as_of=time.time() + LONG, lease=LONG, limit=1)
    assert claimed.response_id == response_id


async def test_events_of_lost_attempt_are_not_shown(make_harness: Any) -> None:
    """Without a reader the other process begins again, and its text is the response."""
    harness = await make_harness(SLOW, background_lease_seconds=LONG)
    run = await harness.ask(background=True)
    await wait_until_logged(harness, run.response.id, b" far")
    await lose(harness, run.response.id)
    await harness.store.drop_events("default", run.response.id, owner="another")
    await harness.store.append_events("default", run.response.id, 0, [b'{"type":"acme.other"}'], owner="another")
    reader = await harness.engine.follow("default", run.response.id, after=-1)
    assert await anext(reader) == [Unknown(b'{"type":"acme.other"}')]
    await reader.aclose()


async def test_lease_is_checked_as_of_time_before_store_wait(make_harness: Any) -> None:
    """Another process that waited for the store could not renew its lease."""
    requested: list[float] = []
    renewing, writable = asyncio.Event(), asyncio.Event()

    class Busy(MemoryStore):
        async def renew(self, owner: str, *, lease: float) -> dict[RunKey, bool]:
            renewing.set()
            await writable.wait()
            return await super().renew(owner, lease=lease)

        async def claim(self, owner: str, *, as_of: float, **terms: Any) -> list[ClaimedRun]:
            requested.append(as_of)
            return await super().claim(owner, as_of=as_of, **terms)

    harness = await make_harness(store=Busy(), background_lease_seconds=LONG)
    await renewing.wait()
    began = time.time()
    writable.set()
    await finish(harness, (await harness.ask(background=True)).response.id)
    assert requested[0] <= began


async def test_process_stops_attempt_after_losing_lease(make_harness: Any) -> None:
    harness = await make_harness(SLOW, background_lease_seconds=SHORT)
    run = await harness.ask(background=True)
    await harness.backend.reached("gate")
    await lose(harness, run.response.id)
    await harness.backend.cancellation.wait()


@pytest.mark.parametrize("lease", [SHORT, LONG])
async def test_process_that_lives_withdraws_the_interruption(make_harness: Any, lease: float) -> None:
    """The loss of a lease is found when it is renewed, or at the next write of the attempt."""
    withdrawn = asyncio.Event()

    class Noting(MemoryStore):
        async def withdraw_interruption(self, *run: Any, attempt: int) -> bool:
            try:
                return await super().withdraw_interruption(*run, attempt=attempt)
            finally:
                withdrawn.set()

    harness = await make_harness(SLOW, store=Noting(), background_lease_seconds=lease)
    run = await harness.ask(background=True)
    await harness.backend.reached("gate")
    await lose(harness, run.response.id)
    if lease == LONG:
        harness.backend.release("gate")
    await withdrawn.wait()
    (claimed,) = await harness.store.claim("third", as_of=time.time() + 2 * LONG, lease=LONG, limit=1)
    assert (claimed.attempt, claimed.interruptions) == (3, 1)


async def test_run_that_was_lost_and_reclaimed_has_one_attempt(make_harness: Any) -> None:
    harness = await make_harness(SLOW, background_lease_seconds=LONG)
    run = await harness.ask(background=True)
    await harness.backend.reached("gate")
    await lose(harness, run.response.id)
    await harness.store.release("another")
    await harness.ask("wake up", background=True)
    for _ in range(2):  # the second attempt, and the response that woke the worker
        await harness.backend.reached("gate")
    assert harness.backend.cancelled == 1
    for _ in range(2):
        harness.backend.release("gate")
    assert (await finish(harness, run.response.id)).output_text == "so far and on"


# Deleted responses


async def test_deleting_running_response_stops_model_and_streams(make_harness: Any) -> None:
    harness = await make_harness(SLOW, background_lease_seconds=LONG)
    run = await harness.ask(background=True)
    await harness.backend.reached("gate")
    stream = await harness.engine.follow("default", run.response.id, after=-1)
    await anext(stream)
    reader = asyncio.create_task(collect(stream))
    await wait_until_logged(harness, run.response.id, b" far")
    await harness.engine.delete("default", run.response.id)
    await harness.backend.cancellation.wait()
    with pytest.raises(NotFound):
        await reader
    with pytest.raises(NotFound):
        await harness.engine.retrieve("default", run.response.id)


async def test_response_that_expires_while_running_leaves_no_rows(make_harness: Any) -> None:
    harness = await make_harness(SLOW, background_lease_seconds=SHORT, retention_seconds=3600)
    run = await harness.ask(background=True)
    await harness.backend.reached("gate")
    await harness.store.expire(int(time.time()) + 3601)
    await harness.backend.cancellation.wait()
    assert await harness.store.read_events("default", run.response.id, -1) == []
    assert await harness.store.claim("us", as_of=time.time() + LONG, lease=1, limit=9) == []


@pytest.mark.parametrize(("background", "store"), [(True, True), (False, True), (False, False)])
async def test_response_fails_if_its_conversation_was_deleted(
    make_harness: Any, background: bool, store: bool, caplog: pytest.LogCaptureFixture
) -> None:
    harness = await make_harness(SLOW)
    conversation = await harness.engine.conversations.create("default", [], None)
    run = await harness.ask(background=background, store=store, conversation=conversation.id)
    ending = asyncio.create_task(finish(harness, run.response.id) if background else run.drain())
    await harness.backend.reached("gate")
    await harness.engine.conversations.delete("default", conversation.id)
    harness.backend.release("gate")
    response = await ending
    assert response.error is not None
    assert (response.status, response.output_text) == ("failed", "so far and on")
    assert conversation.id in response.error.message
    # A client can cause this: it gets no traceback in the log.
    assert [each.message for each in caplog.records if each.exc_info or each.levelno > logging.INFO] == []


# Cancellation at critical moments


async def test_queued_response_is_cancelled_when_all_slots_are_taken(make_harness: Any) -> None:
    harness = await make_harness(SLOW, background_slots=1, background_lease_seconds=LONG)
    await harness.ask(background=True)
    await harness.backend.reached("gate")
    waiting = await harness.ask(background=True)
    cancelled = await harness.engine.cancel("default", waiting.response.id)
    assert (cancelled.status, cancelled.output) == ("cancelled", [])
    assert await finish(harness, waiting.response.id) == cancelled


async def test_cancel_right_after_create_finds_run(
    make_harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "POLL_SECONDS", LONG)
    harness = await make_harness(SLOW, store=SqliteStore(tmp_path / "store.db"), background_lease_seconds=LONG)
    for turns in range(12):
        run = await harness.ask(background=True)
        for _ in range(turns):
            await asyncio.sleep(0)
        both = await asyncio.gather(*(harness.engine.cancel("default", run.response.id) for _ in range(2)))
        assert [response.status for response in both] == ["cancelled", "cancelled"]
        assert both[0] == both[1] == await finish(harness, run.response.id)


async def test_run_of_dead_process_is_cancelled_after_lease_expiry(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "POLL_SECONDS", 5.0)  # at most four leases
    harness = await make_harness(SLOW, background_lease_seconds=SHORT)
    run = await harness.ask(background=True)
    await harness.backend.reached("gate")
    await harness.store.claim("dead", as_of=time.time() + LONG, lease=SHORT, limit=1)
    assert (await harness.engine.cancel("default", run.response.id)).status == "cancelled"


async def test_cancel_stops_model_when_store_fails(make_harness: Any) -> None:
    harness = await make_harness(SLOW, store=Frail(request_cancel=1), background_lease_seconds=LONG)
    run = await harness.ask(background=True)
    await harness.backend.reached("gate")
    with pytest.raises(ServerError):
        await harness.engine.cancel("default", run.response.id)
    await harness.backend.cancellation.wait()
    assert (await finish(harness, run.response.id)).status == "cancelled"


async def test_cancel_during_finish_leaves_one_terminal_event(make_harness: Any, tmp_path: Path) -> None:
    harness = await make_harness(SLOW, store=SqliteStore(tmp_path / "store.db"))
    for turns in range(12):
        run = await harness.ask(background=True)
        reader = asyncio.create_task(finish(harness, run.response.id))
        await harness.backend.reached("gate")
        harness.backend.release("gate")
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = await harness.engine.cancel("default", run.response.id)
        assert cancelled.status in {"cancelled", "completed"}
        assert await reader == cancelled


# Slots and readers


async def test_running_attempts_do_not_exceed_slots(make_harness: Any, tmp_path: Path) -> None:
    harness = await make_harness(SLOW, store=SqliteStore(tmp_path / "store.db"), background_slots=2)
    runs = await asyncio.gather(*(harness.ask(background=True) for _ in range(12)))
    for done in range(12):
        await harness.backend.reached("gate")
        if done < 10:
            statuses = [(await harness.engine.retrieve("default", run.response.id)).status for run in runs]
            assert statuses.count("in_progress") <= 2
        harness.backend.release("gate")
    for run in runs:
        assert (await finish(harness, run.response.id)).status == "completed"


async def test_live_reader_does_not_wait_for_poll_interval(
    make_harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "POLL_SECONDS", LONG)
    harness = await make_harness({"default": "a word"}, store=SqliteStore(tmp_path / "store.db"))
    for _ in range(12):
        run = await harness.ask(background=True)
        assert judge([codec.decode_event(e.raw) async for b in run.events() for e in b]).status == "completed"


@pytest.mark.parametrize("words", [1, 2, 3])
async def test_close_during_flush_leaves_complete_log(make_harness: Any, tmp_path: Path, words: int) -> None:
    script = {"default": [{"text": [f" {n}"]} if n % 2 else {"delay": 0.002} for n in range(60)]}
    first = await make_harness(script, store=SqliteStore(tmp_path / "store.db"))
    run = await first.ask(background=True)
    await first.store.mark_watched("default", run.response.id)
    await wait_until_logged(first, run.response.id, b'"delta":" %d"' % (10 * words + 1))
    await first.engine.close()
    second = await make_harness(script, store=SqliteStore(tmp_path / "store.db"))
    emitted = await read(second, run.response.id)
    assert [event.sequence_number for event in emitted if not isinstance(event, Unknown)] == list(range(len(emitted)))
    assert judge(emitted).status == "completed"
