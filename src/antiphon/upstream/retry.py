"""Retries: which errors are transient, and how long to wait."""

import math
import random
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TypeVar

from antiphon.errors import AntiphonError, RateLimited, Unavailable, UpstreamError
from antiphon.upstream.error_mapping import PERMANENT_CODES

FIRST_WAIT = 0.2
MAX_BACKOFF = 30.0
MAX_WAIT = 60.0
"""A longer `retry_after` is passed on to the client instead of being waited for."""

T = TypeVar("T")


class RetryPolicy:
    """The retries left for one call.

    `request_retries` count attempts without a response, `stream_retries` attempts whose response broke off. `answered`
    is set by the attempt in progress once it has the start of a response.
    """

    def __init__(self, *, request_retries: int, stream_retries: int = 0) -> None:
        self.answered = False
        self._request_retries = request_retries
        self._stream_retries = stream_retries
        self._failures = 0

    def wait_after(self, error: AntiphonError) -> float | None:
        """Return the seconds to wait before the next attempt, or None if there is none."""
        self._failures += 1
        if self.answered:
            self._stream_retries -= 1
        else:
            self._request_retries -= 1
        if min(self._request_retries, self._stream_retries) < 0 or not is_transient(error):
            return None
        if error.retry_after is not None:
            return error.retry_after if error.retry_after <= MAX_WAIT else None
        # The bound keeps the exponent small when a hundred retries are configured.
        doublings = min(self._failures - 1, 10)
        return min(math.ldexp(FIRST_WAIT, doublings), MAX_BACKOFF) * random.uniform(0.9, 1.1)

    async def run(
        self,
        attempt: Callable[["RetryPolicy"], Awaitable[T]],
        *,
        sleep: Callable[[float], Awaitable[None]],
        on_retry: Callable[[AntiphonError, float], None] | None = None,
        on_failure: Callable[[AntiphonError], None] | None = None,
    ) -> T:
        """Await `attempt(self)` until it succeeds or may not be repeated. Raises the last error.

        `on_retry` is called with each error that is followed by another attempt, `on_failure` with the last one.
        """
        while True:
            self.answered = False
            try:
                return await attempt(self)
            except AntiphonError as error:
                wait = self.wait_after(error)
                if wait is None:
                    if on_failure is not None:
                        on_failure(error)
                    raise
                if on_retry is not None:
                    on_retry(error, wait)
            await sleep(wait)


def is_transient(error: AntiphonError) -> bool:
    """Return True if the same request may succeed a little later."""
    return is_outage(error) or (isinstance(error, RateLimited) and error.code not in PERMANENT_CODES)


def is_outage(error: BaseException) -> bool:
    """Return True if the upstream itself is broken. An upstream that rejects or delays a request works."""
    return isinstance(error, Unavailable | UpstreamError) and error.code not in PERMANENT_CODES


def parse_retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """Return the wait in seconds from `retry-after-ms` or `retry-after` (a number or a date). `now` is a Unix time."""
    milliseconds = _parse_number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    seconds = _parse_number(text)
    if seconds is not None or not text:
        return seconds
    try:
        return max(parsedate_to_datetime(text).timestamp() - now, 0.0)
    except (ValueError, OverflowError):
        return None


def _parse_number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
