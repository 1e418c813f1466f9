"""A limit for log lines about exports."""

import logging
import math
import time

_SECONDS = 60.0


class LogLimit(logging.Filter):
    """Passes one record in a minute. A collector that is down would otherwise fill the log with retries."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at = -math.inf

    def is_due(self) -> bool:
        """Return True if a line may be logged now. The next one may follow in a minute."""
        now = time.monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + _SECONDS
        return True

    def filter(self, record: logging.LogRecord) -> bool:
        return self.is_due()
