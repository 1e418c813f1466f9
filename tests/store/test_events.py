"""The event log, in all stores."""

from collections.abc import Callable
from typing import Any

import pytest

from antiphon.errors import NotFound, ServerError
from antiphon.store.base import LeaseLost, Store, StoredResponse

MakeStored = Callable[..., StoredResponse]


def make_events(first: int, count: int) -> list[bytes]:
    return [b'{"sequence_number":%d,"delta":"\xc3\xa9\\n"}' % number for number in range(first, first + count)]


def number_events(first: int, count: int) -> list[tuple[int, bytes]]:
    return list(zip(range(first, first + count), make_events(first, count), strict=True))


@pytest.fixture
async def running(store: Store, make_stored: MakeStored) -> Store:
    """A store with a run of the owner `us`."""
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    await store.claim("us", as_of=0, lease=10, limit=1)
    return store


async def test_events_are_read_from_any_number(running: Store) -> None:
    first = 0
    for count in (1, 3, 2, 5):
        assert await running.append_events("p", "resp_1", first, make_events(first, count), owner="us") is True
        first += count
    for after in range(-1, first + 2):
        expected = number_events(after + 1, first - after - 1)
        assert await running.read_events("p", "resp_1", after) == expected


@pytest.mark.parametrize("max_bytes", [1, 40, 100, 10**6])
async def test_pages_of_events_join_to_the_whole_log(running: Store, max_bytes: int) -> None:
    first = 0
    for count in (1, 3, 2, 50):
        await running.append_events("p", "resp_1", first, make_events(first, count), owner="us")
        first += count
    pages: list[list[tuple[int, bytes]]] = []
    after = -1
    while page := await running.read_events("p", "resp_1", after, max_bytes=max_bytes):
        pages.append(page)
        after = page[-1][0]
    assert [event for page in pages for event in page] == number_events(0, first)
    sizes = [sum(len(payload) for _, payload in page) for page in pages]
    assert all(size <= max_bytes or len(page) == 1 for size, page in zip(sizes, pages, strict=True))


async def test_page_of_large_events_has_only_one_of_them(running: Store, make_stored: MakeStored) -> None:
    """The last events of a response are saved at once, and each can contain the whole answer."""
    large = [b'"%b"' % (letter * 10**6) for letter in (b"a", b"b", b"c")]
    await running.append_events("p", "resp_1", 0, [b"0", *large[:1]], owner="us")
    await running.save("p", make_stored("resp_1"), owner="us", events=(2, [*large[1:], b"4"]))
    assert [await running.read_events("p", "resp_1", after, max_bytes=1000) for after in range(-1, 4)] == [
        [(0, b"0")],
        [(1, large[0])],
        [(2, large[1])],
        [(3, large[2])],
        [(4, b"4")],
    ]


async def test_search_returns_matching_newest_and_start_batches(running: Store) -> None:
    batches = [(1, b'"a"\n"x 1"'), (2, b'"b"'), (4, b'"x 2"\n"c"'), (5, b'"d"'), (6, b'"e"')]
    first = 0
    for last, lines in batches:
        await running.append_events("p", "resp_1", first, lines.split(b"\n"), owner="us")
        first = last + 1
    found = {start: await running.search_events("p", "resp_1", b'"x', start=start) for start in (-1, 1, 2, 3, 5, 6, 7)}
    one, two, three, four, five = batches
    assert found == {
        -1: [one, three, five],
        1: [one, three, five],
        2: [two, three, five],
        3: [three, five],
        5: [four, five],
        6: [five],
        7: [],
    }


async def test_unknown_response_has_no_events(store: Store) -> None:
    assert await store.read_events("p", "resp_1", -1) == []
    assert await store.search_events("p", "resp_1", b"", start=-1) == []


@pytest.mark.parametrize("first", [0, 2, 3])
async def test_event_number_cannot_be_used_twice(running: Store, first: int) -> None:
    await running.append_events("p", "resp_1", 0, make_events(0, 2), owner="us")
    await running.append_events("p", "resp_1", 2, make_events(2, 2), owner="us")
    with pytest.raises(ServerError, match=f"The event log of resp_1 already reaches number {first}"):
        await running.append_events("p", "resp_1", first, [b'"again"'] * 4, owner="us")
    assert await running.read_events("p", "resp_1", -1) == number_events(0, 4)
    assert await running.append_events("p", "resp_1", 4, make_events(4, 1), owner="us") is True


async def test_event_of_two_lines_is_rejected(running: Store) -> None:
    for payloads in ([b"{\n}"], [b"{}", b"{}\n"]):
        with pytest.raises(ServerError, match="one line"):
            await running.append_events("p", "resp_1", 0, payloads)
    assert await running.read_events("p", "resp_1", -1) == []


async def test_empty_batch_changes_nothing(running: Store) -> None:
    assert await running.append_events("p", "resp_1", 0, [], owner="us") is True
    assert await running.append_events("p", "resp_1", 0, [], owner="them") is False
    assert await running.read_events("p", "resp_1", -1) == []
    assert await running.append_events("p", "resp_1", 0, make_events(0, 1), owner="us") is True


async def test_events_of_an_unknown_response_are_not_stored(running: Store) -> None:
    assert await running.append_events("p", "resp_2", 0, make_events(0, 1)) is False
    assert await running.append_events("theirs", "resp_1", 0, make_events(0, 1)) is False
    assert await running.append_events("p", "resp_1", 0, make_events(0, 1)) is True
    assert await running.read_events("p", "resp_2", -1) == []
    assert await running.read_events("theirs", "resp_1", -1) == []


