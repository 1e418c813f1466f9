"""Signs of life on streams whose model is silent, so that clients and proxies do not give up on them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from antiphon.server.exchange import Exchange

# An event with data: the idle timers of some clients do not count comments.
BEAT = b'event: keepalive\ndata: {"type":"keepalive"}\n\n'

_LOOKS_PER_GAP = 4


class Keepalive:
    """Looks after all open streams with one timer: writing to a stream costs nothing more.

    A look compares how much each stream has sent with what it had sent before. So a sign of life comes when a stream
    has been silent for `gap` seconds, or up to a quarter longer. With no gap there are none.
    """

    def __init__(self, gap: float) -> None:
        self._gap = gap
        self._silences: dict[Exchange, _Silence] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watch(self, exchange: Exchange) -> Iterator[None]:
        """Within this block, the stream does not stay silent once it has begun."""
        if not self._gap:
            yield
            return
        loop = asyncio.get_running_loop()
        self._silences[exchange] = _Silence(exchange.sent, loop.time())
        if self._timer is None:
            self._timer = loop.call_later(self._gap / _LOOKS_PER_GAP, self._look, loop)
        try:
            yield
        finally:
            del self._silences[exchange]

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if not self._silences:
            return
        now = loop.time()
        for exchange, silence in self._silences.items():
            if exchange.is_writing or exchange.sent != silence.sent:
                silence.sent, silence.since = exchange.sent, now
            elif exchange.status and now - silence.since >= self._gap:
                exchange.start_beat(BEAT)
        self._timer = loop.call_later(self._gap / _LOOKS_PER_GAP, self._look, loop)


class _Silence:
    """How much a stream had sent when it was last seen to have sent more."""

    __slots__ = ("sent", "since")

    def __init__(self, sent: int, since: float) -> None:
        self.sent = sent
        self.since = since
