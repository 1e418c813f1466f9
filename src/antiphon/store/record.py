"""Encoding of stored data, shared by all stores: a few columns, and the rest as JSON."""

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
from antiphon.store.base import Link, StoredResponse, parse_response_id


class ResponseRecord(NamedTuple):
    """An encoded response. `body` is the response with an empty output."""

    id: str
    previous_response_id: str | None
    created_at: int | float
    final: bool
    expires_at: int | None
    input: bytes
    output: bytes
    body: bytes


class LinkRecord(NamedTuple):
    """The part of a response record that a chain needs. `body` is set only if the response continues none."""

    previous_response_id: str | None
    final: bool
    input: bytes
    output: bytes
    body: bytes | None


class ForeignItem(NamedTuple):
    """An item that is in a response but was not produced by it.

    `source` is the id of the response that produced it, or None if the item id does not contain one.
    """

    item_id: str
    source: str | None


class ItemRecord(NamedTuple):
    """An encoded item of a conversation."""

    id: str | None
    content: bytes


class EventBatch(NamedTuple):
    """The JSON of consecutive events, one per line."""

    first: int
    last: int
    lines: bytes


def pack_response(stored: StoredResponse) -> ResponseRecord:
    """Encode a response. Later changes to it do not change the record."""
    response = stored.response
    bare = copy.copy(response)  # faster than structs.replace(), which sets every field again
    bare.output = []
    return ResponseRecord(
        response.id,
        response.previous_response_id,
        response.created_at,
        response.status in FINAL_STATUSES,
        stored.expires_at,
        encode(stored.input),
        encode(response.output),
        encode(bare),
    )


def unpack_response(
    response_id: str, expires_at: int | None, input_items: bytes, output_items: bytes, body: bytes
) -> StoredResponse:
    subject = f"response {response_id}"
    try:
        response = decode_response(body)
    except InvalidRequest as error:
        raise _make_error(subject, error) from error
    response.output = _decode_array(subject, output_items, decode_items_lossless)
    return StoredResponse(
        response=response, input=_decode_array(subject, input_items, decode_items_lossless), expires_at=expires_at
    )


def unpack_output(response_id: str, output_items: bytes) -> list[Item | Unknown]:
    return _decode_array(f"response {response_id}", output_items, decode_items_lossless)


def unpack_item(item_id: str, response_id: str, input_items: bytes, output_items: bytes) -> Item | Unknown | None:
    """Return the item with this id from the input or the output of a response."""
    subject = f"response {response_id}"
    items = itertools.chain.from_iterable(_decode_array(subject, each) for each in (input_items, output_items))
    return next((item for item in items if item.id == item_id), None)


def find_foreign_items(stored: StoredResponse) -> list[ForeignItem]:
    """Return the items that this response did not produce. Ids of its own items contain its id after the prefix."""
    own = stored.response.id.removeprefix("resp")
    return [
        ForeignItem(item_id, parse_response_id(item_id))
        for items in (stored.input, stored.response.output)
        for item in items
        if (item_id := item.id) is not None and not item_id.startswith(own, item_id.find("_"))
    ]


def build_chain(response_id: str, find: Callable[[str], LinkRecord | ResponseRecord | None]) -> list[Link]:
    """Follow a chain back from its newest response. Return its links, oldest first.

    A response continues an earlier one, so a chain has no cycle. In a damaged database a cycle ends the chain.
    """
    links: list[Link] = []
    seen: set[str] = set()
    next_id: str | None = response_id
    while next_id is not None and next_id not in seen:
        record = find(next_id)
        if record is None:
            break
        seen.add(next_id)
        subject = f"response {next_id}"
        items = _decode_array(subject, record.input) + _decode_array(subject, record.output)
        previous, body = record.previous_response_id, record.body
        links.append(
            Link(
                id=next_id,
                previous_response_id=previous,
                final=bool(record.final),
                items=items,
                conversation=_read_conversation(subject, body) if previous is None and body is not None else None,
            )
        )
        next_id = previous
    links.reverse()
    return links


def pack_items(items: Iterable[Item | Unknown]) -> list[ItemRecord]:
    return [ItemRecord(item.id, encode(item)) for item in items]


def unpack_items(conversation_id: str, contents: Iterable[bytes]) -> list[Item | Unknown]:
    return _decode_array(f"conversation {conversation_id}", b"[%b]" % b",".join(contents))


def rename_item(item: ItemRecord, is_taken: Callable[[str], object]) -> ItemRecord:
    """Return the item under an unused id: its own with a number appended."""
    new_ids = (f"{item.id}_{number}" for number in itertools.count(2))
    new_id = next(each for each in new_ids if not is_taken(each))
    fields = msgspec.json.decode(item.content, type=dict[str, msgspec.Raw])
    fields["id"] = msgspec.Raw(msgspec.json.encode(new_id))
    return ItemRecord(new_id, msgspec.json.encode(fields))


def pack_metadata(metadata: dict[str, str] | None) -> bytes:
    return encode(metadata)


def unpack_conversation(conversation_id: str, created_at: int, metadata: bytes) -> Conversation:
    try:
        decoded = msgspec.json.decode(metadata, type=dict[str, str] | None)
    except msgspec.DecodeError as error:
        raise _make_error(f"conversation {conversation_id}", error) from error
    return Conversation(id=conversation_id, created_at=created_at, metadata=decoded)


def pack_events(first: int, payloads: Sequence[bytes]) -> EventBatch | None:
    """Encode consecutive events, numbered from `first`. Return None for no events."""
    if not payloads:
        return None
    lines = b"\n".join(payloads)
    if lines.count(b"\n") >= len(payloads):
        raise ServerError("A stored event must be one line of JSON.")
    return EventBatch(first, first + len(payloads) - 1, lines)


def unpack_events(last: int, lines: bytes, after: int) -> Iterator[tuple[int, bytes]]:
    """Yield the events of a batch with a number greater than `after`, with their numbers."""
    payloads = lines.split(b"\n")
    first = last - len(payloads) + 1
    skipped = max(after + 1 - first, 0)
    return zip(range(first + skipped, last + 1), payloads[skipped:], strict=True)


class _ConversationField(msgspec.Struct):
    """The only field that a chain reads of a response's body."""

    conversation: ConversationRef | None = None


_CONVERSATION_DECODER = msgspec.json.Decoder(_ConversationField)


def _read_conversation(subject: str, body: bytes) -> str | None:
    try:
        conversation = _CONVERSATION_DECODER.decode(body).conversation
    except msgspec.DecodeError as error:
        raise _make_error(subject, error) from error
    return None if conversation is None else conversation.id


def _decode_array(
    subject: str, items: bytes, decode: Callable[[bytes], list[Item | Unknown]] = decode_items
) -> list[Item | Unknown]:
    try:
        return decode(items)
    except (InvalidRequest, msgspec.DecodeError) as error:
        raise _make_error(subject, error) from error


def _make_error(subject: str, error: Exception) -> ServerError:
    # Stored data is the server's responsibility, so the client gets no 400.
    return ServerError(f"The stored {subject} cannot be read: {error}")
