"""The write timeout: connections of clients that stop reading are aborted, because they hold up a model."""

import asyncio

# Time without any progress while data waits for the client.
_WRITE_TIMEOUT_SECONDS = 300.0


class WriteTimeoutMixin(asyncio.Protocol):
    """A protocol mixin that aborts the connection of a client that has stopped reading. Slow readers are unaffected."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _write_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_write_timer()
        super().connection_lost(exc)

    def _start_write_timer(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(_WRITE_TIMEOUT_SECONDS, self._check_progress, unread)

    def _check_progress(self, unread: int) -> None:
        """Abort unless the client has read something since the timer started.

        A large response is written at once, and writing resumes only when nearly all of it has been read.
        """
        if self.transport.get_write_buffer_size() < unread:
            self._start_write_timer()
        else:
            self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
