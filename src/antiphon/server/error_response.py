"""The standard error body, and the HTTP status of an error or a failed response."""

from msgspec import Struct

from antiphon.errors import (
    AntiphonError,
    InvalidRequest,
    QuotaExceeded,
    RateLimited,
    ServerError,
    StoreFull,
    StoreLost,
    StoreUnavailable,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.protocol import codec
from antiphon.protocol.response import Response, ResponseError

_STATUSES = {kind.type: kind.status for kind in (InvalidRequest, RateLimited, QuotaExceeded)}
_STORE_CODES = frozenset(kind.default_code for kind in (StoreUnavailable, StoreFull, StoreLost))
_UNAVAILABLE_CODES = ("server_overloaded", "server_shutdown", "upstream_overloaded", "upstream_unavailable")
_CODE_STATUSES = (
    {kind.default_code: kind.status for kind in (UpstreamTimeout, Unavailable)}
    | dict.fromkeys(_UNAVAILABLE_CODES, Unavailable.status)
    | dict.fromkeys(_STORE_CODES, StoreUnavailable.status)
)


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """The standard error body. All four fields are always present."""

    error: ErrorDetail


def encode_error_body(error: AntiphonError) -> bytes:
    return codec.encode(ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code)))


def make_internal_error(request_id: str) -> ServerError:
    """Return the error for an unexpected failure. The log has the cause, with the request id."""
    return ServerError(f"The server had an error. The request id is {request_id}.")


def encode_failed_response(response: Response) -> tuple[int, bytes] | None:
    """Return the HTTP status and the error body for a response that failed without output, else None.

    A failed response with output is sent as a response, with its status and its error, unless it failed because the
    store cannot be written to: then nothing was created.
    """
    if response.status != "failed":
        return None
    error = response.error or ResponseError("server_error", "The response failed.")
    if response.output and error.code not in _STORE_CODES:
        return None
    detail = ErrorDetail(error.message, error.type or "server_error", error.param, error.code)
    return find_error_status(detail.type, detail.code), codec.encode(ErrorBody(detail))


def find_error_status(kind: str, code: str | None) -> int:
    """Return the HTTP status of an error that occurred after the model started, by its type and code."""
    if kind in _STATUSES:
        return _STATUSES[kind]
    if code in _CODE_STATUSES:
        return _CODE_STATUSES[code]
    return UpstreamError.status if (code or "").startswith("upstream_") else ServerError.status
