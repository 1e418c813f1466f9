"""Waiting for clients that read slowly, but not for ever for one that has stopped: it holds up a model."""

import asyncio

# How long a client may read nothing at all while there is something for it to read.
_LONGEST_STALL_SECONDS = 300.0


class StallGuard(asyncio.Protocol):
    """A part of a protocol: it breaks the connection of a client that reads nothing any more."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(_LONGEST_STALL_SECONDS, self._look, unread)

    def _look(self, unread: int) -> None:
        """A large answer is written at once, and there is no room again until nearly all of it has been read."""
        if self.transport.get_write_buffer_size() < unread:
            self._wait()
        else:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
