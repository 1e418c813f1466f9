"""The budget for request bodies: their bytes in memory over all connections, of HTTP and of WebSockets.

A body counts until its request has been answered: its content is in memory as long, and the response may repeat it.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from antiphon.errors import Unavailable

# The first bytes of each body are free, because every connection has a buffer of this size anyway. So bodies of the
# usual size are accepted while large ones exhaust the budget, and cost no accounting.
FREE_BYTES = 64 * 1024
# If the budget is exhausted, bodies that arrive more slowly than this are dropped in favour of others, and so are those
# whose clients read the response more slowly.
_SLOW_AFTER_SECONDS = 5.0
_SLOW_BYTES_PER_SECOND = 64 * 1024
_RETRY_AFTER_SECONDS = 5.0


class BodyDropped(Exception):
    """The budget is exhausted, and the client reads the response too slowly."""


class BodyBudget:
    """Counts the received bytes of bodies. Announced lengths are not counted: an announcement takes no memory."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self._bodies: set[BodyShare] = set()

    def open(
        self, on_drop: Callable[[], object] | None = None, *, is_slow: Callable[[], bool] | None = None
    ) -> "BodyShare":
        """Return the share of a new body. `on_drop` is called if the share is taken away. Without it, it never is.

        `is_slow` returns True if the share can be taken away. Without it, the rate of the bytes decides.
        """
        return BodyShare(self, on_drop, is_slow)

    def check(self, announced: int) -> None:
        """Raise Unavailable if a body of this length does not fit now, so that it need not be read in vain.

        Slow bodies count as room. They are dropped only when the bytes arrive: an announcement must not drop them.
        """
        missing = self.used + announced - FREE_BYTES - self.max_bytes
        if missing > 0 and missing > sum(body.counted for body in self._find_slow()):
            raise self.make_error()

    def make_error(self) -> Unavailable:
        return Unavailable(
            f"The server holds too many request bodies: their total exceeds body_budget_bytes ({self.max_bytes}). "
            "Send the request again later.",
            code="server_overloaded",
            retry_after=_RETRY_AFTER_SECONDS,
        )

    def _resize(self, share: "BodyShare", counted: int) -> bool:
        growth = counted - share.counted
        if growth > 0 and not self._make_room(growth, share):
            return False
        self.used += growth
        share.counted = counted
        if counted:
            self._bodies.add(share)
        else:
            self._bodies.discard(share)
        return True

    def _make_room(self, size: int, share: "BodyShare | None") -> bool:
        if self.used + size <= self.max_bytes:
            return True
        for body in self._find_slow():
            if body is not share:
                body.drop()
            if self.used + size <= self.max_bytes:
                return True
        return False

    def _find_slow(self) -> "list[BodyShare]":
        """Return the bodies that can be dropped, the slowest first."""
        now = time.monotonic()
        slow = [body for body in self._bodies if body.is_slow(now)]
        return sorted(slow, key=lambda body: body.compute_rate(now))


class BodyShare:
    """One body's share of the budget. `close` returns it."""

    __slots__ = (
        "_budget",
        "_count_sent",
        "_is_slow",
        "_on_drop",
        "_sent_at_start",
        "_started_at",
        "counted",
        "dropped",
        "size",
    )

    def __init__(
        self, budget: BodyBudget, on_drop: Callable[[], object] | None, is_slow: Callable[[], bool] | None = None
    ) -> None:
        self._is_slow = is_slow
        self._budget = budget
        self._on_drop = on_drop
        self._started_at = time.monotonic()
        self._count_sent: Callable[[], int] | None = None
        self._sent_at_start = 0
        self.size = 0
        self.counted = 0
        self.dropped = False

    def resize(self, size: int) -> bool:
        """Set the number of bytes in memory. Return False if the budget does not allow it."""
        if self.dropped:
            return False
        if not size:
            self._started_at = time.monotonic()
        counted = max(0, size - FREE_BYTES)
        if counted != self.counted and not self._budget._resize(self, counted):
            return False
        self.size = size
        return True

    def hold(self) -> None:
        """Exclude the body from being dropped: it is complete, and the server works for it."""
        self._on_drop = None

    @contextmanager
    def sending(self, count_sent: Callable[[], int]) -> Iterator[None]:
        """Send to the client within this context. If it reads slowly, the body can be dropped: raises BodyDropped.

        `count_sent` returns the number of bytes sent so far.
        """
        task = asyncio.current_task()
        assert task is not None, "a body is dropped by cancelling the task that sends"
        self._count_sent, self._sent_at_start, self._started_at = count_sent, count_sent(), time.monotonic()
        self._on_drop = task.cancel
        try:
            yield
        except asyncio.CancelledError:
            if not self.dropped:
                raise
            task.uncancel()
            raise BodyDropped from None
        finally:
            self._on_drop = None

    def drop(self) -> None:
        """Take the share away: the budget is exhausted, and this body is slow."""
        self.close()
        self.dropped = True
        if self._on_drop is not None:
            self._on_drop()

    def close(self) -> None:
        self._budget._resize(self, 0)
        self.size = 0

    def is_slow(self, now: float) -> bool:
        """Return True if the body can be dropped in favour of others."""
        if self._is_slow is not None:
            return self._is_slow()
        if self._on_drop is None or now - self._started_at < _SLOW_AFTER_SECONDS:
            return False
        return self.compute_rate(now) < _SLOW_BYTES_PER_SECOND

    def compute_rate(self, now: float) -> float:
        """Return the average number of bytes per second: of the body, or of the response once it is being sent."""
        transferred = self.size if self._count_sent is None else self._count_sent() - self._sent_at_start
        return transferred / max(now - self._started_at, 0.001)
