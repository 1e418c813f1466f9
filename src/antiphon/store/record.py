"""The form in which every store keeps a response: a few columns and three pieces of JSON, nothing twice."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from antiphon.errors import InvalidRequest, ServerError
from antiphon.protocol.codec import decode_items, decode_response, encode
from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown
from antiphon.store.base import Link, StoredResponse


class Record(NamedTuple):
    """A response at rest. `body` is the response with an empty output."""

    id: str
    previous_response_id: str | None
    created_at: int | float
    input: bytes
    output: bytes
    body: bytes


def pack(stored: StoredResponse) -> Record:
    """Encode at once, so that what the caller changes later does not change what is kept."""
    response = stored.response
    return Record(
        response.id,
        response.previous_response_id,
        response.created_at,
        encode(stored.input),
        encode(response.output),
        encode(msgspec.structs.replace(response, output=[])),
    )


def unpack(response_id: str, asked: bytes, answered: bytes, body: bytes) -> StoredResponse:
    """The response again, from its input items, its output items and the rest."""
    try:
        response = decode_response(body)
    except InvalidRequest as error:
        raise _unreadable(response_id, error) from error
    response.output = _unpack_items(response_id, answered)
    return StoredResponse(response=response, input=_unpack_items(response_id, asked))


class LinkRecord(NamedTuple):
    """The part of a record that a chain reads."""

    previous_response_id: str | None
    input: bytes
    output: bytes


def walk(response_id: str, find: Callable[[str], LinkRecord | Record | None]) -> list[Link]:
    """Follow a chain back from its newest response; the oldest comes first.

    Responses name ones that came before them, so there are no circles; a damaged database must not hang us either.
    """
    links: list[Link] = []
    seen: set[str] = set()
    next_id: str | None = response_id
    while next_id is not None and next_id not in seen:
        record = find(next_id)
        if record is None:
            break
        seen.add(next_id)
        items = _unpack_items(next_id, record.input) + _unpack_items(next_id, record.output)
        links.append(Link(id=next_id, previous_response_id=record.previous_response_id, items=items))
        next_id = record.previous_response_id
    links.reverse()
    return links


def _unpack_items(response_id: str, items: bytes) -> list[Item | Unknown]:
    try:
        return decode_items(items)
    except (InvalidRequest, msgspec.DecodeError) as error:
        raise _unreadable(response_id, error) from error


def _unreadable(response_id: str, error: Exception) -> ServerError:
    # What we stored is ours to answer for: never the client's 400.
    return ServerError(f"The stored response {response_id} cannot be read: {error}")
