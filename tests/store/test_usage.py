"""Usage, projects and the counts of rate limits, in all stores."""

import asyncio
from datetime import UTC, datetime

import pytest

from antiphon.errors import AntiphonError
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Message
from antiphon.store.base import Store
from antiphon.store.keys import StoredKey
from antiphon.store.location import locate_store
from antiphon.store.sql_steps import SqlStep
from antiphon.store.sql_usage import SqlUsage, _list_counts
from antiphon.store.usage import (
    DAY,
    HOUR,
    MINUTE,
    RETENTION_SECONDS,
    ROLL_UP_SECONDS,
    LimitCounts,
    Spending,
    StoredProject,
    UsageRow,
    find_month,
    find_next_month,
)
from store.conftest import Clock, MakeStored

START = 1_700_006_400  # 2023-11-15 00:00 UTC
FIRST = UsageRow(START, "p", "key_1", "m", 1, 10, 4, 5, 0.25)


async def test_usage_of_one_period_key_and_model_is_added_up(store: Store) -> None:
    other = FIRST._replace(model="n")
    await store.add_usage([FIRST, other], write_id="1")
    await store.add_usage([FIRST._replace(requests=2, cost=0.5)], write_id="2")
    both = UsageRow(START, "p", "key_1", "m", 3, 20, 8, 10, 0.75)
    assert await store.list_usage(START, START + MINUTE, width=MINUTE) == [both, other]


async def test_repeated_write_of_usage_adds_nothing_for_a_day(store: Store, clock: Clock) -> None:
    for _ in range(2):
        await store.add_usage([FIRST], write_id="1")
        await store.expire(clock.time + DAY - 1)
    await store.add_usage([FIRST], write_id="2")
    assert await store.list_usage(START, START + MINUTE, width=MINUTE) == [
        FIRST._replace(requests=2, input_tokens=20, cached_tokens=8, output_tokens=10, cost=0.5)
    ]
    assert await store.read_spending(find_month(START)) == [Spending("p", "key_1", 30, 0.5)]
    await store.expire(clock.time + DAY)
    await store.add_usage([FIRST], write_id="1")
    assert await store.read_spending(find_month(START)) == [Spending("p", "key_1", 45, 0.75)]


async def test_refused_write_of_usage_can_be_repeated(store: Store) -> None:
    with pytest.raises((AntiphonError, OverflowError)):
        await store.add_usage([FIRST, FIRST._replace(started_at=2**80)], write_id="1")
    await store.add_usage([FIRST], write_id="1")
    assert await store.list_usage(0, 2**40, width=MINUTE) == [FIRST]
    assert await store.read_spending(find_month(START)) == [Spending("p", "key_1", 15, 0.25)]


async def test_usage_is_listed_in_wider_periods_within_its_range(store: Store) -> None:
    times = (START - MINUTE, START, START + 59 * MINUTE, START + HOUR, START + 2 * HOUR)
    await store.add_usage([FIRST._replace(started_at=each) for each in times], write_id="1")
    rows = await store.list_usage(START, START + 2 * HOUR, width=HOUR)
    assert [(row.started_at, row.requests) for row in rows] == [(START, 2), (START + HOUR, 1)]
    days = await store.list_usage(START - DAY, START + DAY, width=DAY)
    assert [(row.started_at, row.requests) for row in days] == [(START - DAY, 1), (START, 4)]


async def test_spending_has_the_totals_of_one_month(store: Store) -> None:
    month = find_month(START)
    before = FIRST._replace(started_at=month - MINUTE)
    await store.add_usage([FIRST, FIRST._replace(model="n"), FIRST._replace(key_id=""), before], write_id="1")
    await store.add_usage([FIRST], write_id="2")
    assert await store.read_spending(month) == [Spending("p", "", 15, 0.25), Spending("p", "key_1", 45, 0.75)]
    assert await store.read_spending(find_month(month - 1)) == [Spending("p", "key_1", 15, 0.25)]


async def test_old_usage_is_joined_to_hours_and_very_old_usage_deleted(store: Store) -> None:
    now = START + ROLL_UP_SECONDS + HOUR + 5
    ancient = FIRST._replace(started_at=now - RETENTION_SECONDS - 2 * DAY)
    times = (START, START + MINUTE, START + 2 * MINUTE, START + HOUR, START + HOUR + MINUTE)
    await store.add_usage([ancient, *(FIRST._replace(started_at=each) for each in times)], write_id="1")
    for _ in range(2):
        await store.roll_up_usage(now)
        rows = await store.list_usage(0, now, width=MINUTE)
        listed = [(row.started_at, row.requests, row.cost) for row in rows]
        assert listed == [(START, 3, 0.75), (START + HOUR, 1, 0.25), (START + HOUR + MINUTE, 1, 0.25)]


