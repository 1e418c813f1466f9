"""Telling how far a long job is: a bar that redraws itself on a terminal, a line for every tenth elsewhere."""

import shutil
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

BAR_CELLS = 24
REDRAW_SECONDS = 0.1


class Progress:
    """`update` is told the bytes that are done, and shows it as often as it helps."""

    def __init__(self, label: str, total: int, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._total = total
        self._stream = stream
        self._clock = clock
        self._live = stream.isatty()
        self._first: tuple[float, int] | None = None
        self._drawn_at = float("-inf")
        self._tenths = 0

    def update(self, done: int) -> None:
        now = self._clock()
        if self._first is None:
            # What an earlier attempt brought was not fetched now: it does not count for the speed, nor for the lines.
            self._first = (now, done)
            self._tenths = done * 10 // self._total
        if not self._live:
            self._write_tenths(done)
        elif now - self._drawn_at >= REDRAW_SECONDS or done == self._total:
            self._drawn_at = now
            self._draw(done, now)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and self._first is not None:
            self._stream.write("\n")
            self._stream.flush()

    def _write_tenths(self, done: int) -> None:
        tenths = done * 10 // self._total
        if tenths > self._tenths:
            self._tenths = tenths
            self._stream.write(f"{self._label}: {tenths * 10}% of {_megabytes(self._total)} MB\n")
            self._stream.flush()

    def _draw(self, done: int, now: float) -> None:
        cells = done * BAR_CELLS // self._total
        bar = "█" * cells + "░" * (BAR_CELLS - cells)
        share = f"{done * 100 // self._total:3}%"
        line = f"{self._label}  {bar} {share}  {_megabytes(done)}/{_megabytes(self._total)} MB{self._pace(done, now)}"
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r{line[:width]:{width}}")
        self._stream.flush()

    def _pace(self, done: int, now: float) -> str:
        assert self._first is not None
        started, first = self._first
        if done == first or now <= started:
            return ""
        speed = (done - first) / (now - started)
        minutes, seconds = divmod(int((self._total - done) / speed), 60)
        return f"  {_megabytes(speed)} MB/s  {minutes}:{seconds:02} left"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.1f}"
