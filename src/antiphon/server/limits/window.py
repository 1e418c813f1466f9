"""A count of the last minute, exact to a second."""

_SECONDS = 60


class MinuteWindow:
    """Counts of the last 60 seconds, one for each second. Times are those of a monotonic clock."""

    __slots__ = ("_counts", "_second", "total")

    def __init__(self) -> None:
        self._counts = [0] * _SECONDS
        self._second = 0
        self.total = 0

    def advance(self, now: float) -> int:
        """Remove the counts that are older than a minute, and return the sum of the others."""
        second = int(now)
        passed = second - self._second
        if passed > 0:
            if self.total:
                if passed >= _SECONDS:
                    self._counts = [0] * _SECONDS
                    self.total = 0
                else:
                    for each in range(self._second + 1, second + 1):
                        self.total -= self._counts[each % _SECONDS]
                        self._counts[each % _SECONDS] = 0
            self._second = second
        return self.total

    def add(self, now: float, amount: int) -> None:
        self.advance(now)
        self._counts[self._second % _SECONDS] += amount
        self.total += amount

    def find_wait(self, now: float, most: float) -> float:
        """Return the time until the sum is at most `most`, in seconds."""
        remaining = self.advance(now)
        if remaining <= most:
            return 0.0
        for second in range(self._second + 1, self._second + _SECONDS + 1):
            remaining -= self._counts[second % _SECONDS]
            if remaining <= most:
                return second - now
        return float(_SECONDS)
