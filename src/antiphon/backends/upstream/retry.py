"""When to ask again: how often, for which errors, and after what wait."""

import math
import random

from antiphon.backends.upstream.circuit import means_unusable
from antiphon.backends.upstream.failure import SPENT_CODES
from antiphon.backends.upstream.options import UpstreamOptions
from antiphon.errors import AntiphonError, RateLimited

FIRST_WAIT = 0.2
LONGEST_BACKOFF = 30.0
LONGEST_WAIT = 60.0
"""Who is asked to wait longer is told so instead: the client may have better to do."""


class Patience:
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
        if min(self._requests, self._streams) < 0 or not may_pass(error):
            return None
        if error.retry_after is not None:
            return error.retry_after if error.retry_after <= LONGEST_WAIT else None
        # The exponent is bounded for the sake of those who allow a hundred retries.
        doublings = min(self._failures - 1, 10)
        return min(math.ldexp(FIRST_WAIT, doublings), LONGEST_BACKOFF) * random.uniform(0.9, 1.1)


def may_pass(error: AntiphonError) -> bool:
    """Whether the same request may succeed a little later."""
    return means_unusable(error) or (isinstance(error, RateLimited) and error.code not in SPENT_CODES)
