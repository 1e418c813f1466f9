"""The newest events of a run in memory."""

import pytest

from antiphon.engine.background import recent_events
from antiphon.engine.background.event_writer import FLUSH_SECONDS, _choose_pause
from antiphon.engine.background.recent_events import RecentEvents


def make_payloads(first: int, count: int) -> list[bytes]:
    return [b'{"type":"acme.word","sequence_number":%d}' % (100 + number) for number in range(first, first + count)]


def find(recent: RecentEvents, after: int) -> tuple[list[bytes], int] | None:
    page = recent.find(after)
    return None if page is None else ([event.raw for event in page], page.last_number)


def test_events_after_a_number_are_those_of_one_page() -> None:
    recent = RecentEvents(page_bytes=1000)
    recent.add(2, make_payloads(2, 3))
    recent.add(5, [])
    recent.add(5, make_payloads(5, 1))
    assert find(recent, 0) is None  # event 1 was stored earlier
    assert find(recent, 1) == (make_payloads(2, 3), 4)
    assert find(recent, 3) == (make_payloads(4, 1), 4)
    assert find(recent, 4) == (make_payloads(5, 1), 5)
    assert find(recent, 5) is None
    assert recent.find(1) is recent.find(1)


def test_oldest_pages_are_dropped_but_the_newest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(make_payloads(0, 1)[0])
    monkeypatch.setattr(recent_events, "RECENT_BYTES", 3 * size)
    recent = RecentEvents(page_bytes=10 * size)
    recent.add(0, make_payloads(0, 2))
    recent.add(2, make_payloads(2, 1))
    assert find(recent, -1) is not None
    recent.add(3, make_payloads(3, 1))
    assert (find(recent, -1), find(recent, 1)) == (None, (make_payloads(2, 1), 2))
    recent.add(4, make_payloads(4, 9))
    assert (find(recent, 2), find(recent, 3)) == (None, (make_payloads(4, 9), 12))


def test_page_larger_than_the_limit_is_left_to_the_log() -> None:
    size = len(make_payloads(0, 1)[0])
    recent = RecentEvents(page_bytes=2 * size)
    recent.add(0, make_payloads(0, 1))
    recent.add(1, make_payloads(1, 3))
    recent.add(4, make_payloads(4, 1))
    assert [find(recent, after) is not None for after in (-1, 0, 2, 3)] == [True, False, False, True]


def test_all_runs_flush_at_the_same_times() -> None:
    times = [now + _choose_pause(now) for now in (100.001, 100.013, 100.029, 100.039)]
    assert times == pytest.approx([100.04, 100.04, 100.04, 100.08])
    assert FLUSH_SECONDS == 0.04
