"""When to ask again: how often, for which errors, and after what wait."""

import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime

from antiphon.errors import AntiphonError, RateLimited, Unavailable, UpstreamError
from antiphon.upstream.error_mapping import EXHAUSTED_CODES
from antiphon.upstream.options import UpstreamOptions


def parse_retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """The seconds that the answer's headers ask to wait, if they do: a number, or a date. `now` is since the epoch."""
    milliseconds = _read_number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    seconds = _read_number(text)
    if seconds is not None or not text:
        return seconds
    try:
        return max(parsedate_to_datetime(text).timestamp() - now, 0.0)
    except (ValueError, OverflowError):
        return None


def _read_number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


FAILURES = 5
FIRST_PAUSE = 10.0
LONGEST_PAUSE = 60.0

logger = logging.getLogger(__name__)


def is_outage(error: BaseException) -> bool:
    """Whether the server as such is broken. One that refuses a request, or wants it later, works."""
    return isinstance(error, Unavailable) or (
        isinstance(error, UpstreamError) and error.code in ("upstream_error", "upstream_timeout")
    )


class CircuitBreaker:
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
            if is_outage(error):
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


FIRST_WAIT = 0.2
LONGEST_BACKOFF = 30.0
LONGEST_WAIT = 60.0
"""Who is asked to wait longer is told so instead: the client may have better to do."""


class RetryPolicy:
    """How much of it is left for one call. `answered` says that the present attempt got the beginning of an answer."""

    def __init__(self, options: UpstreamOptions) -> None:
        self.answered = False
        self._requests = options.request_retries
        self._streams = options.stream_retries
        self._failures = 0

    def wait_after(self, error: AntiphonError) -> float | None:
        """How many seconds to wait before the next attempt; None if there is to be none."""
        self._failures += 1
        if self.answered:
            self._streams -= 1
        else:
            self._requests -= 1
        if min(self._requests, self._streams) < 0 or not is_transient(error):
            return None
        if error.retry_after is not None:
            return error.retry_after if error.retry_after <= LONGEST_WAIT else None
        # The exponent is bounded for the sake of those who allow a hundred retries.
        doublings = min(self._failures - 1, 10)
        return min(math.ldexp(FIRST_WAIT, doublings), LONGEST_BACKOFF) * random.uniform(0.9, 1.1)


def is_transient(error: AntiphonError) -> bool:
    """Whether the same request may succeed a little later."""
    return is_outage(error) or (isinstance(error, RateLimited) and error.code not in EXHAUSTED_CODES)
