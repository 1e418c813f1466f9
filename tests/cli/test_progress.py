import io
from itertools import count

from antiphon.cli.download import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_each_tenth_is_a_line():
    out = io.StringIO()
    with ProgressBar("tiny", 2_000_000, out) as progress:
        for done in (0, 100_000, 200_000, 390_000, 1_900_000, 2_000_000):
            progress.update(done)
    assert out.getvalue() == "tiny: 10% of 2.0 MB\ntiny: 90% of 2.0 MB\ntiny: 100% of 2.0 MB\n"


def test_a_continued_download_does_not_repeat_the_tenths_it_had():
    out = io.StringIO()
    with ProgressBar("tiny", 2_000_000, out) as progress:
        progress.update(1_000_000)
        progress.update(1_200_000)
    assert out.getvalue() == "tiny: 60% of 2.0 MB\n"


def test_on_a_terminal_one_line_is_redrawn_with_speed_and_time_left(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    seconds = count()
    with ProgressBar("tiny", 4_000_000, out, clock=lambda: next(seconds)) as progress:
        progress.update(0)
        progress.update(1_000_000)
    frames = [frame.rstrip(" ") for frame in out.getvalue().split("\r")]
    assert frames == [
        "",
        "tiny  ░░░░░░░░░░░░░░░░░░░░░░░░   0%  0.0/4.0 MB",
        "tiny  ██████░░░░░░░░░░░░░░░░░░  25%  1.0/4.0 MB  1.0 MB/s  0:03 left" + " " * 31 + "\n",
    ]


def test_a_narrow_terminal_cuts_the_line_instead_of_wrapping_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    ProgressBar("tiny", 4_000_000, out).update(1_000_000)
    assert out.getvalue() == "\rtiny  ██████░░░░░░░"
