"""Keepalive events on idle streams, so that clients and proxies do not time out while a model is silent.

The interval is the setting `keepalive_seconds`.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from antiphon.protocol.events import Event
from antiphon.protocol.unions import Unknown

EncodeKeepalive = Callable[[int], bytes]
"""Encodes a keepalive for a stream. The argument is the sequence number of the last event."""

_CHECKS_PER_INTERVAL = 4


class KeepaliveStream(Protocol):
    """A stream that can be kept alive."""

    bytes_sent: int

    @property
    def is_writing(self) -> bool:
        """True while data waits for the client to read."""

    def send_keepalive(self, payload: bytes) -> None:
        """Send an encoded keepalive without waiting for the client to read it."""


class StreamActivity:
    """The state of a stream at the last check.

    `last_event` is the last event sent, or its sequence number if another stream sent it. None: nothing was sent yet.
    """

    __slots__ = ("bytes_sent", "encode", "last_event", "since")

    def __init__(
        self, bytes_sent: int, since: float, last_event: Event | Unknown | int | None, encode: EncodeKeepalive
    ) -> None:
        self.bytes_sent = bytes_sent
        self.since = since
        self.last_event = last_event
        self.encode = encode


class Keepalive:
    """Sends keepalive events on all open streams, with one timer for all: a write to a stream costs nothing extra.

    A check compares the number of bytes that a stream has sent with the number at the previous check. So a keepalive
    event comes after `interval` idle seconds, or up to a quarter later. An interval of 0 disables them.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._streams: dict[KeepaliveStream, StreamActivity] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watch(
        self, stream: KeepaliveStream, encode: EncodeKeepalive | None, *, after: int | None = None
    ) -> Iterator[StreamActivity]:
        """Keep the stream alive within this block, once it has started. Without `encode`, send nothing.

        It has started when the block sets `last_event`, or if it continues `after` an event of an earlier stream.
        """
        loop = asyncio.get_running_loop()
        activity = StreamActivity(stream.bytes_sent, loop.time(), after, encode or encode_keepalive)
        if not self._interval or encode is None:
            yield activity
            return
        self._streams[stream] = activity
        if self._timer is None:
            self._timer = loop.call_later(self._interval / _CHECKS_PER_INTERVAL, self._check, loop)
        try:
            yield activity
        finally:
            del self._streams[stream]

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if not self._streams:
            return
        now = loop.time()
        for stream, activity in self._streams.items():
            if stream.is_writing or stream.bytes_sent != activity.bytes_sent:
                activity.bytes_sent, activity.since = stream.bytes_sent, now
            elif activity.last_event is not None and now - activity.since >= self._interval:
                stream.send_keepalive(activity.encode(_find_number(activity.last_event)))
        self._timer = loop.call_later(self._interval / _CHECKS_PER_INTERVAL, self._check, loop)


def encode_keepalive_comment(number: int) -> bytes:
    """Return a comment of an event stream: Open Responses defines no keepalive event, and comments are not events."""
    return b": keepalive\n\n"


def encode_keepalive(number: int) -> bytes:
    """Return a keepalive event as a server-sent event.

    It has data, because the idle timers of some clients do not count comments. It repeats the sequence number of the
    event before it: clients resume after the last number that they received.
    """
    return b"event: keepalive\ndata: %b\n\n" % encode_keepalive_json(number)


def encode_keepalive_json(number: int) -> bytes:
    """Return the JSON of a keepalive event."""
    return b'{"type":"keepalive","sequence_number":%d}' % number


class _NumberedEvent(msgspec.Struct):
    sequence_number: int = 0


def _find_number(last_event: Event | Unknown | int) -> int:
    if isinstance(last_event, Unknown):
        return msgspec.json.decode(last_event.raw, type=_NumberedEvent).sequence_number
    return last_event if isinstance(last_event, int) else last_event.sequence_number
