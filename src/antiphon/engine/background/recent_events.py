"""The newest stored events of a run in memory, for followers in the process that works on it."""

from collections import deque
from collections.abc import Sequence

from antiphon.engine.background.event_reader import EventPage
from antiphon.protocol.unions import Unknown

# Maximum size of the events of one run, unless the newest page alone is larger.
RECENT_BYTES = 32 * 1024


class RecentEvents:
    """The newest events of a run. One page has the events that were stored together.

    It has only events that were stored while a follower had marked the run as watched: no later attempt replaces them.
    A page of more than `page_bytes` is left to the log, where it can be read in parts.
    """

    def __init__(self, *, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._pages: deque[tuple[int, EventPage]] = deque()
        self._size = 0

    def add(self, first: int, payloads: Sequence[bytes]) -> None:
        """Add consecutive events that are stored, numbered from `first`."""
        size = sum(map(len, payloads))
        if not payloads or size > self._page_bytes:
            return
        self._pages.append((size, EventPage(map(Unknown, payloads), first + len(payloads) - 1)))
        self._size += size
        while self._size > RECENT_BYTES and len(self._pages) > 1:
            self._size -= self._pages.popleft()[0]

    def find(self, after: int) -> EventPage | None:
        """Return the events of one page that follow this number, or None if the next event is not in memory."""
        for _, page in reversed(self._pages):
            skipped = after + 1 - (page.last_number - len(page) + 1)
            if skipped >= len(page):
                return None
            if skipped >= 0:
                return EventPage(page[skipped:], page.last_number) if skipped else page
        return None
