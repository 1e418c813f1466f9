"""The finished items of responses in progress: searched in the event log, each part of it once."""

import json
import tracemalloc
from typing import Any

import pytest

from antiphon.engine.background.finished_items import FinishedItems
from antiphon.protocol import codec
from antiphon.protocol.response import Response
from antiphon.store.base import RunKey, StoredResponse
from antiphon.store.memory.store import MemoryStore

KEY = RunKey("p", "resp_1")


class CountingStore(MemoryStore):
    """A store that records the numbers at which searches start."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[int] = []

    async def search_events(self, *arguments: Any, start: int) -> list[tuple[int, bytes]]:
        self.starts.append(start)
        return await super().search_events(*arguments, start=start)


@pytest.fixture
async def store() -> CountingStore:
    store = CountingStore()
    await store.open()
    response = Response(id=KEY.response_id, created_at=0, model="m", status="queued", background=True)
    await store.save(KEY.project, StoredResponse(response=response, input=[]))
    return store


def make_delta(number: int) -> bytes:
    return b'{"type":"response.output_text.delta","sequence_number":%d,"delta":"x"}' % number


def make_done(number: int, index: int, text: str) -> bytes:
    item = {"type": "reasoning", "id": f"rs_{index}", "summary": [{"type": "summary_text", "text": text}]}
    event = {"type": "response.output_item.done", "sequence_number": number, "output_index": index, "item": item}
    return json.dumps(event, separators=(",", ":")).encode()


async def load(items: FinishedItems) -> list[str]:
    return [json.loads(codec.encode(item))["summary"][0]["text"] for item in await items.load(KEY)]


async def test_items_are_in_the_order_of_the_output(store: CountingStore) -> None:
    items = FinishedItems(store)
    assert await load(items) == []
    await store.append_events(*KEY, 0, [make_delta(0), make_done(1, 1, "second"), make_done(2, 0, "first")])
    assert await load(items) == ["first", "second"]


async def test_searched_part_of_log_is_not_searched_again(store: CountingStore) -> None:
    items = FinishedItems(store)
    await store.append_events(*KEY, 0, [make_done(0, 0, "first"), make_delta(1)])
    await store.append_events(*KEY, 2, [make_delta(2)])
    assert [await load(items) for _ in range(2)] == [["first"]] * 2
    await store.append_events(*KEY, 3, [make_done(3, 1, "second")])
    assert [await load(items) for _ in range(2)] == [["first", "second"]] * 2
    assert store.starts == [-1, 2, 2, 3]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
async def test_log_that_begins_again_is_searched_again(store: CountingStore, count: int) -> None:
    items = FinishedItems(store)
    await store.append_events(*KEY, 0, [make_done(0, 0, "old")])
    await store.append_events(*KEY, 1, [make_delta(1)])
    assert await load(items) == ["old"]
    await store.drop_events(*KEY)
    new = [make_done(0, 0, "new"), make_done(1, 1, "more"), make_delta(2)][:count]
    for number, event in enumerate(new):
        await store.append_events(*KEY, number, [event])
    assert await load(items) == ["new", "more"][:count]


async def test_size_of_stored_searches_is_bounded(store: CountingStore) -> None:
    items = FinishedItems(store, max_bytes=1500)
    await store.append_events(*KEY, 0, [make_done(0, 0, "small")])
    assert [await load(items) for _ in range(2)] == [["small"]] * 2
    await store.append_events(*KEY, 1, [make_done(1, 1, "x" * 1500)])
    assert [await load(items) for _ in range(2)] == [["small", "x" * 1500]] * 2
    assert store.starts == [-1, 0, 0, -1]


async def test_memory_of_searches_without_items_is_bounded(store: CountingStore) -> None:
    items = FinishedItems(store, max_bytes=100_000)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1000):
            key = RunKey("p", f"resp_{number:048x}")
            response = Response(id=key.response_id, created_at=0, model="m", status="queued", background=True)
            await store.save(key.project, StoredResponse(response=response, input=[]))
            await store.append_events(*key, 0, [make_delta(0)])
            assert await items.load(key) == []
            await store.delete(*key)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 150_000


async def test_damaged_event_is_skipped(store: CountingStore) -> None:
    await store.append_events(*KEY, 0, [make_done(0, 0, "first"), make_done(1, 1, "second")[:-5]])
    assert await load(FinishedItems(store)) == ["first"]