async def test_usage_is_joined_once_by_several_processes(store_url: str) -> None:
    if store_url.startswith("memory:"):
        pytest.skip("only one process uses a memory store")
    stores = [locate_store(store_url) for _ in range(3)]
    for store in stores:
        await store.open()
    rows = [FIRST._replace(started_at=START + number * MINUTE) for number in range(1, 60)]
    await stores[0].add_usage(rows, write_id="1")
    now = START + ROLL_UP_SECONDS + 2 * HOUR
    await asyncio.gather(*(store.roll_up_usage(now) for store in stores))
    assert [row[:5] for row in await stores[0].list_usage(0, now, width=MINUTE)] == [(START, "p", "key_1", "m", 59)]
    for store in stores:
        await store.close()


def test_months_start_in_utc() -> None:
    def make_time(*parts: int) -> int:
        return int(datetime(*parts, tzinfo=UTC).timestamp())

    december = make_time(2023, 12, 31, 23, 59)
    assert (find_month(december), find_next_month(december)) == (make_time(2023, 12, 1), make_time(2024, 1, 1))
    assert find_next_month(make_time(2024, 1, 31)) == make_time(2024, 2, 1)


async def test_counts_of_other_processes_are_listed_with_their_age(store: Store, clock: Clock) -> None:
    await store.report_limit_counts("a", [LimitCounts("key:1", 5, 50, 1), LimitCounts("key:2", 1, 2, 3)])
    clock.time += 20
    await store.report_limit_counts("a", [LimitCounts("key:1", 6, 60, 2)])
    await store.report_limit_counts("b", [LimitCounts("key:1", 1, 1, 1)])
    assert sorted(await store.list_limit_counts("b")) == [
        LimitCounts("key:1", 6, 60, 2, 0),
        LimitCounts("key:2", 1, 2, 3, 20),
    ]
    clock.time += 41
    assert sorted(await store.list_limit_counts("c")) == [
        LimitCounts("key:1", 1, 1, 1, 41),
        LimitCounts("key:1", 6, 60, 2, 41),
    ]
    clock.time += 300
    await store.report_limit_counts("c", [])
    clock.time -= 341
    assert await store.list_limit_counts("c") == []


async def test_old_counts_are_not_read(store: Store, clock: Clock) -> None:
    if not isinstance(store, SqlUsage):
        pytest.skip("only SQL stores read rows")
    await store.report_limit_counts("a", [LimitCounts("key:1", 5, 50, 1)])
    steps = _list_counts("b")
    next(steps)
    step = steps.send([(clock.time + MINUTE + 1,)])
    assert isinstance(step, SqlStep)
    assert await store._fetch(step.statement, step.parameters) == []


async def test_project_is_renamed_and_archived_with_its_keys(store: Store) -> None:
    keys = [StoredKey(f"key_{name}", name.encode(), name, "", ("admin",), 1) for name in ("p", "q")]
    for key in keys:
        await store.save_key(key)
    await store.save_project(StoredProject("q", "q", 20))
    await store.save_project(StoredProject("p", "p", 10))
    await store.save_project(StoredProject("p", "P", 99))
    assert await store.list_projects() == [StoredProject("p", "P", 10), StoredProject("q", "q", 20)]
    await store.archive_project(StoredProject("p", "P", 10, 50))
    assert await store.list_projects() == [StoredProject("p", "P", 10, 50), StoredProject("q", "q", 20)]
    assert await store.list_keys() == [keys[0]._replace(revoked_at=50), keys[1]]


async def test_project_that_is_renamed_during_its_archival_stays_archived(store: Store) -> None:
    await store.save_project(StoredProject("p", "p", 10))
    await store.archive_project(StoredProject("p", "p", 10, 50))
    await store.save_project(StoredProject("p", "P", 10))
    assert await store.list_projects() == [StoredProject("p", "P", 10, 50)]


async def test_stored_bytes_count_responses_events_and_items(store: Store, make_stored: MakeStored) -> None:
    sizes = [await store.measure_stored_bytes("p")]
    await store.save("p", make_stored("resp_1"))
    sizes.append(await store.measure_stored_bytes("p"))
    await store.append_events("p", "resp_1", 0, [b'"12345678"'])
    sizes.append(await store.measure_stored_bytes("p"))
    await store.create_conversation("p", Conversation("conv_1", 1), [Message("user", "x" * 1000, "msg_1")])
    sizes.append(await store.measure_stored_bytes("p"))
    assert (sizes[0], sizes[1] > 300, sizes[2] - sizes[1], sizes[3] - sizes[2] > 1000) == (0, True, 10, True)
    assert await store.measure_stored_bytes("other") == 0
