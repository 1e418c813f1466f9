"""The count of the last minute."""

import pytest

from antiphon.server.limits.window import MinuteWindow


def test_window_counts_the_last_sixty_seconds() -> None:
    window = MinuteWindow()
    for now in (100.0, 100.9, 130.0):
        window.add(now, 1)
    assert [window.advance(now) for now in (130.0, 159.9, 160.0, 189.9, 190.0)] == [3, 3, 1, 1, 0]


def test_window_forgets_all_counts_after_a_long_pause() -> None:
    window = MinuteWindow()
    window.add(100.0, 7)
    assert (window.advance(10_000.0), window.total) == (0, 0)
    window.add(10_000.0, 2)
    assert window.advance(10_030.0) == 2


@pytest.mark.parametrize(("most", "seconds"), [(5, 0.0), (4, 40.0), (3, 40.0), (2, 45.0), (0, 59.5)])
def test_wait_ends_when_the_count_is_low_enough(most: float, seconds: float) -> None:
    window = MinuteWindow()
    for now, amount in ((100.0, 2), (105.0, 2), (119.5, 1)):
        window.add(now, amount)
    assert window.find_wait(119.5 + 0.5, most) == pytest.approx(seconds, abs=0.6)
