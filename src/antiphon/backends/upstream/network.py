"""Broken connections in plain words, without a word about where they led."""

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from antiphon.backends.upstream.failure import REFUSED, break_off
from antiphon.errors import UpstreamError, UpstreamTimeout


@contextmanager
def explained() -> Iterator[None]:
    """Raise every error of the network as one of ours."""
    try:
        yield
    except (aiohttp.ClientError, OSError, RuntimeError) as error:  # the last is aiohttp's for what we closed ourselves
        raise explain_network(error) from None


def explain_network(error: Exception) -> UpstreamError:
    # The order matters: an expired certificate is a failed TLS handshake, which is a failed connection.
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return UpstreamError(f"The upstream's TLS certificate is not accepted: {_judge(error)}.", code=REFUSED)
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return UpstreamError("No TLS connection to the upstream could be made.", code=REFUSED)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return UpstreamError("The upstream's name could not be resolved.")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return UpstreamTimeout("The upstream could not be connected to in time.")
    if isinstance(error, TimeoutError):
        return UpstreamTimeout("The upstream did not answer in time.")
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return UpstreamError(f"The upstream {'refuses connections' if refused else 'cannot be reached'}.")
    if isinstance(error, aiohttp.ClientPayloadError):
        return break_off()
    if isinstance(error, aiohttp.ClientResponseError):
        return UpstreamError("The upstream did not answer in proper HTTP.")
    if isinstance(error, aiohttp.InvalidURL):
        return UpstreamError("The upstream's address cannot be used.", code=REFUSED)
    return UpstreamError("The upstream broke the connection off.")


class Lifeline:
    """Ends the reading of a body whose connection is lost.

    aiohttp closes a connection over which nonsense came, but tells nobody who waits for the rest of the body.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        protocol = response.connection.protocol if response.connection is not None else None
        self._closed = protocol.closed if protocol is not None else None
        if self._closed is not None:
            self._closed.add_done_callback(self._note_loss)
        else:
            self._end()

    def release(self) -> None:
        """The body was read, or is no longer wanted."""
        if self._closed is not None:
            self._closed.remove_done_callback(self._note_loss)
            # The connection may live on, and its end must then be looked at, by one alone.
            self._closed.remove_done_callback(_look)
            self._closed.add_done_callback(_look)

    def _note_loss(self, closed: "asyncio.Future[None]") -> None:
        _look(closed)
        self._end()

    def _end(self) -> None:
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(aiohttp.ClientPayloadError())


def _look(closed: "asyncio.Future[None]") -> None:
    """Take notice of a future's error, which asyncio would log otherwise."""
    if not closed.cancelled():
        closed.exception()


def _judge(error: aiohttp.ClientConnectorCertificateError) -> str:
    """What is wrong with a certificate. A mismatch is told with the name of the host, so not in its own words."""
    reason = getattr(error.certificate_error, "verify_message", "") or "it cannot be verified"
    return "it is for another name" if "mismatch" in reason or "not valid for" in reason else reason
