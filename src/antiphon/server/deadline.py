"""A deadline that often moves: one timer serves all deadlines of a connection."""

import asyncio
import math
from collections.abc import Callable


class Deadline:
    """Calls a function when the deadline has passed.

    Starting and cancelling a timer for each request would be expensive. If the deadline moves away, the timer keeps
    running. When it fires, it starts again for the remaining time. Set `ends_at` to infinity to have no deadline.
    """

    __slots__ = ("_loop", "_on_end", "_timer", "_timer_ends_at", "ends_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        self._loop = loop
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ends_at = math.inf
        self.ends_at = math.inf

    def set(self, seconds: float) -> None:
        self.ends_at = self._loop.time() + seconds
        if self._timer is None or self.ends_at < self._timer_ends_at:
            self._start()

    def stop(self) -> None:
        """Cancel the timer: the connection has ended, and there is no further deadline."""
        self.ends_at = math.inf
        self._on_end = _do_nothing  # it refers to the connection
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ends_at = self.ends_at
        self._timer = self._loop.call_later(self.ends_at - self._loop.time(), self._check)

    def _check(self) -> None:
        self._timer = None
        if self._loop.time() >= self.ends_at:
            self.ends_at = math.inf
            self._on_end()
        elif self.ends_at != math.inf:
            self._start()


def _do_nothing() -> None:
    pass
