"""A follower of a background response: reads its events from the memory of the run, or else from the store.

Events come only from the stored log, or from the memory of an attempt that has stored them: an attempt may have lost
its lease without knowing it, and events that it has not stored would then be wrong.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from antiphon.engine.background.event_reader import EventPage, EventReader, make_page
from antiphon.engine.background.event_writer import EventWriter, make_queued_events
from antiphon.engine.background.recent_events import RecentEvents
from antiphon.engine.background.response_changes import ResponseChanges
from antiphon.engine.background.scheduler import Scheduler
from antiphon.engine.background.worker import wait_for
from antiphon.errors import NotFound
from antiphon.protocol.response import FINAL_STATUSES, Response
from antiphon.store.base import RunKey, Store
from antiphon.stream.sse import encode_json_line

# Polling intervals for a response that another process works on: without reports of changes, and with them.
POLL_SECONDS = 0.25
REPORTED_POLL_SECONDS = 2.0


class FollowerContext(NamedTuple):
    """The objects that all followers of a process share. `announce` reports that it follows a response."""

    store: Store
    reader: EventReader
    scheduler: Scheduler
    announce: Callable[[str], None]
    page_bytes: int


class Follower:
    """Reads the events of a response after a number. The run must be marked as watched.

    `is_new`: this process has just queued the response, and `changes` has all reports since then.
    """

    def __init__(
        self, context: FollowerContext, key: RunKey, changes: ResponseChanges, after: int, *, is_new: bool = False
    ) -> None:
        self._context = context
        self._key = key
        self._changes = changes
        self._after = after
        self._recent: RecentEvents | None = None
        self._is_read_due = not is_new
        self._seen_count = 0 if is_new else changes.count
        self._is_reported = self._is_polling = False
        # Another process that takes a new response announces its begin, and gets an answer then.
        self._is_announced = is_new
        self.has_ended = False

    def begin(self, response: Response) -> EventPage:
        """Return the first events of a queued response."""
        page = make_page(_number_queued_events(response))
        assert page is not None
        self._after = page.last_number
        return page

    async def read(self) -> EventPage | None:
        """Return the next events. If there are none, return None after a change, or at the end (`has_ended`).

        Raises NotFound if the response was deleted.
        """
        writer = self._find_writer()
        signal = self._changes.changed if writer is None else writer.changed
        changed = signal.next  # before the log is read
        page = None if self._recent is None else self._recent.find(self._after)
        if page is None and self._must_read_log(writer):
            page = await self._read_log(writer)
        if page is None and not self.has_ended:
            await self._wait(changed, writer)
        return self._advance(page)

    def _find_writer(self) -> EventWriter | None:
        """Return the log of the attempt in this process, if there is one. From now on its events are in memory, too."""
        attempt = self._context.scheduler.attempts.get(self._key)
        if attempt is None:
            return None
        self._is_announced = False  # another process may continue the response
        self._recent = attempt.events.record_recent(page_bytes=self._context.page_bytes)
        return attempt.events

    def _must_read_log(self, writer: EventWriter | None) -> bool:
        if writer is not None:
            return writer.may_reach(self._after + 1)
        if self._seen_count != self._changes.count:
            self._seen_count = self._changes.count
            self._is_read_due = True
        return self._is_read_due or self._changes.last > self._after

    async def _read_log(self, writer: EventWriter | None) -> EventPage | None:
        page = await self._context.reader.read(self._key, self._after)
        if page is None:
            self._is_read_due = False
            return await self._check_end() if writer is None else None
        if self._is_polling:  # its events were not reported
            self._is_polling = self._is_reported = self._is_announced = False
        return page

    async def _check_end(self) -> EventPage | None:
        """Find out if the response has ended. Return the first events of a response that is still queued."""
        store = self._context.store
        response = await store.load_bare_response(*self._key)
        if response is not None and response.status not in FINAL_STATUSES:
            return make_page(_number_queued_events(response)[self._after + 1 :])
        # A response that has ended before its events are read has all of them in the log.
        page = None if response is None else await self._context.reader.read(self._key, self._after)
        if page is None:
            if response is None or await store.load_bare_response(*self._key) is None:
                raise NotFound(f"Response with id '{self._key.response_id}' not found.", param="response_id")
            self.has_ended = True
        return page

    async def _wait(self, changed: asyncio.Event, writer: EventWriter | None) -> None:
        """Wait for a change. A response of another process is also read when the time of a poll has passed."""
        if writer is not None:
            await changed.wait()
            return
        if not self._is_announced:
            self._is_announced = True
            self._context.announce(self._key.response_id)
        is_reported = self._is_reported or self._context.store.reports_changes
        await wait_for(changed, REPORTED_POLL_SECONDS if is_reported else POLL_SECONDS)
        self._is_polling = not changed.is_set()
        if self._is_polling:
            self._is_read_due = True
        elif self._changes.last > self._after:
            self._is_reported = True

    def _advance(self, page: EventPage | None) -> EventPage | None:
        if page is not None:
            self._after = page.last_number
            self.has_ended = page.is_last
        return page


def has_ended(response: Response | None) -> bool:
    """Return True if the response has ended or was deleted."""
    return response is None or response.status in FINAL_STATUSES


def _number_queued_events(response: Response) -> list[tuple[int, bytes]]:
    return [(event.sequence_number, encode_json_line(event)) for event in make_queued_events(response)]
