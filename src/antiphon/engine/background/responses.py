"""Background responses: queue, follow and cancel them. Their events can be read again from any number.

The queue is part of the store, so accepting a response and queueing its run are one transaction. A `Scheduler` decides
when and where a queued run begins.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from antiphon import offload
from antiphon.engine.background.attempt import Attempt, QueuedRequest
from antiphon.engine.background.event_reader import PAGE_BYTES, EventPages, EventReader
from antiphon.engine.background.finished_items import FinishedItems
from antiphon.engine.background.follower import POLL_SECONDS, Follower, FollowerContext, has_ended
from antiphon.engine.background.response_changes import FollowedResponses, ResponseChanges
from antiphon.engine.background.scheduler import Scheduler
from antiphon.engine.background.worker import wait_for
from antiphon.errors import Unavailable
from antiphon.protocol import codec
from antiphon.protocol.response import FINAL_STATUSES, Response
from antiphon.store.base import NO_LIMITS, QueueFull, RunKey, Store, StoredResponse
from antiphon.store.changes import (
    Announce,
    Announcement,
    AttemptBegun,
    CancelRequested,
    Change,
    EventsAppended,
    OwnerDied,
    ReportsLost,
    ResponseDeleted,
    ResponseFollowed,
    ResponseSaved,
    RunsQueued,
)
from antiphon.store.limits import RunLimits
from antiphon.turn_queue import refuse_all, refuse_project


class NewResponse(NamedTuple):
    """A response that this process has just queued, and its changes since then."""

    response: Response
    changes: ResponseChanges
    is_watched: bool


class BackgroundRun:
    """A queued response. Same interface as `Run`; closing its events does not cancel the run."""

    def __init__(self, response: Response, warnings: Sequence[str], follow: Callable[[], EventPages]) -> None:
        self.response = response
        self.warnings = warnings
        self.events = follow

    async def drain(self) -> Response:
        """Return the queued response at once."""
        return self.response


class BackgroundResponses:
    """Queues background responses, reads their events and cancels them.

    `lease` is the time after which the run of a dead process is free. Each follower of a response holds at most
    `page_bytes` of its events, or one larger event.
    """

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        *,
        lease: float,
        limits: RunLimits = NO_LIMITS,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self._store = store
        reader = EventReader(store, page_bytes=page_bytes)
        self._context = FollowerContext(store, reader, scheduler, self._announce_followers, page_bytes)
        self._scheduler = scheduler
        self._lease = lease
        self.limits = limits
        self._stopping = False
        self.refusals = 0  # because too many responses of a project wait
        # Announces a change to other processes, if the store does not report changes.
        self.announce_elsewhere: Announce | None = None
        self._followed = FollowedResponses()
        self._finished = FinishedItems(store)

    async def start(self) -> None:
        self._store.on_change = self.receive_change
        self._scheduler.on_begin, self._scheduler.on_end = self._report_begin, self._report_end
        self._scheduler.on_full = self._offer_runs
        await self._scheduler.start()

    async def close(self) -> None:
        self._store.on_change = None
        await self._scheduler.close()
        if self.announce_elsewhere is not None:
            self.announce_elsewhere(RunsQueued())

    async def enqueue(self, key: RunKey, stored: StoredResponse, queued: QueuedRequest) -> Callable[[], EventPages]:
        """Save a response together with its run, for this or another process. Return a function that follows it.

        Raises RateLimited if too many responses of the project wait, and Unavailable if too many wait in all.
        """
        limits = self.limits.select_project(key.project)
        encoded = await offload.run(codec.encode, queued)
        # A streamed response is watched from the start. Its changes are opened first, so that the follower misses none.
        is_watched = bool(queued.request.stream)
        new = NewResponse(stored.response, self._followed.open(key.response_id), is_watched)
        try:
            await self._store.enqueue(key.project, stored, encoded, limits=limits, watched=is_watched)
        except QueueFull as full:
            seconds = self._scheduler.estimate_seconds(full.waiting)
            if full.is_project:
                self.refusals += 1
                reason = f"background responses of this project wait: {full.waiting}"
                raise refuse_project(reason, limits.queued_setting, seconds) from None
            raise refuse_all(f"background responses wait: {full.waiting}", "background_queued", seconds) from None
        self._scheduler.announce(key)
        return partial(self.follow, key, -1, new=new)

    @property
    def owner(self) -> str:
        """The name under which this process works on responses."""
        return self._scheduler.owner

    @property
    def count(self) -> int:
        """The number of responses that this process works on."""
        return len(self._scheduler.attempts)

    def stop_readers(self) -> None:
        """End every `follow`, because the server stops. Clients can resume the streams later or elsewhere."""
        self._stopping = True
        self._scheduler.changed.notify()
        self._followed.report_all()
        for attempt in self._scheduler.attempts.values():
            attempt.events.changed.notify()

    def stop(self, key: RunKey) -> None:
        """Stop the attempt at a run whose response was deleted, in this process or another one."""
        self._scheduler.stop(key)
        if self.announce_elsewhere is not None and not self._store.reports_changes:
            self.announce_elsewhere(ResponseDeleted(key.response_id))

    async def cancel(self, key: RunKey) -> None:
        """Request the end of a run and wait until it has ended."""
        self._scheduler.cancel(key)  # before the request: the store may fail
        await self._store.request_cancel(*key)
        if self.announce_elsewhere is not None:
            self.announce_elsewhere(CancelRequested(key.response_id))
        self._scheduler.cancel(key)  # it may have been claimed meanwhile
        await self._wait_for_end(key)

    async def follow(self, key: RunKey, after: int, *, new: NewResponse | None = None) -> EventPages:
        """Yield the events after this sequence number, the stored ones and then new ones, until the response ends.

        Raises if the end cannot be read, because the server stops or the response was deleted.
        """
        if new is None or not new.is_watched:
            # One mark is enough: it stays with the run when another process takes over.
            await self._store.mark_watched(*key)
        changes = self._followed.open(key.response_id) if new is None else new.changes
        follower = Follower(self._context, key, changes, after, is_new=new is not None)
        if new is not None:
            yield follower.begin(new.response)
            new = None
        while not self._stopping:
            page = await follower.read()
            if page:
                yield page
            del page  # it is in memory only while followers send it
            if follower.has_ended:
                return
        raise Unavailable("The server is shutting down. The stream can be resumed later.")

    async def add_finished_items(self, key: RunKey, response: Response) -> Response:
        """Return a response in progress with the output items that are done, or its end if it has ended meanwhile."""
        items = await self._finished.load(key)
        if not items:
            return response
        # The last items may be those of a response that has ended after it was loaded.
        current = await self._store.load_response(*key)
        if current is not None and current.status in FINAL_STATUSES:
            return current
        return msgspec.structs.replace(response, output=items)

    async def _wait_for_end(self, key: RunKey) -> None:
        # If the owner has just died, this process can end the run after the lease has expired.
        deadline = time.monotonic() + self._lease + 4 * POLL_SECONDS
        changes = self._followed.open(key.response_id)
        while time.monotonic() < deadline:
            changed = changes.changed.next
            self._scheduler.wake()
            if has_ended(await self._store.load_bare_response(*key)):
                return
            await wait_for(changed, POLL_SECONDS)

    # Changes

    def _announce(self, announcement: Announcement) -> None:
        self._store.announce(announcement)
        if self.announce_elsewhere is not None and not self._store.reports_changes:
            self.announce_elsewhere(announcement)

    def _announce_followers(self, response_id: str) -> None:
        self._announce(ResponseFollowed(response_id))

    def _report_begin(self, key: RunKey, attempt: Attempt) -> None:
        self._followed.report(key.response_id)
        if attempt.is_watched:
            self._announce(AttemptBegun(key.response_id))

    def _report_end(self, key: RunKey) -> None:
        self._followed.report(key.response_id)

    def _offer_runs(self) -> None:
        """Let other processes check the queue, unless the store has reported each run to them."""
        if self.announce_elsewhere is not None and not self._store.reports_changes:
            self.announce_elsewhere(RunsQueued())

    def receive_change(self, change: Change) -> None:
        """Handle a change that the store or another process reports."""
        match change:
            case RunsQueued():
                self._scheduler.wake()
            case CancelRequested(response_id):
                self._cancel_attempts(response_id)
            case EventsAppended(response_id, last):
                self._followed.report_events(response_id, last)
            case ResponseSaved(response_id):
                self._followed.report(response_id)
            case ResponseDeleted(response_id):
                self._stop_attempts(response_id)
            case ResponseFollowed(response_id):
                self._announce_events(response_id)
            case AttemptBegun(response_id):
                self._follow_again(response_id)
            case OwnerDied(owner):
                self._scheduler.take_over(owner)
            case ReportsLost():
                self._scheduler.check_runs()
                self._followed.report_all()

    def _cancel_attempts(self, response_id: str) -> None:
        for key in self._find_attempts(response_id):
            self._scheduler.cancel(key)
        self._scheduler.wake()

    def _stop_attempts(self, response_id: str) -> None:
        """Stop the attempts at a run whose response was deleted, and report that to its followers."""
        for key in self._find_attempts(response_id):
            self._scheduler.stop(key)
        self._followed.report(response_id)

    def _announce_events(self, response_id: str) -> None:
        """Announce the events of a response that this process works on to its followers in other processes."""
        for key in self._find_attempts(response_id):
            self._scheduler.attempts[key].events.announce_to(
                lambda last: self._announce(EventsAppended(response_id, last))
            )

    def _follow_again(self, response_id: str) -> None:
        """Announce the followers of a response to the process that has begun to work on it."""
        if self._followed.get(response_id) is not None and not self._find_attempts(response_id):
            self._announce_followers(response_id)

    def _find_attempts(self, response_id: str) -> list[RunKey]:
        return [key for key in self._scheduler.attempts if key.response_id == response_id]
