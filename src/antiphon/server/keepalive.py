"""Signs of life on streams whose model is silent, so that clients and proxies do not give up on them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from antiphon.protocol.events import Event
from antiphon.protocol.unions import Unknown

_LOOKS_PER_GAP = 4


class Stream(Protocol):
    """What is looked after: how much it has sent, and whether some of that waits for its reader."""

    sent: int

    @property
    def is_writing(self) -> bool: ...

    def start_beat(self, number: int) -> None:
        """Send a sign of life, without waiting for it to be read."""


class Pulse:
    """A stream as it was last seen. `last` is its last event, or the number of one that an earlier stream sent."""

    __slots__ = ("last", "sent", "since")

    def __init__(self, sent: int, since: float, last: Event | Unknown | int | None) -> None:
        self.sent = sent
        self.since = since
        self.last = last


class Keepalive:
    """Looks after all open streams with one timer: writing to a stream costs next to nothing more.

    A look compares how much each stream has sent with what it had sent before. So a sign of life comes when a stream
    has been silent for `gap` seconds, or up to a quarter longer. With no gap there are none.
    """

    def __init__(self, gap: float) -> None:
        self._gap = gap
        self._pulses: dict[Stream, Pulse] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watch(self, stream: Stream, *, after: int | None = None) -> Iterator[Pulse]:
        """Within this block, the stream does not stay silent once it has begun.

        It has when the block says so by setting the pulse's `last`, or if it goes on `after` an event of another one.
        """
        loop = asyncio.get_running_loop()
        pulse = Pulse(stream.sent, loop.time(), after)
        if not self._gap:
            yield pulse
            return
        self._pulses[stream] = pulse
        if self._timer is None:
            self._timer = loop.call_later(self._gap / _LOOKS_PER_GAP, self._look, loop)
        try:
            yield pulse
        finally:
            del self._pulses[stream]

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if not self._pulses:
            return
        now = loop.time()
        for stream, pulse in self._pulses.items():
            if stream.is_writing or stream.sent != pulse.sent:
                pulse.sent, pulse.since = stream.sent, now
            elif pulse.last is not None and now - pulse.since >= self._gap:
                stream.start_beat(_number(pulse.last))
        self._timer = loop.call_later(self._gap / _LOOKS_PER_GAP, self._look, loop)


def encode_beat(number: int) -> bytes:
    """An event with data, because the idle timers of some clients do not count comments.

    It repeats the number of the event before it: clients take the last number they saw as the place to go on from.
    """
    return b"event: keepalive\ndata: %b\n\n" % encode_beat_line(number)


def encode_beat_line(number: int) -> bytes:
    """The event's JSON alone."""
    return b'{"type":"keepalive","sequence_number":%d}' % number


class _Numbered(msgspec.Struct):
    sequence_number: int = 0


def _number(last: Event | Unknown | int) -> int:
    if isinstance(last, Unknown):
        return msgspec.json.decode(last.raw, type=_Numbered).sequence_number
    return last if isinstance(last, int) else last.sequence_number