async def test_former_owner_cannot_append_events(running: Store, clock: Any) -> None:
    assert await running.append_events("p", "resp_1", 0, make_events(0, 2), owner="us") is True
    await running.claim("them", as_of=clock.time + 10, lease=10, limit=1)
    assert await running.append_events("p", "resp_1", 2, make_events(2, 1), owner="us") is False
    assert await running.append_events("p", "resp_1", 2, make_events(2, 2), owner="them") is True
    assert await running.read_events("p", "resp_1", -1) == number_events(0, 4)


async def test_owner_with_an_expired_lease_appends_until_the_run_is_claimed(running: Store, clock: Any) -> None:
    assert await running.claim("us", as_of=clock.time + 1_000, lease=10, limit=1) == []
    assert await running.append_events("p", "resp_1", 0, make_events(0, 1), owner="us") is True


async def test_final_response_keeps_its_events_and_accepts_no_more(running: Store, make_stored: MakeStored) -> None:
    await running.append_events("p", "resp_1", 0, make_events(0, 3), owner="us")
    await running.save("p", make_stored("resp_1"), owner="us")
    assert await running.append_events("p", "resp_1", 3, make_events(3, 1), owner="us") is False
    assert await running.read_events("p", "resp_1", 0) == number_events(1, 2)


async def test_numbers_of_dropped_events_can_be_used_again(running: Store) -> None:
    await running.append_events("p", "resp_1", 0, make_events(0, 3))
    assert await running.drop_events("p", "resp_1") is True
    assert await running.read_events("p", "resp_1", -1) == []
    assert await running.append_events("p", "resp_1", 0, [b'"anew"']) is True
    assert await running.read_events("p", "resp_1", -1) == [(0, b'"anew"')]


async def test_owner_cannot_drop_events_of_a_watched_run(running: Store, make_stored: MakeStored) -> None:
    await running.enqueue("p", make_stored("resp_2", status="queued"), b"{}")
    await running.claim("us", as_of=0, lease=10, limit=1)
    for response_id in ("resp_1", "resp_2"):
        await running.append_events("p", response_id, 0, make_events(0, 2), owner="us")
    await running.mark_watched("p", "resp_1")

    assert await running.drop_events("p", "resp_1", owner="us") is False
    assert await running.drop_events("p", "resp_2", owner="them") is False
    assert await running.drop_events("p", "resp_2", owner="us") is True
    assert await running.drop_events("p", "resp_3", owner="us") is False
    assert await running.read_events("p", "resp_1", -1) == number_events(0, 2)
    assert await running.read_events("p", "resp_2", -1) == []


async def test_events_of_one_id_in_two_projects_are_independent(store: Store, make_stored: MakeStored) -> None:
    for project, event in (("ours", b"1"), ("theirs", b"2")):
        await store.save(project, make_stored("resp_1"))
        assert await store.append_events(project, "resp_1", 0, [event]) is True
    assert await store.drop_events("theirs", "resp_1") is True
    assert await store.read_events("ours", "resp_1", -1) == [(0, b"1")]
    assert await store.read_events("theirs", "resp_1", -1) == []


async def test_last_events_are_saved_with_the_final_response(running: Store, make_stored: MakeStored) -> None:
    await running.append_events("p", "resp_1", 0, make_events(0, 2), owner="us")
    await running.save("p", make_stored("resp_1"), owner="us", events=(2, make_events(2, 2)))
    assert await running.load("p", "resp_1") == make_stored("resp_1")
    assert await running.read_events("p", "resp_1", -1) == number_events(0, 4)


async def test_response_is_saved_with_events_without_an_owner(store: Store, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_1"), events=(0, make_events(0, 2)))
    await store.save("p", make_stored("resp_1"), events=(2, []))
    assert await store.read_events("p", "resp_1", -1) == number_events(0, 2)


async def test_response_is_not_saved_if_its_events_are_rejected(running: Store, make_stored: MakeStored) -> None:
    await running.append_events("p", "resp_1", 0, make_events(0, 2), owner="us")
    with pytest.raises(ServerError, match="already reaches number 1"):
        await running.save("p", make_stored("resp_1"), owner="us", events=(1, make_events(1, 1)))
    with pytest.raises(ServerError, match="one line"):
        await running.save("p", make_stored("resp_1"), owner="us", events=(2, [b"\n"]))
    with pytest.raises(NotFound):
        await running.save("p", make_stored("resp_1"), conversation="conv_1", events=(2, make_events(2, 1)))
    with pytest.raises(LeaseLost):
        await running.save("p", make_stored("resp_1"), owner="them", events=(2, make_events(2, 1)))
    assert await running.load("p", "resp_1") == make_stored("resp_1", status="queued")
    assert await running.read_events("p", "resp_1", -1) == number_events(0, 2)
    assert await running.mark_watched("p", "resp_1") is True


async def test_late_unfinished_save_appends_no_events(store: Store, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_1"), events=(0, make_events(0, 1)))
    await store.save("p", make_stored("resp_1", status="in_progress"), events=(1, make_events(1, 1)))
    assert await store.read_events("p", "resp_1", -1) == number_events(0, 1)
