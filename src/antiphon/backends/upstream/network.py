"""Broken connections in plain words, without a word about where they led."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from antiphon.backends.upstream.failure import REFUSED, break_off
from antiphon.errors import UpstreamError, UpstreamTimeout

# RuntimeError is what aiohttp raises for what we closed ourselves.
NETWORK_ERRORS = (aiohttp.ClientError, OSError, RuntimeError)


@contextmanager
def explained() -> Iterator[None]:
    """Raise every error of the network as one of ours."""
    try:
        yield
    except NETWORK_ERRORS as error:
        raise explain_network(error) from None


def explain_network(error: Exception) -> UpstreamError:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return UpstreamError(f"The upstream's TLS certificate is not accepted: {_judge(error)}.", code=REFUSED)
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return UpstreamError("The upstream refuses connections.")
    if isinstance(error, _TLS_ERRORS):
        return UpstreamError("No TLS connection to the upstream could be made.", code=REFUSED)
    for kind, make, message in _WORDS:
        if isinstance(error, kind):
            return make(message)
    return break_off() if isinstance(error, aiohttp.ClientPayloadError) else UpstreamError(_BROKEN)


def _judge(error: aiohttp.ClientConnectorCertificateError) -> str:
    """What is wrong with a certificate. A mismatch is told with the name of the host, so not in its own words."""
    reason = getattr(error.certificate_error, "verify_message", "") or "it cannot be verified"
    return "it is for another name" if "mismatch" in reason or "not valid for" in reason else reason


_TLS_ERRORS = (aiohttp.ClientSSLError, ssl.SSLError)
_BROKEN = "The upstream broke the connection off."
# The first that fits: later ones include earlier ones.
_WORDS: tuple[tuple[type[Exception], type[UpstreamError], str], ...] = (
    (aiohttp.ClientConnectorDNSError, UpstreamError, "The upstream's name could not be resolved."),
    (aiohttp.ClientConnectorError, UpstreamError, "The upstream cannot be reached."),
    (aiohttp.ConnectionTimeoutError, UpstreamTimeout, "The upstream could not be connected to in time."),
    (aiohttp.SocketTimeoutError, UpstreamTimeout, "The upstream fell silent before its answer ended."),
    (TimeoutError, UpstreamTimeout, "The upstream did not answer in time."),
    (aiohttp.ClientResponseError, UpstreamError, "The upstream did not answer in proper HTTP."),
)
