"""Decoding of request bodies: large ones in a thread, and none with too many values."""

from collections.abc import Callable
from typing import TypeVar

from antiphon.errors import BodyTooLarge
from antiphon.offload import LARGE_BYTES, mark_large, run_in_thread
from antiphon.protocol.body_size import has_more_values

T = TypeVar("T")


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
    check_values(body, max_values)
    return decode(body)


def check_values(body: bytes, limit: int) -> None:
    if has_more_values(body, limit):
        raise BodyTooLarge(
            f"The body is too large: this server accepts at most {limit} JSON values (setting max_body_values)."
        )
