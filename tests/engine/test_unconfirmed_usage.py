"""Writes of usage that fail, before or after the store has stored them."""

import asyncio
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.usage import UsageRecorder
from antiphon.errors import ServerError, StoreUnavailable
from antiphon.protocol.response import Usage
from antiphon.store.memory.store import MemoryStore
from antiphon.store.usage import HOUR, MINUTE, Spending, UsageRow, find_month

NOW = 1_700_006_400.0
SPENT = Usage(10, 5, 15)

Outcome = Literal["stored", "not stored", "answer lost"]


class UncertainStore(MemoryStore):
    """Lists the writes of usage as ids and models. `outcomes` are those of the next writes; later ones are stored.

    A write of more than `max_rows` rows is refused. A write that waits for `gate` sets `has_begun`.
    """

    def __init__(self, *outcomes: Outcome, max_rows: int = 1000) -> None:
        super().__init__()
        self.outcomes = list(outcomes)
        self.max_rows = max_rows
        self.writes: list[tuple[str, list[str]]] = []
        self.has_begun, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def add_usage(self, rows: Sequence[UsageRow], *, write_id: str) -> None:
        self.has_begun.set()
        await self.gate.wait()
        self.writes.append((write_id, [row.model for row in rows]))
        outcome = self.outcomes.pop(0) if self.outcomes else "stored"
        if outcome != "not stored":
            if len(rows) > self.max_rows:
                raise ServerError("too many rows")
            await super().add_usage(rows, write_id=write_id)
        if outcome != "stored":
            raise StoreUnavailable("The connection was lost.")


async def make_recorder(*outcomes: Outcome) -> tuple[UncertainStore, UsageRecorder]:
    store = UncertainStore(*outcomes)
    await store.open()
    return store, UsageRecorder(store, {}, now=lambda: NOW)


async def list_requests(store: UncertainStore) -> list[tuple[str, int]]:
    return [(row.model, row.requests) for row in await store.list_usage(0, 2**40, width=HOUR)]


async def test_unconfirmed_usage_is_written_again_before_newer_usage() -> None:
    store, recorder = await make_recorder("answer lost", "not stored", "stored", "answer lost")
    results = []
    for model in ("a", "b", "a"):
        recorder.record("p", "", model, SPENT)
        results.append(await recorder.flush())
    assert (results, await list_requests(store)) == ([False, False, False], [("a", 2), ("b", 1)])
    assert [await recorder.flush(), await recorder.flush()] == [True, True]
    first, second = store.writes[0][0], store.writes[-1][0]
    assert store.writes == [(first, ["a"])] * 3 + [(second, ["b", "a"])] * 2
    assert (first != second, await list_requests(store)) == (True, [("a", 2), ("b", 1)])


async def test_part_of_a_refused_batch_that_is_unconfirmed_is_added_once() -> None:
    store, recorder = await make_recorder("stored", "answer lost")
    store.max_rows = 2
    for model in ("a", "b", "c", "d"):
        recorder.record("p", "", model, SPENT)
    assert [await recorder.flush(), await recorder.flush()] == [False, True]
    assert [models for _, models in store.writes] == [["a", "b", "c", "d"], ["a", "b"], ["a", "b"], ["c", "d"]]
    assert len({write_id for write_id, _ in store.writes}) == 3
    assert await list_requests(store) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]


async def test_close_writes_unconfirmed_and_newer_usage(caplog: pytest.LogCaptureFixture) -> None:
    store, recorder = await make_recorder("answer lost")
    recorder.record("p", "", "a", SPENT)
    await recorder.flush()
    recorder.record("p", "", "b", SPENT)
    await recorder.close()
    assert (await list_requests(store), caplog.records) == ([("a", 1), ("b", 1)], [])


async def test_close_reports_all_usage_that_could_not_be_stored(caplog: pytest.LogCaptureFixture) -> None:
    _, recorder = await make_recorder("not stored", "not stored")
    recorder.record("p", "", "a", SPENT)
    await recorder.flush()
    for model in ("b", "c"):
        recorder.record("p", "", model, SPENT)
    await recorder.close()
    assert [record.message for record in caplog.records] == ["the usage of 3 minutes and models could not be stored"]


async def test_each_waiting_flush_reports_that_usage_is_not_written() -> None:
    store, recorder = await make_recorder(*["not stored"] * 10)
    store.gate.clear()
    recorder.record("p", "", "a", SPENT)
    flushes = [asyncio.create_task(recorder.flush()) for _ in range(4)]
    await store.has_begun.wait()
    store.gate.set()
    assert await asyncio.gather(*flushes) == [False] * 4


steps = st.sampled_from(["a", "b", "c", "next minute", "flush"])
outcomes = st.sampled_from(["stored", "not stored", "answer lost"])


@given(st.lists(steps, max_size=30), st.lists(outcomes, max_size=15), st.integers(1, 4))
async def test_totals_equal_the_recorded_usage(drawn: list[str], fates: list[Outcome], max_rows: int) -> None:
    now, recorded = NOW, 0
    store = UncertainStore(*fates, max_rows=max_rows)
    await store.open()
    recorder = UsageRecorder(store, {}, now=lambda: now)
    for step in drawn:
        if step == "flush":
            await recorder.flush()
        elif step == "next minute":
            now += MINUTE
        else:
            recorder.record("p", "", step, SPENT)
            recorded += 1
    store.outcomes.clear()
    await recorder.close()
    assert await list_requests(store) == [(each, drawn.count(each)) for each in "abc" if each in drawn]
    spent = [Spending("p", "", 15 * recorded, 0.0)] if recorded else []
    assert await store.read_spending(find_month(NOW)) == spent
