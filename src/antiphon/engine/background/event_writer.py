"""The event log of a background run. Events are stored before any reader gets them.

The first event is flushed at once. Later ones wait for the next flush, which writes all of them together. All runs of
a process flush at the same times, so that one transaction has the events of all. An event that a reader gets is
stored, so it can always be read again under the same number. The last events are saved together with the final
response, by `Attempt.save`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from antiphon import offload
from antiphon.engine.background.change_signal import ChangeSignal
from antiphon.engine.background.recent_events import RecentEvents
from antiphon.errors import ServerError, StoreUnavailable
from antiphon.protocol import codec, events
from antiphon.protocol.events import Event
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response, ResponseError
from antiphon.protocol.unions import Unknown
from antiphon.store.base import EventLog, LeaseLost
from antiphon.stream.deltas import Failure
from antiphon.stream.sse import encode_json_line

logger = logging.getLogger(__name__)

# Time between flushes: long enough to batch several tokens, too short for a reader to notice.
FLUSH_SECONDS = 0.04
# Pause after a flush that failed.
RETRY_SECONDS = 1.0


class LoggedEvents(NamedTuple):
    """The events of earlier attempts, up to the first one that cannot be read, and the next sequence number."""

    events: list[Event | Unknown]
    next: int

    @property
    def is_damaged(self) -> bool:
        return len(self.events) < self.next


def read_log(rows: Iterable[tuple[int, bytes]]) -> LoggedEvents:
    """Decode the rows of the store: the sequence number and payload of each event."""
    decoded: list[Event | Unknown] = []
    following = 0
    for number, payload in rows:
        if number == len(decoded):
            with suppress(ValueError):  # the log then has a gap
                decoded.append(codec.decode_event(payload))
        following = number + 1
    return LoggedEvents(decoded, following)


def make_queued_events(response: Response) -> list[Event]:
    """Return the first events of a queued response.

    They depend on the stored response alone, so they are the same before and during the run.
    """
    queued = msgspec.structs.replace(response, status="queued", output=[])
    return [events.Created(0, queued), events.Queued(1, queued)]


def end_log(response: Response, log: LoggedEvents, reason: Failure | None) -> tuple[Response, list[Event]]:
    """Return the final response and last events of a run whose log cannot be continued.

    The response has the completed output items of the log. Without a reason, it is cancelled.
    """
    last = make_queued_events(response) if log.next == 0 else []
    done = list_finished_items(log.events)
    if reason is None:
        ended = msgspec.structs.replace(response, status="cancelled", output=done)
        return ended, [*last, events.Incomplete(log.next + len(last), ended)]
    error = ResponseError(reason.code, reason.message, reason.param, reason.type)
    ended = msgspec.structs.replace(response, status="failed", output=done, error=error)
    payload = events.ErrorPayload(reason.type, reason.code, reason.message, reason.param)
    number = log.next + len(last)
    return ended, [*last, events.Error(number, payload), events.Failed(number + 1, ended)]


def list_finished_items(logged: Iterable[Event | Unknown]) -> list[Item | Unknown]:
    """Return the finished output items, in the order of the output."""
    done = [event for event in logged if isinstance(event, events.OutputItemDone)]
    return [event.item for event in sorted(done, key=lambda event: event.output_index)]


class EventWriter:
    """Writes the events of a run, numbered from 0.

    `changed` is notified when the log has grown or is complete.
    """

    def __init__(self, store: EventLog, *, project: str, response_id: str, owner: str) -> None:
        self._store = store
        self._project = project
        self._response_id = response_id
        self._owner = owner
        self._written = 0
        self._recovered = 0
        self._durable = 0
        self._pending: list[bytes] = []
        self.changed = ChangeSignal()
        self._flush: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._recent: RecentEvents | None = None
        self._announce: Callable[[int], None] | None = None
        self._is_recovered = False
        self.ending = False

    def recover(self, count: int) -> None:
        """Begin after the events that an earlier attempt has stored. They are not written again."""
        self._recovered = self._durable = count
        self._is_recovered = True
        self.changed.notify()

    def record_recent(self, *, page_bytes: int) -> RecentEvents:
        """Return the events in memory. They are recorded from the first call on.

        The run must be marked as watched before: then events that this owner stores from now on never change.
        """
        if self._recent is None:
            self._recent = RecentEvents(page_bytes=page_bytes)
        return self._recent

    def may_reach(self, number: int) -> bool:
        """Return True if the stored log may have an event of this number. After `recover`, the answer is certain."""
        return not self._is_recovered or number < self._durable

    def announce_to(self, announce: Callable[[int], None]) -> None:
        """Call this function with the number of the last stored event, now and after each flush."""
        self._announce = announce
        self._announce_last()

    @contextmanager
    def record_end(self, last: tuple[int, list[bytes]] | None) -> Iterator[None]:
        """Record the last events, if the block stores them."""
        recent = self._recent
        yield
        if last is not None:
            self._record(recent, *last)
            self._announce_last()

    def write(self, batch: Sequence[Event | Unknown]) -> None:
        """Add the next events. Events that an earlier attempt has stored are skipped."""
        self._pending += self._encode_new(batch)
        self._written += len(batch)
        if self._flush is not None and self._flush.done():
            self._flush.result()  # raises the error of the last flush
        self._flush_soon()

    async def prepare_end(self, last: Sequence[Event | Unknown]) -> tuple[int, list[bytes]]:
        """Return the events that are not stored yet, the last ones included, with the number of the first.

        The caller stores them together with the final response, and then calls `end`.
        """
        self.ending = True
        if self._flush is not None:
            await self._flush
        encoded = await offload.run(self._encode_new, last)
        return self._durable, self._pending + encoded

    def end(self) -> None:
        """Close the log. Events that were not flushed are discarded."""
        if self._pause is not None:
            self._pause.cancel()
        self._pending = []
        self.ending = True
        self.changed.notify()

    def _encode_new(self, batch: Sequence[Event | Unknown]) -> list[bytes]:
        known = max(0, self._recovered - self._written)
        return [encode_json_line(event) for event in batch[known:]]

    def _flush_soon(self) -> None:
        if self._pending and not self.ending and self._pause is None and (self._flush is None or self._flush.done()):
            self._flush = asyncio.get_running_loop().create_task(self._flush_pending())
            self._flush.add_done_callback(_retrieve_error)

    async def _flush_pending(self) -> None:
        batch, recent = tuple(self._pending), self._recent
        loop = asyncio.get_running_loop()
        is_stored = False
        try:
            is_owner = await self._store.append_events(
                self._project, self._response_id, self._durable, batch, owner=self._owner
            )
        except StoreUnavailable:
            pass  # nothing is lost: the events stay pending, and the store has logged the failure
        except ServerError:
            logger.exception("events could not be stored", extra={"response_id": self._response_id})
        else:
            if not is_owner:
                raise LeaseLost(f"The run of {self._response_id} belongs to another process now.")
            is_stored = True
            del self._pending[: len(batch)]
            self._record(recent, self._durable, batch)
            self.changed.notify()
            self._announce_last()
        self._pause = loop.call_later(_choose_pause(loop.time()) if is_stored else RETRY_SECONDS, self._resume)

    def _announce_last(self) -> None:
        if self._announce is not None and self._durable:
            self._announce(self._durable - 1)

    def _record(self, recent: RecentEvents | None, first: int, payloads: Sequence[bytes]) -> None:
        """Record stored events. `recent` is None if nobody followed the run when their write began."""
        if recent is not None:
            recent.add(first, payloads)
        self._durable = first + len(payloads)

    def _resume(self) -> None:
        self._pause = None
        self._flush_soon()


def _choose_pause(now: float) -> float:
    """Return the time until the next flush. All runs of a process flush at the same times."""
    pause = FLUSH_SECONDS - now % FLUSH_SECONDS
    return pause if pause > FLUSH_SECONDS / 4 else pause + FLUSH_SECONDS


def _retrieve_error(flush: asyncio.Task[None]) -> None:
    """Mark the error as retrieved. The next `write` raises it; after the end of the run it has no meaning."""
    if not flush.cancelled():
        flush.exception()
