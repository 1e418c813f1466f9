"""The usage of responses: counting, estimates, batches and failures of the store."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.base import Turn
from antiphon.config.limits import ModelPrice
from antiphon.engine import usage as module
from antiphon.engine.usage import Charge, UsageRecorder
from antiphon.errors import ServerError, StoreUnavailable
from antiphon.protocol import codec
from antiphon.protocol.hosted import McpListTools, McpToolInfo
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore
from antiphon.store.usage import DAY, HOUR, MINUTE, Spending, UsageRow, find_month
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from support.engine_harness import EngineHarness
from support.hosted_harness import FILE_SEARCH, make_call, make_script, run_engine
from support.hosted_tool import RecordingTool

NOW = 1_700_006_405.5
SPENT = Usage(100, 10, 110, InputTokensDetails(cached_tokens=40))


class FailingStore(MemoryStore):
    """Counts the writes of usage. With `is_down` they fail, also after `fails_after` writes."""

    writes = 0
    is_down = False
    fails_after: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    async def add_usage(self, rows: Sequence[UsageRow], *, write_id: str) -> None:
        if self.is_down or (self.fails_after is not None and self.writes >= self.fails_after):
            raise StoreUnavailable("The store is down.")
        self.writes += 1
        await super().add_usage(rows, write_id=write_id)
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


class RefusingStore(FailingStore):
    """Refuses every write with one of these models. All other rows of the write are refused with it."""

    def __init__(self, *refused: str) -> None:
        super().__init__()
        self.refused = set(refused)

    async def add_usage(self, rows: Sequence[UsageRow], *, write_id: str) -> None:
        if self.refused & {row.model for row in rows}:
            raise ServerError("a row is refused")
        await super().add_usage(rows, write_id=write_id)


async def test_refused_row_does_not_lose_the_others(caplog: pytest.LogCaptureFixture) -> None:
    store = RefusingStore("m3", "m8")
    await store.open()
    recorder = UsageRecorder(store, {}, now=lambda: NOW)
    models = [f"m{number}" for number in range(10)]
    for model in models:
        recorder.record("p", "", model, SPENT)
    assert await recorder.flush() is False
    assert [row.model for row in await list_usage(store)] == [name for name in models if name not in store.refused]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "the store refuses a row of usage, which is lost"
    ] * 2
    assert await recorder.flush() is True
    assert sum(spent.tokens for spent in await store.read_spending(find_month(NOW))) == 8 * 110


async def test_usage_is_written_later_if_the_store_refuses_all(caplog: pytest.LogCaptureFixture) -> None:
    models = [f"m{number:02}" for number in range(40)]
    store = RefusingStore(*models)
    await store.open()
    recorder = UsageRecorder(store, {}, now=lambda: NOW)
    for model in models:
        recorder.record("p", "", model, SPENT)
    assert [await recorder.flush(), await recorder.flush()] == [False, False]
    assert [record.message for record in caplog.records] == ["the store refuses all usage, which is written later"]
    store.refused.clear()
    assert await recorder.flush() is True
    assert [(row.model, row.requests) for row in await list_usage(store)] == [(model, 1) for model in models]


async def test_failure_between_two_writes_loses_nothing() -> None:
    store = RefusingStore("m1")
    await store.open()
    recorder = UsageRecorder(store, {}, now=lambda: NOW)
    for number in range(4):
        recorder.record("p", "", f"m{number}", SPENT)
    store.fails_after = 1
    assert await recorder.flush() is False
    store.fails_after = None
    assert await recorder.flush() is True  # the refused row is lost
    assert [(row.model, row.requests) for row in await list_usage(store)] == [("m0", 1), ("m2", 1), ("m3", 1)]


async def test_long_failure_joins_usage_instead_of_losing_it(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_HELD_ROWS", 4)
    store.is_down = True
    now = float(NOW // HOUR * HOUR)
    recorder = UsageRecorder(store, {}, now=lambda: now)
    recorder.record("p", "", "a", SPENT)
    assert await recorder.flush() is False  # this write is repeated as it is
    for model in ("a", "b", "c"):
        for _ in range(3):
            recorder.record("p", "", model, SPENT)
            now += MINUTE
    assert await recorder.flush() is False
    assert [(row.model, row.requests) for row in recorder._rows.values()] == [("a", 3), ("b", 3), ("c", 3)]
    for project in ("p", "q"):
        recorder.record(project, "", "d", SPENT)
        recorder.record(project, "", "e", SPENT)
    assert await recorder.flush() is False
    store.is_down = False
    assert await recorder.flush() is True
    totals = [(row.project, row.model, row.requests) for row in await store.list_usage(0, 2**40, width=HOUR)]
    assert totals == [("p", "a", 1), ("p", "other", 11), ("q", "other", 2)]


async def test_number_of_recorded_models_of_a_project_is_bounded(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MODELS", 2)
    prices = {"paid": ModelPrice(input=1.0, output=2.0)}
    recorder = UsageRecorder(store, prices, now=lambda: NOW)
    for model in ("x" * 300, "\0", "a", "b", "c", "a", "paid"):
        recorder.record("p", "", model, SPENT)
    recorder.record("q", "", "c", SPENT)
    await recorder.flush()
    assert [(row.project, row.model, row.requests) for row in await list_usage(store)] == [
        ("p", "a", 2),
        ("p", "b", 1),
        ("p", "other", 3),
        ("p", "paid", 1),
        ("q", "c", 1),
    ]


async def test_model_with_a_made_up_name_counts_for_budgets(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MODELS", 1)
    charges: list[Charge] = []
    prices = {"paid": ModelPrice(input=1.0, output=2.0), "*": ModelPrice(input=10.0, output=20.0)}
    recorder = UsageRecorder(store, prices, now=lambda: NOW)
    recorder.on_charge = charges.append
    for model in ("paid", "made-up-1", "made-up-2"):
        recorder.record("p", "key_1", model, SPENT)
    await recorder.flush()
    costs = [0.00012, 0.0012, 0.0012]
    assert charges == [Charge("p", "key_1", 110, pytest.approx(cost)) for cost in costs]
    assert await store.read_spending(find_month(NOW)) == [Spending("p", "key_1", 330, pytest.approx(sum(costs)))]


async def test_cancelled_flush_still_writes_its_usage(store: FailingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    started, gate = asyncio.Event(), asyncio.Event()
    write = store.add_usage

    async def wait_and_write(rows: Sequence[UsageRow], *, write_id: str) -> None:
        started.set()
        await gate.wait()
        await write(rows, write_id=write_id)

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


async def test_steered_response_without_output_is_counted_by_an_estimate(make_harness: Any) -> None:
    harness = await make_harness({"default": [{"wait": "gate"}]})
    run = await harness.ask("a question of some length", project="p")
    draining = asyncio.create_task(run.drain())
    await harness.backend.reached("gate")
    run.steer()
    assert ((await draining).status, run.usage) == ("incomplete", None)
    await harness.engine.usage.close()
    (row,) = await harness.store.list_usage(0, 2**40, width=MINUTE)
    assert (row.requests, row.input_tokens > 5, row.output_tokens) == (1, True, 0)


async def count_until_gate(harness: EngineHarness, **fields: Any) -> UsageRow:
    """Leave a stream whose model waits at the gate, and return the usage that is counted."""
    run = await harness.ask("a question of some length", project="p", **fields)

    async def read() -> None:
        async for _ in run.events():
            pass

    reading = asyncio.create_task(read())
    await harness.backend.reached("gate")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await harness.engine.usage.close()
    (row,) = await harness.store.list_usage(0, 2**40, width=MINUTE)
    return row


TOKENS = {"usage": {"input_tokens": 10, "output_tokens": 4, "total_tokens": 14}}
FAILURE = {"failure": {"message": "No.", "code": "model_error"}}


@pytest.mark.parametrize(
    ("answer", "output_tokens"),
    [([{"text": "one two three"}, {"wait": "gate"}, TOKENS], 15), ([{"wait": "gate"}, TOKENS], 4)],
)
async def test_interrupted_call_after_a_hosted_tool_is_counted_by_an_estimate(answer: Any, output_tokens: int) -> None:
    async with run_engine(make_script([make_call("cats"), TOKENS], answer), RecordingTool()) as harness:
        row = await count_until_gate(harness, tools=[FILE_SEARCH])
    assert (row.requests, row.input_tokens > 30, row.output_tokens) == (1, True, output_tokens)


@pytest.mark.parametrize(
    "answer", [[{"text": "one two three"}, {"wait": "gate"}], [{"text": "one two three"}, FAILURE]]
)
async def test_items_before_the_first_call_are_no_output_of_it(answer: Any) -> None:
    tool = RecordingTool()
    tool.introduced = [deltas.WholeItem(McpListTools("docs", [McpToolInfo("f", {}, description="word " * 1000)]))]
    async with run_engine(make_script(answer), tool) as harness:
        run = await harness.ask("hi", project="p", tools=[FILE_SEARCH])
        draining = asyncio.create_task(run.drain())
        if answer[1] is not FAILURE:
            await harness.backend.reached("gate")
            run.cancel()
        assert [item.type for item in (await draining).output] == ["mcp_list_tools", "message"]
        await harness.engine.usage.close()
        (row,) = await harness.store.list_usage(0, 2**40, width=MINUTE)
    assert (row.requests, row.output_tokens) == (1, 11)


async def test_call_that_fails_after_a_hosted_tool_is_counted_if_it_has_output() -> None:
    counted = []
    for answer in ([FAILURE], [{"text": "one two three"}, FAILURE]):
        async with run_engine(make_script([make_call("cats"), TOKENS], answer), RecordingTool()) as harness:
            await harness.answer(tools=[FILE_SEARCH])
            await harness.engine.usage.close()
            counted += await harness.store.list_usage(0, 2**40, width=MINUTE)
    assert [(row.requests, row.input_tokens > 10, row.output_tokens) for row in counted] == [
        (1, False, 4),
        (1, True, 15),
    ]


@pytest.mark.parametrize(("reported", "output_tokens"), [([], 11), ([TOKENS], 4)])
async def test_failed_response_of_a_stateless_server_is_counted(
    make_harness: Any, reported: list[Any], output_tokens: int
) -> None:
    harness = await make_harness({"default": [{"text": "one two three"}, *reported, FAILURE]}, stateless=True)
    response = await (await harness.ask(project="p", store=False)).drain()
    await harness.engine.usage.close()
    (row,) = await harness.store.list_usage(0, 2**40, width=MINUTE)
    assert (response.output, response.usage, row.requests, row.output_tokens) == ([], None, 1, output_tokens)


async def test_interruption_of_a_hosted_tool_adds_no_estimate() -> None:
    tool = RecordingTool()
    tool.gate = asyncio.Event()
    async with run_engine(make_script([make_call("cats"), TOKENS], "Done."), tool) as harness:
        run = await harness.ask(project="p", tools=[FILE_SEARCH])
        draining = asyncio.create_task(run.drain())
        await tool.reached.wait()
        run.cancel()
        await draining
        await harness.engine.usage.close()
        (row,) = await harness.store.list_usage(0, 2**40, width=MINUTE)
    assert row[4:8] == (1, 10, 0, 4)


@pytest.mark.parametrize(("before", "output_tokens"), [([], 15), ([{"text": "Sure. "}], 16)])
async def test_interrupted_retry_of_an_emulated_tool_is_counted_by_an_estimate(
    make_harness: Any, before: list[Any], output_tokens: int
) -> None:
    tool = {"type": "custom", "name": "date", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}}
    wrong = {"tool_call": {"name": "date", "arguments": {"input": "soon"}, "call_id": "call_1"}}
    answer = [{"text": "one two three"}, {"wait": "gate"}, TOKENS]
    harness = await make_harness(make_script([*before, wrong, TOKENS], answer))
    row = await count_until_gate(harness, tools=[tool])
    assert (row.requests, row.input_tokens > 30, row.output_tokens) == (1, True, output_tokens)


async def test_open_usage_of_a_backend_whose_tools_are_emulated_is_completed_by_an_estimate(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await make_harness({"native_tools": ["function"]})

    async def answer() -> AsyncIterator[list[Delta]]:
        yield [deltas.TokenUsage(Usage(1, 2, 3), is_open=True)]
        yield [deltas.Text("one two three"), deltas.Finish()]

    async def stream(_: Turn) -> AsyncIterator[list[Delta]]:
        return answer()

    monkeypatch.setattr(harness.backend, "stream", stream)
    run = await harness.ask(project="p", tools=[{"type": "custom", "name": "date"}])
    await run.drain()
    await harness.engine.usage.close()
    (row,) = await harness.store.list_usage(0, 2**40, width=MINUTE)
    assert (row.requests, row.output_tokens > 2) == (1, True)


@pytest.mark.parametrize("is_summarised", [True, False])
async def test_answer_interrupted_after_a_compaction_is_counted_by_an_estimate(
    make_harness: Any, is_summarised: bool
) -> None:
    summary = [{"text": "A summary of the conversation."}, TOKENS] if is_summarised else [{"wait": "gate"}]
    answer = [{"text": "one two three"}, {"wait": "gate"}, TOKENS]
    script = {"models": ["big"], "rules": [{"text": "You write the notes", "answers": [summary]}], "default": answer}
    harness = await make_harness(script, models={"fast": ("test/big",)})
    history = [{"role": role, "content": "word " * 400} for role in ("user", "assistant")] * 10
    management = [{"type": "compaction", "compact_threshold": 1000}]
    run = await harness.ask(history, project="p", model="fast", context_management=management)
    reading = asyncio.create_task(run.drain())
    await harness.backend.reached("gate")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await harness.engine.usage.close()
    (row,) = await harness.store.list_usage(0, 2**40, width=MINUTE)
    assert (row.model, row.requests) == ("big", 1)
    if is_summarised:
        assert (row.input_tokens > 1000, row.output_tokens) == (True, 15)


async def test_deleted_background_response_is_counted_once(make_harness: Any) -> None:
    script = {"models": ["big"], "default": [{"text": "one two three"}, {"wait": "gate"}, {"text": "four"}]}
    harness = await make_harness(script, models={"fast": ("test/big",)})
    run = await harness.ask("a question of some length", project="p", model="fast", background=True)
    await harness.backend.reached("gate")
    await harness.engine.delete("p", run.response.id)
    await harness.engine.wait_for_background()
    await harness.engine.usage.close()
    (row,) = await harness.store.list_usage(0, 2**40, width=MINUTE)
    assert (row.model, row.requests, row.input_tokens > 5, row.output_tokens) == ("big", 1, True, 11)


async def test_background_response_of_a_stopping_process_is_not_counted(make_harness: Any, tmp_path: Path) -> None:
    harness = await make_harness({"default": [{"wait": "gate"}]}, store=SqliteStore(tmp_path / "store.db"))
    run = await harness.ask(project="p", background=True)
    await harness.backend.reached("gate")
    await harness.engine.close()
    await harness.store.open()
    assert (await harness.store.load_bare_response("p", run.response.id)).status == "in_progress"
    assert await harness.store.list_usage(0, 2**40, width=MINUTE) == []


async def test_compaction_counts_under_the_name_that_the_backend_has_for_the_model(make_harness: Any) -> None:
    harness = await make_harness({"models": ["big"]}, models={"fast": ("test/big",)})
    await harness.answer(project="p", model="fast")
    body = codec.encode({"model": "fast", "input": "hello"})
    await harness.engine.compact(codec.decode_request(body).body, project="p")
    await harness.engine.usage.close()
    rows = await harness.store.list_usage(0, 2**40, width=MINUTE)  # two if a minute has ended meanwhile
    assert (sum(row.requests for row in rows), {row.model for row in rows}) == (2, {"big"})


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
