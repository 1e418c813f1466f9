"""Waiting for clients that read slowly, but not for ever: one that has stopped holds up a model."""

import asyncio

# From when there is no more room for what it should read until there is some again.
_SLOWEST_READER_SECONDS = 300.0


class Patience(asyncio.Protocol):
    """A part of a protocol: it breaks the connection of a client that reads nothing any more."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _stall: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(_SLOWEST_READER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
