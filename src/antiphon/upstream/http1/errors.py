"""Errors of the HTTP client. Their texts may contain host names, so `network_errors` gives them new ones."""


class HttpError(Exception):
    """Base of all errors of this package."""


class InvalidUrl(HttpError):
    """The URL has no host, a scheme other than http and https, or characters that a URL cannot have."""


class InvalidHeader(HttpError):
    """A request header that could change the meaning of the request, such as one with a line break."""


class ConnectError(HttpError):
    """No connection could be made. `os_error` is the cause."""

    def __init__(self, os_error: OSError) -> None:
        super().__init__(str(os_error))
        self.os_error = os_error


class ResolveError(ConnectError):
    """The host name has no address."""


class TlsError(ConnectError):
    """The TLS handshake failed."""


class CertificateError(TlsError):
    """The certificate of the server is not accepted."""


class ProxyRefused(HttpError):
    """The proxy does not make a connection to the server."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class ConnectTimeout(HttpError):
    """The connection was not made in time."""


class DeadlineExceeded(HttpError):
    """The deadline of a request has passed."""


class IdleTimeout(HttpError):
    """No bytes of a body arrived for too long."""


class InvalidResponse(HttpError):
    """The head of a response is not valid HTTP, or too large."""


class Disconnected(HttpError):
    """The connection was lost before the head of a response."""


class IncompleteBody(HttpError):
    """The connection was lost within a body, or the rest of the body is invalid."""
