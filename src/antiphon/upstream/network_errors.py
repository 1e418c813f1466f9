"""Map the errors of the HTTP client to `AntiphonError`."""

from antiphon.errors import UpstreamError, UpstreamTimeout
from antiphon.upstream.error_mapping import REFUSED, make_broken_stream_error
from antiphon.upstream.http1.errors import (
    CertificateError,
    ConnectError,
    ConnectTimeout,
    DeadlineExceeded,
    HttpError,
    IdleTimeout,
    IncompleteBody,
    InvalidHeader,
    InvalidResponse,
    InvalidUrl,
    ProxyRefused,
    ResolveError,
    TlsError,
)


class Unreachable(UpstreamError):
    """No connection to the upstream. The content of a request cannot be the cause."""


class ConnectTimedOut(UpstreamTimeout, Unreachable):
    """The connection to the upstream was not made in time."""


# The first match counts: some later classes are bases of earlier ones.
_MESSAGES: tuple[tuple[type[HttpError], type[UpstreamError], str], ...] = (
    (InvalidUrl, UpstreamError, "The address of the upstream is not a valid URL."),
    (ResolveError, Unreachable, "The upstream's host name could not be resolved."),
    (ConnectError, Unreachable, "The upstream cannot be reached."),
    (ConnectTimeout, ConnectTimedOut, "The connection to the upstream timed out."),
    (IdleTimeout, UpstreamTimeout, "The upstream stopped sending before its answer ended."),
    (DeadlineExceeded, UpstreamTimeout, "The upstream did not answer in time."),
    (InvalidResponse, UpstreamError, "The upstream's answer is not valid HTTP."),
)


def map_network_error(error: HttpError) -> UpstreamError:
    """Return the `UpstreamError` for an error of the client. Its message contains no host name or address."""
    if isinstance(error, CertificateError):
        reason = _describe_certificate_error(error)
        return UpstreamError(f"The upstream's TLS certificate is not accepted: {reason}.", code=REFUSED)
    if isinstance(error, TlsError):
        return UpstreamError("The TLS handshake with the upstream failed.", code=REFUSED)
    if isinstance(error, ConnectError) and isinstance(error.os_error, ConnectionRefusedError):
        return Unreachable("The upstream refuses connections.")
    if isinstance(error, ProxyRefused):
        return UpstreamError(f"The proxy refused to connect to the upstream (status {error.status}).", code=REFUSED)
    if isinstance(error, InvalidHeader):
        return UpstreamError("The request to the upstream has an invalid header.", code=REFUSED)
    for kind, make, message in _MESSAGES:
        if isinstance(error, kind):
            return make(message)
    if isinstance(error, IncompleteBody):
        return make_broken_stream_error()
    return UpstreamError("The upstream closed the connection.")


def _describe_certificate_error(error: CertificateError) -> str:
    """Return the reason of OpenSSL, except for a mismatch, where it contains the host name."""
    reason = getattr(error.os_error, "verify_message", "") or "it cannot be verified"
    return "it is for another name" if "mismatch" in reason or "not valid for" in reason else reason
