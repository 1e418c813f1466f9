"""How an error looks on the wire, and when a failed response is one."""

from msgspec import Struct

from antiphon.errors import AntiphonError
from antiphon.protocol import codec
from antiphon.protocol.response import Response


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


def describe_failed(response: Response) -> bytes | None:
    """The error body for a response that failed with nothing to show; None for every other response.

    A failed response that has output is still an answer: the client gets it, with its status and its error.
    """
    if response.status != "failed" or response.output:
        return None
    error = response.error
    if error is None:
        return codec.encode(ErrorBody(ErrorDetail("The response failed.", "server_error", None, "server_error")))
    return codec.encode(ErrorBody(ErrorDetail(error.message, error.type or "server_error", error.param, error.code)))
