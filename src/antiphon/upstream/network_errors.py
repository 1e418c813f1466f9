"""Map the errors of aiohttp, TLS and sockets to `AntiphonError`."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from antiphon.errors import UpstreamError, UpstreamTimeout
from antiphon.upstream.error_mapping import REFUSED, make_broken_stream_error

# aiohttp raises RuntimeError for a session or connection that we closed.
NETWORK_ERRORS = (aiohttp.ClientError, OSError, RuntimeError)

_TLS_ERRORS = (aiohttp.ClientSSLError, ssl.SSLError)
# The first match counts: some later classes are bases of earlier ones.
_MESSAGES: tuple[tuple[type[Exception], type[UpstreamError], str], ...] = (
    (aiohttp.InvalidURL, UpstreamError, "The address of the upstream is not a valid URL."),
    (aiohttp.ClientConnectorDNSError, UpstreamError, "The upstream's host name could not be resolved."),
    (aiohttp.ClientConnectorError, UpstreamError, "The upstream cannot be reached."),
    (aiohttp.ConnectionTimeoutError, UpstreamTimeout, "The connection to the upstream timed out."),
    (aiohttp.SocketTimeoutError, UpstreamTimeout, "The upstream stopped sending before its answer ended."),
    (TimeoutError, UpstreamTimeout, "The upstream did not answer in time."),
    (aiohttp.ClientResponseError, UpstreamError, "The upstream's answer is not valid HTTP."),
)


@contextmanager
def mapped_network_errors() -> Iterator[None]:
    """Raise every network error in this block as an `UpstreamError`."""
    try:
        yield
    except NETWORK_ERRORS as error:
        raise map_network_error(error) from None


def map_network_error(error: Exception) -> UpstreamError:
    """Return the `UpstreamError` for a network error. Its message contains no host name or address."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = _describe_certificate_error(error)
        return UpstreamError(f"The upstream's TLS certificate is not accepted: {reason}.", code=REFUSED)
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return UpstreamError("The upstream refuses connections.")
    if isinstance(error, _TLS_ERRORS):
        return UpstreamError("The TLS handshake with the upstream failed.", code=REFUSED)
    for kind, make, message in _MESSAGES:
        if isinstance(error, kind):
            return make(message)
    if isinstance(error, aiohttp.ClientPayloadError):
        return make_broken_stream_error()
    return UpstreamError("The upstream closed the connection.")


def _describe_certificate_error(error: aiohttp.ClientConnectorCertificateError) -> str:
    """Return the reason of OpenSSL, except for a mismatch, where it contains the host name."""
    reason = getattr(error.certificate_error, "verify_message", "") or "it cannot be verified"
    return "it is for another name" if "mismatch" in reason or "not valid for" in reason else reason
