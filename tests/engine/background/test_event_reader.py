"""Pages of an event log: their size, sharing between followers, and the change from stored to live events."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.background.event_reader import EventReader, make_page
from antiphon.errors import ServerError
from antiphon.protocol import codec
from antiphon.store.base import RunKey, Store, StoredResponse
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore
from support.engine_harness import EngineHarness, judge

KEY = RunKey("default", "resp_1")
WORDS = [f"word {number} " for number in range(40)]


class SlowLog:
    """An event log whose reads wait until a test releases them. It counts them."""

    def __init__(self, rows: list[tuple[int, bytes]]) -> None:
        self.rows = rows
        self.reads = 0
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def read_events(
        self, project: str, response_id: str, after: int, *, max_bytes: int | None = None
    ) -> list[tuple[int, bytes]]:
        self.reads += 1
        found = [row for row in self.rows if row[0] > after]
        self.begun.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return found


def make_rows(count: int) -> list[tuple[int, bytes]]:
    return [(number, b'{"type":"acme.word","sequence_number":%d}' % number) for number in range(count)]


async def test_followers_at_one_position_share_one_read_and_page() -> None:
    log = SlowLog(make_rows(3))
    reader = EventReader(log)  # type: ignore[arg-type]
    followers = [asyncio.create_task(reader.read(KEY, -1)) for _ in range(100)]
    await asyncio.sleep(0)
    log.gate.set()
    pages = await asyncio.gather(*followers)
    later = await reader.read(KEY, -1)
    assert pages[0] is not None
    assert (len({id(page) for page in [*pages, later]}), log.reads, pages[0].last_number) == (1, 1, 2)
    assert pages[0].encode() is pages[0].encode()


async def test_page_is_not_held_after_its_last_follower() -> None:
    log = SlowLog(make_rows(3))
    log.gate.set()
    reader = EventReader(log)  # type: ignore[arg-type]
    page = await reader.read(KEY, -1)
    assert len(reader._pages) == 1
    del page
    await asyncio.sleep(0)  # the loop holds the result while it resumes this test
    gc.collect()
    assert (len(reader._pages), len(reader._reads)) == (0, 0)


async def test_empty_result_of_an_earlier_read_is_not_reused() -> None:
    """Events that were stored after the earlier read began must not be missed."""
    log = SlowLog([])
    reader = EventReader(log)  # type: ignore[arg-type]
    earlier = asyncio.create_task(reader.read(KEY, -1))
    await log.begun.wait()
    log.rows = make_rows(1)
    later = [asyncio.create_task(reader.read(KEY, -1)) for _ in range(3)]
    await asyncio.sleep(0)
    log.gate.set()
    assert await earlier is None
    pages = await asyncio.gather(*later)
    assert [page is not None and page.last_number for page in pages] == [0, 0, 0]
    assert log.reads == 2


async def test_failed_read_is_reported_to_all_and_repeated_later() -> None:
    log = SlowLog(make_rows(1))
    reader = EventReader(log)  # type: ignore[arg-type]
    log.error = ServerError("The store failed.")
    log.gate.set()
    outcomes = await asyncio.gather(*(reader.read(KEY, -1) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ServerError] * 3
    log.error = None
    page = await reader.read(KEY, -1)
    assert page is not None


async def test_cancelled_follower_does_not_cancel_the_read_of_others() -> None:
    log = SlowLog(make_rows(1))
    reader = EventReader(log)  # type: ignore[arg-type]
    first, second = (asyncio.create_task(reader.read(KEY, -1)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    log.gate.set()
    assert await second is not None


@pytest.mark.parametrize("payload", [b"", b"{", b'{"type":"\xff"}', b"[]", b"7", b'{"type":5}'])
def test_damaged_event_is_skipped_but_counted(payload: bytes) -> None:
    page = make_page([*make_rows(1), (1, payload)])
    assert page is not None
    assert (len(page), page.last_number, page.is_last) == (1, 1, False)
    only = make_page([(1, payload)])
    assert only is not None
    assert (list(only), only.last_number) == ([], 1)


@pytest.fixture(params=["memory", "sqlite"])
def log_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "store.db")


async def read_all(harness: EngineHarness, response_id: str, after: int) -> list[bytes]:
    pages = await harness.engine.follow("default", response_id, after=after)
    return [event.raw async for page in pages for event in page]


@pytest.mark.parametrize("page_bytes", [1, 500, 10**6])
async def test_followers_that_join_at_any_time_get_the_same_events(
    make_harness: Any, log_store: Store, page_bytes: int
) -> None:
    script = {"default": [{"text": WORDS[:20]}, {"wait": "gate"}, {"text": WORDS[20:]}]}
    harness = await make_harness(script, store=log_store, event_page_bytes=page_bytes)
    run = await harness.ask(background=True)
    readers = [asyncio.create_task(read_all(harness, run.response.id, after)) for after in (-1, -1, 3)]
    await harness.backend.reached("gate")
    readers += [asyncio.create_task(read_all(harness, run.response.id, after)) for after in (-1, 0, 9)]
    for _ in range(50):
        await asyncio.sleep(0)
    harness.backend.release("gate")
    readers += [asyncio.create_task(read_all(harness, run.response.id, after)) for after in (-1, 5)]
    streams = await asyncio.gather(*readers)
    whole = await read_all(harness, run.response.id, -1)
    starts = [0, 0, 4, 0, 1, 10, 0, 6]
    assert [stream == whole[start:] for stream, start in zip(streams, starts, strict=True)] == [True] * 8
    assert judge([codec.decode_event(each) for each in whole]).output_text == "".join(WORDS)


async def test_follower_that_stops_reading_holds_one_page(make_harness: Any, log_store: Store) -> None:
    harness = await make_harness({"default": [{"text": WORDS}]}, store=log_store, event_page_bytes=1000)
    run = await harness.ask(background=True)
    whole = await read_all(harness, run.response.id, -1)
    pages = await harness.engine.follow("default", run.response.id, after=-1)
    first = await anext(pages)
    assert sum(len(event.raw) for event in first) <= 1000 or len(first) == 1
    assert len(first) < len(whole)
    await pages.aclose()


async def test_following_does_not_read_the_items_of_a_response(make_harness: Any) -> None:
    class Counting(MemoryStore):
        loads = 0

        async def load(self, project: str, response_id: str) -> StoredResponse | None:
            self.loads += 1
            return await super().load(project, response_id)

    store = Counting()
    harness = await make_harness({"default": [{"text": WORDS}]}, store=store, event_page_bytes=1)
    run = await harness.ask(background=True)
    await read_all(harness, run.response.id, -1)
    before = store.loads
    await read_all(harness, run.response.id, -1)
    await harness.engine.retrieve("default", run.response.id)
    assert store.loads == before
