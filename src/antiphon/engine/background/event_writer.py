"""The events of one background run: durable first, shown after.

Writing is cheap: events wait in memory while a flush is under way, and the next flush takes them all at once. Readers
are shown what the store has, so that it can be read again under the same number, always. `news` says when to look.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from antiphon.errors import ServerError
from antiphon.protocol import codec, events
from antiphon.protocol.events import Event
from antiphon.protocol.response import Response, ResponseError
from antiphon.protocol.unions import Unknown
from antiphon.store.base import EventLog, LeaseLost
from antiphon.stream.deltas import Failure
from antiphon.stream.sse import encode_json_line

logger = logging.getLogger(__name__)

# Between flushes: long enough to take several tokens at once, too short for a reader to notice.
FLUSH_SECONDS = 0.02
# After a flush that failed.
RETRY_SECONDS = 1.0


class Log(NamedTuple):
    """What earlier attempts have left: the events from the first on, as far as they can be read without a gap, and the
    number that comes next."""

    told: list[Event | Unknown]
    next: int

    @property
    def damaged(self) -> bool:
        return len(self.told) < self.next


def read_log(rows: Iterable[tuple[int, bytes]]) -> Log:
    """From what the store has: each event with its number."""
    told: list[Event | Unknown] = []
    following = 0
    for number, payload in rows:
        if number == len(told):
            with suppress(ValueError):  # then a gap follows
                told.append(codec.decode_event(payload))
        following = number + 1
    return Log(told, following)


def announce(response: Response) -> list[Event]:
    """The first events of a response that waits in the queue.

    They follow from the stored response alone, so that whoever tells them, before the run or in it, tells the same.
    """
    queued = msgspec.structs.replace(response, status="queued", output=[])
    return [events.Created(0, queued), events.Queued(1, queued)]


def end_log(response: Response, log: Log, reason: Failure | None) -> tuple[Response, list[Event]]:
    """The end of a response whose log cannot be gone on with, and what is left to tell of it.

    It has what the log says was done. Without a reason, it is cancelled.
    """
    last = announce(response) if log.next == 0 else []
    done = [event.item for event in log.told if isinstance(event, events.OutputItemDone)]
    if reason is None:
        ended = msgspec.structs.replace(response, status="cancelled", output=done)
        return ended, [*last, events.Incomplete(log.next + len(last), ended)]
    error = ResponseError(reason.code, reason.message, reason.param, reason.type)
    ended = msgspec.structs.replace(response, status="failed", output=done, error=error)
    payload = events.ErrorPayload(reason.type, reason.code, reason.message, reason.param)
    number = log.next + len(last)
    return ended, [*last, events.Error(number, payload), events.Failed(number + 1, ended)]


class Journal:
    """A run's events, numbered from 0. `news` is set, and replaced, when the log has grown or nothing more comes."""

    def __init__(self, store: EventLog, *, project: str, response_id: str, owner: str) -> None:
        self._store = store
        self._project = project
        self._response_id = response_id
        self._owner = owner
        self._written = 0
        self._recovered = 0
        self._durable = 0
        self._pending: list[bytes] = []
        self.news = asyncio.Event()
        self._flush: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None
        self.ending = False

    def recover(self, count: int) -> None:
        """Begin after the events that an earlier attempt has made durable: they stay as they are."""
        self._recovered = self._durable = count

    def write(self, batch: Sequence[Event | Unknown]) -> None:
        """Take in the events that come next. Those that an earlier attempt has told already are passed over."""
        self._pending += self._encode_new(batch)
        self._written += len(batch)
        if self._flush is not None and self._flush.done():
            self._flush.result()  # raises what went wrong
        self._flush_soon()

    async def prepare_end(self, last: Sequence[Event | Unknown]) -> tuple[int, list[bytes]]:
        """Everything that is not durable yet, the last events included, with the number of the first. The caller keeps
        it together with the final response, and then calls `end`."""
        self.ending = True
        if self._flush is not None:
            await self._flush
        return self._durable, self._pending + self._encode_new(last)

    def end(self) -> None:
        """Nothing comes any more. What was not flushed is forgotten."""
        if self._pause is not None:
            self._pause.cancel()
        self._pending = []
        self.ending = True
        self.nudge()

    def nudge(self) -> None:
        """Wake everyone who waits: there is something to look at."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    def _encode_new(self, batch: Sequence[Event | Unknown]) -> list[bytes]:
        known = max(0, self._recovered - self._written)
        return [encode_json_line(event) for event in batch[known:]]

    def _flush_soon(self) -> None:
        if self._pending and not self.ending and self._pause is None and (self._flush is None or self._flush.done()):
            self._flush = asyncio.get_running_loop().create_task(self._flush_pending())
            self._flush.add_done_callback(_heed)

    async def _flush_pending(self) -> None:
        batch = tuple(self._pending)
        pause = FLUSH_SECONDS
        try:
            kept = await self._store.append_events(
                self._project, self._response_id, self._durable, batch, owner=self._owner
            )
        except ServerError:  # nothing is lost yet: what could not be kept waits with what comes
            logger.exception("events could not be stored", extra={"response_id": self._response_id})
            pause = RETRY_SECONDS
        else:
            if not kept:
                raise LeaseLost(f"The run of {self._response_id} belongs to another process now.")
            del self._pending[: len(batch)]
            self._durable += len(batch)
            self.nudge()
        self._pause = asyncio.get_running_loop().call_later(pause, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._flush_soon()


def _heed(flush: asyncio.Task[None]) -> None:
    """Whoever writes next is told of a failure. If the run has ended, nobody does, and nothing is amiss."""
    if not flush.cancelled():
        flush.exception()
