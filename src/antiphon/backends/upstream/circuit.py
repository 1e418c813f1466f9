"""The circuit breaker: a server that keeps failing is left alone for a while, and then tried with one call."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from antiphon.errors import AntiphonError, Unavailable, UpstreamError

FAILURES = 5
FIRST_PAUSE = 10.0
LONGEST_PAUSE = 60.0

logger = logging.getLogger(__name__)


def means_unusable(error: BaseException) -> bool:
    """Whether the server as such is broken. One that refuses a request, or wants it later, works."""
    return isinstance(error, Unavailable) or (
        isinstance(error, UpstreamError) and error.code in ("upstream_error", "upstream_timeout")
    )


class Circuit:
    """Open after so many failures in a row; each trial that fails doubles the pause."""

    def __init__(self, name: str, *, now: Callable[[], float]) -> None:
        self._name = name
        self._now = now
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._opens_again = 0.0
        self._on_trial = False

    @contextmanager
    def guard(self) -> Iterator[None]:
        """A call: refused while the circuit is open, and counted by how it ends."""
        is_trial = self._admit()
        try:
            yield
        except BaseException as error:
            if means_unusable(error):
                self._count_failure(is_trial=is_trial)
            elif isinstance(error, AntiphonError):
                self._failures = 0  # it refused, so it works
            raise
        else:
            self._failures = 0
        finally:
            if is_trial:
                self._on_trial = False

    def _admit(self) -> bool:
        """Whether this call is the trial."""
        if self._failures < FAILURES:
            return False
        left = self._opens_again - self._now()
        if left > 0 or self._on_trial:
            raise Unavailable(
                "The upstream keeps failing, and is left alone for a while.",
                code="upstream_unavailable",
                retry_after=max(left, 1.0),
            )
        self._on_trial = True
        return True

    def _count_failure(self, *, is_trial: bool) -> None:
        self._failures += 1
        # Calls that were under way when the circuit opened change nothing more.
        if is_trial or self._failures == FAILURES:
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if is_trial else FIRST_PAUSE
            self._opens_again = self._now() + self._pause
            logger.warning("backend %s: it keeps failing, and is left alone for %.0f s.", self._name, self._pause)
