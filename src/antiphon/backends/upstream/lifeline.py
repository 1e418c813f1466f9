"""The reading of a body, which ends when its connection does."""

import asyncio

import aiohttp

from antiphon.backends.upstream.network import NETWORK_ERRORS, explain_network


class Lifeline:
    """Ends the reading of a body whose connection is lost, or silent for too long.

    aiohttp closes a connection over which nonsense came, but tells nobody who waits for the rest of the body. And a
    timer that looks now and then at how long somebody has been waiting costs a tenth of a time-out around each read.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since: float | None = None
        protocol = response.connection.protocol if response.connection is not None else None
        self._closed = protocol.closed if protocol is not None else None
        if self._closed is not None:
            self._closed.add_done_callback(self._note_loss)
        else:
            self._end(aiohttp.ClientPayloadError())

    async def read(self) -> bytes:
        """What has come since the last time, as soon as there is something; nothing at the end."""
        self._waiting_since = self._loop.time()
        try:
            return await self._content.readany()
        except NETWORK_ERRORS as error:
            raise explain_network(error) from None
        finally:
            self._waiting_since = None

    def limit_silence(self, seconds: float) -> None:
        """From now on, a read that has to wait for so long fails."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look_at_silence, seconds)

    def _look_at_silence(self, seconds: float) -> None:
        left = seconds
        if self._waiting_since is not None:
            left += self._waiting_since - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look_at_silence, seconds)
        else:
            self._end(aiohttp.SocketTimeoutError())

    def release(self) -> None:
        """The body was read, or is no longer wanted."""
        if self._timer is not None:
            self._timer.cancel()
        if self._closed is not None:
            self._closed.remove_done_callback(self._note_loss)
            # The connection may live on, and its end must then be looked at, by one alone.
            self._closed.remove_done_callback(_look)
            self._closed.add_done_callback(_look)

    def _note_loss(self, closed: "asyncio.Future[None]") -> None:
        _look(closed)
        self._end(aiohttp.ClientPayloadError())

    def _end(self, error: Exception) -> None:
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(error)


def _look(closed: "asyncio.Future[None]") -> None:
    """Take notice of a future's error, which asyncio would log otherwise."""
    if not closed.cancelled():
        closed.exception()
