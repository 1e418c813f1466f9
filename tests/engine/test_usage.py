"""The usage of responses: counting, estimates, batches and failures of the store."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine import usage as module
from antiphon.engine.usage import Charge, UsageRecorder
from antiphon.errors import ServerError, StoreUnavailable
from antiphon.limit_settings import ModelPrice
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore
from antiphon.store.usage import DAY, HOUR, MINUTE, UsageRow

NOW = 1_700_006_405.5
SPENT = Usage(100, 10, 110, InputTokensDetails(cached_tokens=40))


class FailingStore(MemoryStore):
    """Counts the writes of usage. With `is_down` they fail."""

    writes = 0
    is_down = False

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    async def add_usage(self, rows: Sequence[UsageRow]) -> None:
        if self.is_down:
            raise StoreUnavailable("The store is down.")
        self.writes += 1
        await super().add_usage(rows)
        self.written.set()


@pytest.fixture
async def store() -> FailingStore:
    store = FailingStore()
    await store.open()
    return store


async def list_usage(store: FailingStore) -> list[UsageRow]:
    return await store.list_usage(0, 2**40, width=MINUTE)


async def test_usage_of_a_minute_is_written_as_one_row(store: FailingStore) -> None:
    recorder = UsageRecorder(store, {"m": ModelPrice(input=10, output=100, cached_input=1)}, now=lambda: NOW)
    charges: list[Charge] = []
    recorder.on_charge = charges.append
    for _ in range(3):
        recorder.record("p", "key_1", "m", SPENT)
    recorder.record("p", "key_1", "free", SPENT)
    assert (await list_usage(store), store.writes) == ([], 0)
    await recorder.flush()
    start = int(NOW) // MINUTE * MINUTE
    cost = (60 * 10 + 40 * 1 + 10 * 100) / 1_000_000
    rows = await list_usage(store)
    assert [row[:8] for row in rows] == [
        (start, "p", "key_1", "free", 1, 100, 40, 10),
        (start, "p", "key_1", "m", 3, 300, 120, 30),
    ]
    assert (rows[1].cost, store.writes) == (pytest.approx(3 * cost), 1)
    assert charges == [Charge("p", "key_1", 110, cost)] * 3 + [Charge("p", "key_1", 110, 0.0)]


async def test_usage_is_written_without_a_request_for_it(store: FailingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.0)
    recorder = UsageRecorder(store, {}, now=lambda: NOW)
    recorder.record("p", "", "m", SPENT)
    async with asyncio.timeout(30):
        await store.written.wait()
    assert [row.requests for row in await list_usage(store)] == [1]


async def test_usage_that_could_not_be_written_is_written_later_once(store: FailingStore) -> None:
    recorder = UsageRecorder(store, {}, now=lambda: NOW)
    recorder.record("p", "", "m", SPENT)
    store.is_down = True
    assert await recorder.flush() is False
    recorder.record("p", "", "m", SPENT)
    store.is_down = False
    assert [await recorder.flush(), await recorder.flush()] == [True, True]
    assert [row.requests for row in await list_usage(store)] == [2]


async def test_usage_that_cannot_be_written_is_given_up(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(rows: Sequence[UsageRow]) -> None:
        raise ServerError("a row is damaged")

    recorder = UsageRecorder(store, {}, now=lambda: NOW)
    recorder.record("p", "", "m", SPENT)
    with monkeypatch.context() as patch:
        patch.setattr(store, "add_usage", fail)
        assert await recorder.flush() is False
    assert "the usage of 1 minutes and models is lost" in caplog.text
    recorder.record("p", "", "n", SPENT)
    await recorder.flush()
    assert [row.model for row in await list_usage(store)] == ["n"]


async def test_number_of_recorded_models_is_bounded(store: FailingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MODELS", 2)
    recorder = UsageRecorder(store, {}, now=lambda: NOW)
    for model in ("x" * 300, "\0", "a", "b", "c", "a"):
        recorder.record("p", "", model, SPENT)
    await recorder.flush()
    assert [(row.model, row.requests) for row in await list_usage(store)] == [("a", 2), ("b", 1), ("other", 3)]


async def test_cancelled_flush_still_writes_its_usage(store: FailingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    started, gate = asyncio.Event(), asyncio.Event()
    write = store.add_usage

    async def wait_and_write(rows: Sequence[UsageRow]) -> None:
        started.set()
        await gate.wait()
        await write(rows)

    monkeypatch.setattr(store, "add_usage", wait_and_write)
    recorder = UsageRecorder(store, {}, now=lambda: NOW)
    recorder.record("p", "", "m", SPENT)
    flushing = asyncio.create_task(recorder.flush())
    await started.wait()
    recorder.record("p", "", "n", SPENT)
    waiting = asyncio.create_task(recorder.flush())
    await asyncio.sleep(0)
    for task in (flushing, waiting):
        task.cancel()
    await asyncio.gather(flushing, waiting, return_exceptions=True)
    gate.set()
    await recorder.close()
    assert [(row.model, row.requests) for row in await list_usage(store)] == [("m", 1), ("n", 1)]


async def test_close_writes_the_last_usage(store: FailingStore) -> None:
    recorder = UsageRecorder(store, {}, now=lambda: NOW)
    recorder.record("p", "", "m", SPENT)
    await recorder.close()
    assert [row.requests for row in await list_usage(store)] == [1]


async def test_usage_taken_by_a_write_is_reported_exactly(store: FailingStore) -> None:
    recorder = UsageRecorder(store, {}, now=lambda: NOW)
    recorder.record("p", "", "m", SPENT)
    taken: list[int] = []
    async with recorder._lock:
        waiting = asyncio.create_task(recorder.flush(on_taken=lambda: taken.append(len(recorder._rows))))
        await asyncio.sleep(0)
        recorder.record("p", "", "n", SPENT)
        assert taken == []
    await waiting
    assert (taken, len(await list_usage(store))) == ([0], 2)


async def test_old_usage_is_joined_once_in_an_hour(store: FailingStore) -> None:
    times = [NOW]
    recorder = UsageRecorder(store, {}, now=lambda: times[-1])
    for times[-1] in (NOW, NOW + MINUTE, NOW + 3 * DAY):
        recorder.record("p", "", "m", SPENT)
        await recorder.flush()
    assert [row.requests for row in await list_usage(store)] == [2, 1]
    assert (await list_usage(store))[0].started_at % HOUR == 0


async def test_responses_of_all_kinds_are_counted(make_harness: Any) -> None:
    script = {"rules": [{"user": "fail", "answers": [[{"failure": {"message": "No.", "code": "model_error"}}]]}]}
    harness = await make_harness(script)
    await harness.answer("hi", project="p")
    await harness.answer("fail", project="p")
    assert [row[1:8] for row in harness.engine.usage._rows.values()] == [("p", "", "scripted", 1, 1, 0, 3)]


async def test_interrupted_response_is_counted_by_an_estimate(make_harness: Any) -> None:
    harness = await make_harness({"default": [{"text": "one two three "}, {"wait": "gate"}, {"text": "four"}]})
    run = await harness.ask("a question of some length", project="p")
    async for batch in (events := run.events()):
        if any(event.type.endswith(".delta") for event in batch):
            break
    await events.aclose()
    await asyncio.sleep(0)
    (row,) = harness.engine.usage._rows.values()
    assert (row.requests, row.input_tokens > 5, row.output_tokens > 3) == (1, True, True)


async def test_written_usage_is_in_the_file_before_the_process_ends(tmp_path: Path) -> None:
    writing, reading = SqliteStore(tmp_path / "store.db"), SqliteStore(tmp_path / "store.db")
    await writing.open()
    await reading.open()
    recorder = UsageRecorder(writing, {}, now=lambda: NOW)
    recorder.record("p", "key_1", "m", SPENT)
    await recorder.flush()
    assert [row.requests for row in await reading.list_usage(0, 2**40, width=DAY)] == [1]
    await writing.close()
    await reading.close()
