"""Background responses: queue, follow and cancel them. Their events can be read again from any number.

The queue is part of the store, so accepting a response and queueing its run are one transaction. A `Scheduler` decides
when and where a queued run begins.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from antiphon.engine.background.event_reader import PAGE_BYTES, EventPages, EventReader, make_page
from antiphon.engine.background.event_writer import make_queued_events
from antiphon.engine.background.scheduler import Scheduler
from antiphon.engine.background.worker import wait_for
from antiphon.errors import NotFound, Unavailable
from antiphon.protocol.response import FINAL_STATUSES, Response
from antiphon.store.base import NO_LIMITS, QueueFull, RunKey, Store, StoredResponse
from antiphon.store.limits import RunLimits
from antiphon.stream.sse import encode_json_line
from antiphon.turn_queue import refuse_all, refuse_project

# Interval of polling for a response that another process works on, without reports of the store and with them.
POLL_SECONDS = 0.25
REPORTED_POLL_SECONDS = 2.0


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
        self._reader = EventReader(store, page_bytes=page_bytes)
        self._scheduler = scheduler
        self._lease = lease
        self.limits = limits
        self._stopping = False
        self.refusals = 0  # because too many responses of a project wait
        # Announces a change to other processes, if the store does not report changes.
        self.announce_change: Callable[[str, str], None] | None = None
        # Signals of responses that other processes work on. Each exists while a follower holds it.
        self._signals: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    async def start(self) -> None:
        self._store.on_change = self.receive_change
        await self._scheduler.start()

    async def close(self) -> None:
        self._store.on_change = None
        await self._scheduler.close()
        if self.announce_change is not None:
            self.announce_change("queued", "")

    async def enqueue(self, project: str, stored: StoredResponse, request: bytes) -> None:
        """Save a response together with its run, for this or another process.

        Raises RateLimited if too many responses of the project wait, and Unavailable if too many wait in all.
        """
        limits = self.limits.select_project(project)
        try:
            await self._store.enqueue(project, stored, request, limits=limits)
        except QueueFull as full:
            seconds = self._scheduler.estimate_seconds(full.waiting)
            if full.is_project:
                self.refusals += 1
                reason = f"background responses of this project wait: {full.waiting}"
                raise refuse_project(reason, limits.queued_setting, seconds) from None
            raise refuse_all(f"background responses wait: {full.waiting}", "background_queued", seconds) from None
        self._scheduler.announce(RunKey(project, stored.response.id))

    @property
    def count(self) -> int:
        """The number of responses that this process works on."""
        return len(self._scheduler.attempts)

    def stop_readers(self) -> None:
        """End every `follow`, because the server stops. Clients can resume the streams later or elsewhere."""
        self._stopping = True
        self._scheduler.notify_change()
        self._set_signals()
        for attempt in self._scheduler.attempts.values():
            attempt.events.notify()

    def stop(self, key: RunKey) -> None:
        """Stop the attempt at a run whose response was deleted."""
        self._scheduler.stop(key)

    async def cancel(self, key: RunKey) -> None:
        """Request the end of a run and wait until it has ended."""
        self._scheduler.cancel(key)  # before the request: the store may fail
        await self._store.request_cancel(*key)
        if self.announce_change is not None:
            self.announce_change("cancelled", key.response_id)
        self._scheduler.cancel(key)  # it may have been claimed meanwhile
        await self._wait_for_end(key)

    async def follow(self, key: RunKey, after: int) -> EventPages:
        """Yield the events after this sequence number, the stored ones and then new ones, until the response ends.

        Raises if the end cannot be read, because the server stops or the response was deleted.
        """
        # One mark is enough: it stays with the run when another process takes over.
        await self._store.mark_watched(*key)
        has_ended = False
        while not self._stopping:
            attempt = self._scheduler.attempts.get(key)
            # Read the signal before the log, so that a change during the read is not missed. Only the stored log is
            # read: an attempt may have lost its lease without knowing it, and its events would then be wrong.
            changed = self._get_signal(key) if attempt is None else attempt.events.changed
            response = None
            if attempt is None and not has_ended:
                response = await self._store.load_bare_response(*key)
                # A response that has ended before its events are read has all of them in the log.
                has_ended = _has_ended(response)
            page = await self._reader.read(key, after)
            if page is None and response is not None and not has_ended:
                page = make_page(_number_queued_events(response)[after + 1 :])
            if page is not None:
                after, is_last = page.last_number, page.is_last
                if page:
                    yield page
                del page  # it is in memory only while followers send it
                if is_last:
                    return
            elif has_ended:
                await self._check_exists(key)
                return
            else:
                await wait_for(changed, self._poll_seconds if attempt is None else None)
        raise Unavailable("The server is shutting down. The stream can be resumed later.")

    async def _check_exists(self, key: RunKey) -> None:
        if await self._store.load_bare_response(*key) is None:
            raise NotFound(f"Response with id '{key.response_id}' not found.", param="response_id")

    async def _wait_for_end(self, key: RunKey) -> None:
        # If the owner has just died, this process can end the run after the lease has expired.
        deadline = time.monotonic() + self._lease + 4 * POLL_SECONDS
        while time.monotonic() < deadline:
            changed = self._get_signal(key)
            self._scheduler.wake()
            if _has_ended(await self._store.load_bare_response(*key)):
                return
            await wait_for(changed, POLL_SECONDS)

    @property
    def _poll_seconds(self) -> float:
        return REPORTED_POLL_SECONDS if self._store.reports_changes else POLL_SECONDS

    def _get_signal(self, key: RunKey) -> asyncio.Event:
        """Return an event that is set when a response changes for which this process has no attempt."""
        if not self._store.reports_changes:
            return self._scheduler.changed
        return self._signals.setdefault(key.response_id, asyncio.Event())

    def _set_signals(self) -> None:
        while self._signals:
            self._signals.popitem()[1].set()

    def receive_change(self, kind: str, response_id: str) -> None:
        """Handle a change that the store reports (`RunQueue.on_change`)."""
        if kind == "queued":
            self._scheduler.wake()
        elif kind == "cancelled":
            for key in [key for key in self._scheduler.attempts if key.response_id == response_id]:
                self._scheduler.cancel(key)
            self._scheduler.wake()
        elif kind == "events":
            signal = self._signals.pop(response_id, None)
            if signal is not None:
                signal.set()
        elif kind == "reconnected":
            self._scheduler.wake()
            self._set_signals()


def _has_ended(response: Response | None) -> bool:
    """Return True if the response has ended or was deleted."""
    return response is None or response.status in FINAL_STATUSES


def _number_queued_events(response: Response) -> list[tuple[int, bytes]]:
    return [(event.sequence_number, encode_json_line(event)) for event in make_queued_events(response)]
