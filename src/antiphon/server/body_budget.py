"""The budget for bodies: their bytes in memory over all connections, of HTTP and of WebSockets.

The body of a request counts until the request has been answered: its content is in memory until then, and the response
may repeat it. A large body of a response counts until it has been sent.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from antiphon.errors import Unavailable

# The first bytes of each body are free, because every connection has a buffer of this size anyway. So bodies of the
# usual size are accepted while large ones exhaust the budget, and cost no accounting.
FREE_BYTES = 64 * 1024
# If the budget is exhausted, a body is dropped in favour of others if it arrives, or its client reads the response, at
# a lower rate than this.
_SLOW_AFTER_SECONDS = 5.0
_SLOW_BYTES_PER_SECOND = 64 * 1024
_RETRY_AFTER_SECONDS = 5.0


class BodyDropped(Exception):
    """The budget is exhausted, and the client reads the response too slowly."""


class BodyBudget:
    """Counts the bytes of bodies. Announced lengths are not counted: an announcement takes no memory.

    A project can take at most three quarters of the budget, unless it has only one body.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self._bodies: set[BodyShare] = set()
        self._by_project: dict[str, int] = {}

    def open(
        self,
        on_drop: Callable[[], object] | None = None,
        *,
        project: str = "",
        is_slow: Callable[[], bool] | None = None,
    ) -> "BodyShare":
        """Return the share of a new body. A body without a `project` has no limit of its own.

        `on_drop` is called if the share is taken away. Without `on_drop`, the share is never taken away. `is_slow`
        returns True if the share can be taken away. Without `is_slow`, the rate of the bytes decides.
        """
        return BodyShare(self, on_drop, is_slow, project)

    def check(self, announced: int, project: str = "") -> None:
        """Raise Unavailable if a body of this length does not fit now, before it is read.

        Slow bodies count as room. They are dropped only when the bytes arrive: an announcement must not drop them.
        """
        counted = announced - FREE_BYTES
        if not self._fits(counted, project, 0) and not self._fits_without(self._find_slow(), counted, project, 0):
            raise self.make_error()

    def make_error(self) -> Unavailable:
        return Unavailable(
            "The server holds too many large bodies of requests and responses: their total exceeds body_budget_bytes "
            f"({self.max_bytes}), or three quarters of it in one project. Send the request again later.",
            code="server_overloaded",
            retry_after=_RETRY_AFTER_SECONDS,
        )

    @property
    def _project_bytes(self) -> float:
        return self.max_bytes * 3 / 4

    def _resize(self, share: "BodyShare", counted: int, *, is_required: bool) -> bool:
        growth = counted - share.counted
        if growth > 0 and not self._make_room(growth, share, is_required=is_required) and not is_required:
            return False
        self.used += growth
        if share.project:
            own = self._by_project.get(share.project, 0) + growth
            if own:
                self._by_project[share.project] = own
            else:
                self._by_project.pop(share.project, None)
        share.counted = counted
        if counted:
            self._bodies.add(share)
        else:
            self._bodies.discard(share)
        return True

    def _fits(self, size: int, project: str, held: int) -> bool:
        """Return True if there is room for `size` bytes more of a body that counts `held` bytes already."""
        return self.used + size <= self.max_bytes and self._fits_project(size, project, held)

    def _fits_project(self, size: int, project: str, held: int) -> bool:
        return self._fits_limit(self._get_own(project), size, held)

    def _fits_limit(self, own: int, size: int, held: int) -> bool:
        return own <= held or own + size <= self._project_bytes

    def _fits_without(self, slow: "list[BodyShare]", size: int, project: str, held: int) -> bool:
        """Return True if there is room for `size` bytes more once these bodies are dropped."""
        own = self._get_own(project) - sum(body.counted for body in slow if body.project == project)
        used = self.used - sum(body.counted for body in slow)
        return used + size <= self.max_bytes and self._fits_limit(own, size, held)

    def _get_own(self, project: str) -> int:
        return self._by_project.get(project, 0) if project else 0

    def _make_room(self, size: int, share: "BodyShare", *, is_required: bool) -> bool:
        """Drop slow bodies until there is room.

        If dropping them does not make enough room, drop none, unless `is_required`.
        """
        project = share.project
        if self._fits(size, project, share.counted):
            return True
        slow = [body for body in self._find_slow() if body is not share]
        if not is_required and not self._fits_without(slow, size, project, share.counted):
            return False
        for body in slow:
            # A project beyond its limit gets no room from others.
            if body.project == project or self._fits_project(size, project, share.counted):
                body.drop()
            if self._fits(size, project, share.counted):
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
        "_count_read",
        "_is_slow",
        "_on_drop",
        "_read_at_start",
        "_started_at",
        "counted",
        "dropped",
        "project",
        "size",
    )

    def __init__(
        self,
        budget: BodyBudget,
        on_drop: Callable[[], object] | None,
        is_slow: Callable[[], bool] | None = None,
        project: str = "",
    ) -> None:
        self.project = project
        self._is_slow = is_slow
        self._budget = budget
        self._on_drop = on_drop
        self._started_at = time.monotonic()
        self._count_read: Callable[[], int] | None = None
        self._read_at_start = 0
        self.size = 0
        self.counted = 0
        self.dropped = False

    def resize(self, size: int, *, is_required: bool = False) -> bool:
        """Set the number of bytes in memory. Return False if the budget does not allow it.

        With `is_required` they count even if the budget is exhausted: other bodies then have to wait.
        """
        if self.dropped:
            return False
        if not size:
            self._started_at = time.monotonic()
        counted = max(0, size - FREE_BYTES)
        if counted != self.counted and not self._budget._resize(self, counted, is_required=is_required):
            return False
        self.size = size
        return True

    def hold(self) -> None:
        """Exclude the body from being dropped: it is complete, and the server works for it."""
        self._on_drop = None

    @contextmanager
    def sending(self, count_read: Callable[[], int]) -> Iterator[None]:
        """Send to the client within this context. If it reads slowly, the body can be dropped: raises BodyDropped.

        `count_read` returns the number of bytes that the client has read so far.
        """
        task = asyncio.current_task()
        assert task is not None, "a body is dropped by cancelling the task that sends"
        self._count_read, self._read_at_start, self._started_at = count_read, count_read(), time.monotonic()
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
        self._budget._resize(self, 0, is_required=True)
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
        transferred = self.size if self._count_read is None else self._count_read() - self._read_at_start
        return transferred / max(now - self._started_at, 0.001)
