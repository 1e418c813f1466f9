"""How an error looks on the wire, and when a failed response is one."""

from msgspec import Struct

from antiphon.errors import (
    AntiphonError,
    InvalidRequest,
    RateLimited,
    ServerError,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.protocol import codec
from antiphon.protocol.response import Response, ResponseError

_STATUSES = {kind.type: kind.status for kind in (InvalidRequest, RateLimited)}
_CODE_STATUSES = {kind.default_code: kind.status for kind in (UpstreamTimeout, Unavailable)} | {
    "upstream_overloaded": Unavailable.status,
    "upstream_unavailable": Unavailable.status,
}


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """All four keys are always there."""

    error: ErrorDetail


def describe(error: AntiphonError) -> bytes:
    """The body of an error answer."""
    return codec.encode(ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code)))


def describe_failed(response: Response) -> tuple[int, bytes] | None:
    """The status and error body for a response that failed with nothing to show; None for every other response.

    A failed response that has output is still an answer: the client gets it, with its status and its error.
    """
    if response.status != "failed" or response.output:
        return None
    error = response.error or ResponseError("server_error", "The response failed.")
    detail = ErrorDetail(error.message, error.type or "server_error", error.param, error.code)
    return find_status(detail.type, detail.code), codec.encode(ErrorBody(detail))


def find_status(kind: str, code: str | None) -> int:
    """The status that an error would have been answered with, had it been known before the model began."""
    if kind in _STATUSES:
        return _STATUSES[kind]
    if code in _CODE_STATUSES:
        return _CODE_STATUSES[code]
    return UpstreamError.status if (code or "").startswith("upstream_") else ServerError.status
