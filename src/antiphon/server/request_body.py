"""Reading and decoding of request bodies, within the limits of the server."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from antiphon.config.settings import Settings
from antiphon.errors import BodyTooLarge, InvalidRequest
from antiphon.offload import LARGE_BYTES, mark_large, run_in_thread
from antiphon.protocol.body_size import has_more_values
from antiphon.protocol.codec import Decoded
from antiphon.server.body_budget import FREE_BYTES, BodyBudget
from antiphon.server.http import ClientDisconnected, HttpRequest

T = TypeVar("T")

_NOT_JSON = (b"application/x-www-form-urlencoded", b"multipart/")
# Python refuses to convert very long numbers. A longer number counts as this length, which exceeds every limit.
_MAX_LENGTH_DIGITS = 18
_ANY_LENGTH = 10**_MAX_LENGTH_DIGITS


async def read_json_body(http_request: HttpRequest, decode: Callable[[bytes], Decoded[T]], settings: Settings) -> T:
    """Read and decode the body of a request. Add a warning about unknown fields."""
    body = await read_body(http_request, settings.max_body_bytes)
    decoded = await decode_body(decode, body, max_values=settings.max_body_values)
    http_request.warn_ignored(decoded.ignored)
    return decoded.body


async def read_body(http_request: HttpRequest, limit: int) -> bytes:
    """Return the whole body.

    Raises BodyTooLarge as soon as the declared or the received length exceeds the limit, and Unavailable if the budget
    for bodies is exhausted. A large body takes its share of the budget until `HttpRequest.release_body`.
    """
    declared = _check_headers(http_request.headers, limit)
    budget = http_request.body_budget
    if budget is not None and declared > FREE_BYTES:  # smaller ones always fit
        budget.check(declared, http_request.project)
    whole = http_request.take_body()
    first, more = (whole, False) if whole is not None else read_message(await http_request.receive())
    if len(first) > limit:
        raise _too_large(limit)
    return (
        await _read_rest(http_request, bytearray(first), limit, more=more) if more or len(first) > FREE_BYTES else first
    )


async def _read_rest(http_request: HttpRequest, whole: bytearray, limit: int, *, more: bool) -> bytes:
    task = asyncio.current_task()
    assert task is not None
    budget = http_request.body_budget or BodyBudget(limit)
    share = http_request.body_share = budget.open(task.cancel, project=http_request.project)
    try:
        while True:
            if not share.resize(len(whole)):
                raise budget.make_error()
            if not more:
                break
            body, more = read_message(await http_request.receive())
            if len(whole) + len(body) > limit:
                raise _too_large(limit)
            whole += body
    except BaseException as error:
        http_request.release_body()
        if not isinstance(error, asyncio.CancelledError) or not share.dropped:
            raise
        task.uncancel()
        raise budget.make_error() from None
    share.hold()
    if not share.counted:  # a small body that arrived in parts
        http_request.release_body()
    return bytes(whole)


def read_message(message: Mapping[str, Any]) -> tuple[bytes, bool]:
    """Return a part of the body, and True if more follows. Raises ClientDisconnected."""
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return message.get("body", b""), message.get("more_body", False)


def _check_headers(headers: dict[bytes, bytes], limit: int) -> int:
    """Refuse forms, compressed and too large bodies. Return the declared length, or 0 if there is none.

    Other content types are accepted: clients send JSON with a wrong type.
    """
    if headers.get(b"content-type", b"").lower().startswith(_NOT_JSON):
        raise InvalidRequest(
            "The body must be JSON: send 'Content-Type: application/json'.", code="invalid_content_type"
        )
    declared = read_declared_length(headers)
    if declared > limit:
        raise _too_large(limit)
    return declared


def read_declared_length(headers: Mapping[bytes, bytes]) -> int:
    """Return the declared length of a body, or 0 if there is none. Raises InvalidRequest for a compressed body."""
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise InvalidRequest(
            "The body must not be compressed: send no Content-Encoding.", code="invalid_content_encoding"
        )
    length = headers.get(b"content-length", b"0")
    if not length.isdigit():
        raise InvalidRequest("The header Content-Length must be a number.", code="invalid_header")
    return int(length) if len(length) <= _MAX_LENGTH_DIGITS else _ANY_LENGTH


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is too large: this server accepts at most {limit} bytes.")


def is_short(body: bytes, max_values: int) -> bool:
    """Return True if the body is not large and cannot have too many values."""
    return len(body) <= LARGE_BYTES and len(body) <= max_values


async def decode_body(decode: Callable[[bytes], T], body: bytes, *, max_values: int) -> T:
    """Decode the body of a request, in a thread if it is large. Raises BodyTooLarge if it has too many values."""
    if is_short(body, max_values):
        return decode(body)
    if len(body) <= LARGE_BYTES:
        return _decode(decode, body, max_values)
    mark_large()
    return await run_in_thread(_decode, decode, body, max_values)


def _decode(decode: Callable[[bytes], T], body: bytes, max_values: int) -> T:
    if has_more_values(body, max_values):
        raise BodyTooLarge(
            f"The body is too large: this server accepts at most {max_values} JSON values (setting max_body_values)."
        )
    return decode(body)
