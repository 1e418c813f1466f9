"""The form in which every store keeps things: a few columns and pieces of JSON, nothing twice."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from antiphon.errors import InvalidRequest, ServerError
from antiphon.protocol.codec import decode_items, decode_items_lossless, decode_response, encode
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.request import ConversationRef
from antiphon.protocol.response import FINAL_STATUSES
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Link, StoredResponse
from antiphon.store.ownership import find_owner


class Record(NamedTuple):
    """A response at rest. `body` is the response with an empty output."""

    id: str
    previous_response_id: str | None
    created_at: int | float
    final: bool
    expires_at: int | None
    input: bytes
    output: bytes
    body: bytes


def pack(stored: StoredResponse) -> Record:
    """Encode at once, so that what the caller changes later does not change what is kept."""
    response = stored.response
    bare = copy.copy(response)  # structs.replace() would go through every field again
    bare.output = []
    return Record(
        response.id,
        response.previous_response_id,
        response.created_at,
        response.status in FINAL_STATUSES,
        stored.expires_at,
        encode(stored.input),
        encode(response.output),
        encode(bare),
    )


def unpack(response_id: str, expires_at: int | None, asked: bytes, answered: bytes, body: bytes) -> StoredResponse:
    """The response again, from its input items, its output items and the rest."""
    what = f"response {response_id}"
    try:
        response = decode_response(body)
    except InvalidRequest as error:
        raise _unreadable(what, error) from error
    response.output = _decode_array(what, answered, decode_items_lossless)
    return StoredResponse(
        response=response, input=_decode_array(what, asked, decode_items_lossless), expires_at=expires_at
    )


class Foreign(NamedTuple):
    """An item of a response that was not made in it, and the response that it was made in, if its id names one."""

    item_id: str
    owner: str | None


def find_foreign(stored: StoredResponse) -> list[Foreign]:
    """The items that were not made in this response. The ids of its own begin, after their kind, with its own."""
    own = stored.response.id.removeprefix("resp")
    return [
        Foreign(item_id, find_owner(item_id))
        for items in (stored.input, stored.response.output)
        for item in items
        if (item_id := item.id) is not None and not item_id.startswith(own, item_id.find("_"))
    ]


def unpack_output(response_id: str, answered: bytes) -> list[Item | Unknown]:
    return _decode_array(f"response {response_id}", answered, decode_items_lossless)


def pick_item(item_id: str, response_id: str, asked: bytes, answered: bytes) -> Item | Unknown | None:
    """The item with this id, from a response's input items and output items."""
    what = f"response {response_id}"
    items = itertools.chain.from_iterable(_decode_array(what, each) for each in (asked, answered))
    return next((item for item in items if item.id == item_id), None)


class LinkRecord(NamedTuple):
    """The part of a record that a chain reads: the body only of a response that continues none."""

    previous_response_id: str | None
    final: bool
    input: bytes
    output: bytes
    body: bytes | None


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
        what = f"response {next_id}"
        items = _decode_array(what, record.input) + _decode_array(what, record.output)
        previous = record.previous_response_id
        conversation = _read_conversation(what, record.body) if previous is None and record.body is not None else None
        links.append(
            Link(
                id=next_id,
                previous_response_id=previous,
                final=bool(record.final),
                items=items,
                conversation=conversation,
            )
        )
        next_id = previous
    links.reverse()
    return links


class _Belonging(msgspec.Struct):
    """The one field of a response's body that a chain reads."""

    conversation: ConversationRef | None = None


_BELONGINGS = msgspec.json.Decoder(_Belonging)


def _read_conversation(what: str, body: bytes) -> str | None:
    try:
        conversation = _BELONGINGS.decode(body).conversation
    except msgspec.DecodeError as error:
        raise _unreadable(what, error) from error
    return None if conversation is None else conversation.id


class ItemRecord(NamedTuple):
    """An item of a conversation at rest."""

    id: str | None
    content: bytes


def pack_items(items: Iterable[Item | Unknown]) -> list[ItemRecord]:
    return [ItemRecord(item.id, encode(item)) for item in items]


def rename_item(item: ItemRecord, is_taken: Callable[[str], object]) -> ItemRecord:
    """The item under an id that is free, since its own is another's."""
    names = (f"{item.id}_{number}" for number in itertools.count(2))
    name = next(each for each in names if not is_taken(each))
    fields = msgspec.json.decode(item.content, type=dict[str, msgspec.Raw])
    fields["id"] = msgspec.Raw(msgspec.json.encode(name))
    return ItemRecord(name, msgspec.json.encode(fields))


def unpack_items(conversation_id: str, contents: Iterable[bytes]) -> list[Item | Unknown]:
    return _decode_array(f"conversation {conversation_id}", b"[%b]" % b",".join(contents))


def pack_metadata(metadata: dict[str, str] | None) -> bytes:
    return encode(metadata)


def unpack_conversation(conversation_id: str, created_at: int, metadata: bytes) -> Conversation:
    try:
        decoded = msgspec.json.decode(metadata, type=dict[str, str] | None)
    except msgspec.DecodeError as error:
        raise _unreadable(f"conversation {conversation_id}", error) from error
    return Conversation(id=conversation_id, created_at=created_at, metadata=decoded)


class Batch(NamedTuple):
    """Consecutive events at rest, one to a line: JSON needs no line break of its own."""

    first: int
    last: int
    lines: bytes


def pack_events(first: int, payloads: Sequence[bytes]) -> Batch | None:
    """None for no events."""
    if not payloads:
        return None
    lines = b"\n".join(payloads)
    if lines.count(b"\n") >= len(payloads):
        raise ServerError("An event must be one line of JSON to be kept.")
    return Batch(first, first + len(payloads) - 1, lines)


def unpack_events(last: int, lines: bytes, after: int) -> Iterator[tuple[int, bytes]]:
    """The events of a batch with a number greater than `after`."""
    payloads = lines.split(b"\n")
    first = last - len(payloads) + 1
    skipped = max(after + 1 - first, 0)
    return zip(range(first + skipped, last + 1), payloads[skipped:], strict=True)


def _decode_array(
    what: str, items: bytes, decode: Callable[[bytes], list[Item | Unknown]] = decode_items
) -> list[Item | Unknown]:
    try:
        return decode(items)
    except (InvalidRequest, msgspec.DecodeError) as error:
        raise _unreadable(what, error) from error


def _unreadable(what: str, error: Exception) -> ServerError:
    # What we stored is ours to answer for: never the client's 400.
    return ServerError(f"The stored {what} cannot be read: {error}")
