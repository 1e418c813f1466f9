"""The budget for incomplete request bodies: bytes in memory over all connections, of HTTP and of WebSockets."""

import time
from collections.abc import Callable

from antiphon.errors import Unavailable

# The first bytes of each body are free, because every connection has a buffer of this size anyway. So bodies of the
# usual size are accepted while large ones exhaust the budget, and cost no accounting.
FREE_BYTES = 64 * 1024
# If the budget is exhausted, a body that is older and slower than this is dropped in favour of others.
_SLOW_AFTER_SECONDS = 5.0
_SLOW_BYTES_PER_SECOND = 64 * 1024
_RETRY_AFTER_SECONDS = 5.0


class BodyBudget:
    """Counts the received bytes of bodies. Announced lengths are not counted: an announcement takes no memory."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self._bodies: set[BodyShare] = set()

    def open(self, on_drop: Callable[[], object] | None = None) -> "BodyShare":
        """Return the share of a new body. `on_drop` is called if the share is taken away. Without it, it never is."""
        return BodyShare(self, on_drop)

    def check(self, announced: int) -> None:
        """Raise Unavailable if a body of this length does not fit now, so that it need not be read in vain.

        Slow bodies count as room. They are dropped only when the bytes arrive: an announcement must not drop them.
        """
        missing = self.used + announced - FREE_BYTES - self.max_bytes
        if missing > 0 and missing > sum(body.counted for body in self._find_slow()):
            raise self.make_error()

    def make_error(self) -> Unavailable:
        return Unavailable(
            "The server holds too many incomplete request bodies: their total exceeds body_budget_bytes "
            f"({self.max_bytes}). Send the request again later.",
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

    __slots__ = ("_budget", "_on_drop", "_started_at", "counted", "dropped", "size")

    def __init__(self, budget: BodyBudget, on_drop: Callable[[], object] | None) -> None:
        self._budget = budget
        self._on_drop = on_drop
        self._started_at = time.monotonic()
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
        if self._on_drop is None or now - self._started_at < _SLOW_AFTER_SECONDS:
            return False
        return self.compute_rate(now) < _SLOW_BYTES_PER_SECOND

    def compute_rate(self, now: float) -> float:
        """Return the average number of bytes per second since the body started."""
        return self.size / max(now - self._started_at, 0.001)
