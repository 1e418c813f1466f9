"""Encoding of stored data, shared by all stores: a few columns, and the rest as JSON."""

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from antiphon.errors import InvalidRequest, ServerError
from antiphon.protocol.codec import (
    decode_item_arrays,
    decode_items,
    decode_items_lossless,
    decode_response,
    encode,
    reuse_tools_json,
)
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.request import ConversationRef
from antiphon.protocol.response import FINAL_STATUSES, Response
from antiphon.protocol.tools import TOOLS
from antiphon.protocol.unions import Unknown, copy_struct
from antiphon.store.base import ItemRows, Link, Order, StoredResponse, parse_response_id
from antiphon.store.item_offsets import make_unknown_item_error

logger = logging.getLogger(__name__)

# Errors of decoding stored data: invalid JSON, text that is not UTF-8, or a column with a value of another type.
DAMAGE = (InvalidRequest, msgspec.MsgspecError, ValueError, TypeError, AttributeError)

# Maximum size of a page of items, unless one item is larger.
PAGE_BYTES = 16 * 1024 * 1024


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
    """The part of a response record that a chain needs. `body` may be None if the response continues another.

    `size` is the number of bytes. Unless `is_read`, they were only measured, and are None.
    """

    id: str
    previous_response_id: str | None
    final: bool
    input: bytes
    output: bytes
    body: bytes | None
    size: int
    is_read: bool = True


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


def pack_response(stored: StoredResponse) -> ResponseRecord:
    """Encode a response. Later changes to it do not change the record."""
    response = stored.response
    bare = copy_struct(response)
    bare.output = []
    bare = reuse_tools_json(bare)
    output, body = encode(response.output), encode(bare)
    if stored.encoded is not None:
        stored.encoded.output, stored.encoded.body = output, body
    return ResponseRecord(
        response.id,
        response.previous_response_id,
        response.created_at,
        response.status in FINAL_STATUSES,
        stored.expires_at,
        encode(stored.input),
        output,
        body,
    )


def unpack_response(
    response_id: str, expires_at: int | None, input_items: bytes, output_items: bytes, body: bytes
) -> StoredResponse:
    response = unpack_bare_response(response_id, body, output_items)
    decoded = _decode_array(f"response {response_id}", input_items, decode_items_lossless)
    return StoredResponse(response=response, input=decoded, expires_at=expires_at)


def unpack_bare_response(response_id: str, body: bytes, output_items: bytes | None = None) -> Response:
    """Return a response without its input items, and with its output items only if they are given."""
    subject = f"response {response_id}"
    try:
        response = decode_response(body)
    except DAMAGE as error:
        raise report_damage(subject, error) from None
    if output_items is not None:
        response.output = _decode_array(subject, output_items, decode_items_lossless)
    return response


def unpack_output(response_id: str, output_items: bytes) -> list[Item | Unknown]:
    return _decode_array(f"response {response_id}", output_items, decode_items_lossless)


def unpack_item(item_id: str, response_id: str, input_items: bytes, output_items: bytes) -> Item | Unknown | None:
    """Return the item with this id from the input or the output of a response."""
    return unpack_named_items((item_id,), response_id, input_items, output_items).get(item_id)


def unpack_named_items(
    item_ids: Collection[str], response_id: str, input_items: bytes, output_items: bytes, *, lossless: bool = False
) -> dict[str, Item | Unknown]:
    """Return those of the items that are in the input or the output of a response.

    Of several with one id, return the first.
    """
    subject = f"response {response_id}"
    decode = decode_items_lossless if lossless else decode_items
    found: dict[str, Item | Unknown] = {}
    for array in (input_items, output_items):
        for item in _decode_array(subject, array, decode):
            if (item_id := item.id) is not None and item_id in item_ids:
                found.setdefault(item_id, item)
    return found


def group_by_response(item_ids: Iterable[str]) -> dict[str, set[str]]:
    """Return the ids of the responses that the item ids contain, each with its item ids."""
    grouped: dict[str, set[str]] = {}
    for item_id in item_ids:
        response_id = parse_response_id(item_id)
        if response_id is not None:
            grouped.setdefault(response_id, set()).add(item_id)
    return grouped


def unpack_page(response_id: str, items: bytes, *, after: str | None, limit: int, order: Order) -> ItemRows:
    """Return a page of an encoded array. Items that are not in the page are split off, and not decoded."""
    subject = f"response {response_id}"
    try:
        elements = _ELEMENTS_DECODER.decode(items)
        if order == "desc":
            elements.reverse()
        start = 0 if after is None else _find_id(elements, after) + 1
    except DAMAGE as error:
        raise report_damage(subject, error) from None
    if after is not None and start == 0:
        raise make_unknown_item_error(after)
    page = b"[%b]" % b",".join(elements[start : start + limit])
    return ItemRows(items=_decode_array(subject, page, decode_items_lossless), has_more=start + limit < len(elements))


def unpack_slice(response_id: str, items: bytes, *, order: Order) -> list[Item | Unknown]:
    """Return the items of a page that was cut out of an encoded array."""
    decoded = _decode_array(f"response {response_id}", b"[%b]" % items, decode_items_lossless)
    if order == "desc":
        decoded.reverse()
    return decoded


def _find_id(elements: Sequence[msgspec.Raw], item_id: str) -> int:
    """Return the index of the element with this id, or -1."""
    encoded = msgspec.json.encode(item_id)
    for index, element in enumerate(elements):
        raw = bytes(element)
        # Most elements do not contain the text of the id at all, not even with escapes.
        if (encoded in raw or b"\\" in raw) and Unknown(raw).id == item_id:
            return index
    return -1


def find_foreign_items(stored: StoredResponse) -> list[ForeignItem]:
    """Return the items that this response did not produce. Ids of its own items contain its id after the prefix."""
    own = stored.response.id.removeprefix("resp")
    message = f"msg{own}"
    length = len(message)
    return [
        ForeignItem(item_id, parse_response_id(item_id))
        for items in (() if stored.has_own_ids else stored.input, stored.response.output)
        for item in items
        # Most items are messages of this response. For them, a slice costs less than the two calls.
        if (item_id := item.id) is not None
        and item_id[:length] != message
        and not item_id.startswith(own, item_id.find("_"))
    ]


def pack_with_foreign_items(stored: StoredResponse) -> tuple[ResponseRecord, list[ForeignItem]]:
    return pack_response(stored), find_foreign_items(stored)


class Chain(NamedTuple):
    """The links of a chain, oldest first, and those among them that were decoded.

    `next_id` is the response before the oldest link if there is no record of it.
    """

    links: list[Link]
    decoded: list[Link]
    next_id: str | None


class ChainWalk(NamedTuple):
    """The responses of a chain, newest first: links that are known, and None for those that have a record.

    `next_id` is the response before the oldest one if there is no record of it.
    """

    links: dict[str, Link | None]
    records: list[LinkRecord | ResponseRecord]
    next_id: str | None


def walk_chain(
    response_id: str,
    find_record: Callable[[str], LinkRecord | ResponseRecord | None],
    *,
    find_link: Callable[[str], Link | None] = lambda _: None,
) -> ChainWalk:
    """Follow a chain back from its newest response, by the links that `find_link` has and by records.

    A response continues an earlier one, so a chain has no cycle. In a damaged database a cycle ends the chain.
    """
    links: dict[str, Link | None] = {}
    records: list[LinkRecord | ResponseRecord] = []
    next_id: str | None = response_id
    while next_id is not None and next_id not in links:
        link = links[next_id] = find_link(next_id)
        if link is not None:
            next_id = link.previous_response_id
            continue
        record = find_record(next_id)
        if record is None:
            del links[next_id]
            break
        records.append(record)
        next_id = record.previous_response_id
    return ChainWalk(links, records, next_id)


def finish_chain(walk: ChainWalk, decoded: dict[str, Link]) -> Chain:
    """Return the chain of a walk. `decoded` are the links of its records."""
    links = walk.links | decoded
    return Chain([link for link in reversed(links.values()) if link is not None], list(decoded.values()), walk.next_id)


def measure_records(records: Iterable[LinkRecord | ResponseRecord]) -> int:
    """Return the number of bytes to decode."""
    return sum(measure_texts((record.input, record.output)) for record in records)


def measure_texts(values: Iterable[Any]) -> int:
    """Return the length of all encoded values. Values of other types are damaged, and decoding them fails later."""
    return sum(len(value) for value in values if isinstance(value, bytes))


def fit_page(sizes: Iterable[int], limit: int) -> tuple[int, bool]:
    """Return the number of items in a page, by their sizes, and True if there are more.

    A page has at most `limit` items and PAGE_BYTES, but at least one item.
    """
    count = total = 0
    for size in sizes:
        total += size
        if count == limit or (count and total > PAGE_BYTES):
            return count, True
        count += 1
    return count, False


def unpack_links(records: Sequence[LinkRecord | ResponseRecord]) -> dict[str, Link]:
    """Return the links of the records by id."""
    try:
        arrays = decode_item_arrays([array for record in records for array in (record.input, record.output)])
    except DAMAGE:
        # One by one: the error then names the damaged response.
        arrays = [
            _decode_array(f"response {record.id}", array)
            for record in records
            for array in (record.input, record.output)
        ]
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return {record.id: _make_link(record, *pair) for record, pair in zip(records, pairs, strict=True)}


def _make_link(
    record: LinkRecord | ResponseRecord, input_items: list[Item | Unknown], output_items: list[Item | Unknown]
) -> Link:
    conversation = None
    if record.previous_response_id is None and record.body is not None:
        conversation = _read_conversation(f"response {record.id}", record.body)
    return Link(
        id=record.id,
        previous_response_id=record.previous_response_id,
        final=bool(record.final),
        items=(*input_items, *output_items),
        conversation=conversation,
    )


def add_tools(link: Link, body: bytes) -> Link:
    """Return the link with the tools of its response. `body` is the body of the record."""
    subject = f"response {link.id}"
    try:
        tools = TOOLS.decode_list(_TOOLS_DECODER.decode(body).tools)
    except DAMAGE:  # or tools with unknown fields
        try:
            tools = decode_response(body).tools
        except DAMAGE as error:
            raise report_damage(subject, error) from None
    return msgspec.structs.replace(link, tools=tools) if tools else link


def pack_items(items: Iterable[Item | Unknown]) -> list[ItemRecord]:
    return [ItemRecord(item.id, encode(item)) for item in items]


def unpack_items(conversation_id: str, contents: Sequence[bytes]) -> list[Item | Unknown]:
    subject = f"conversation {conversation_id}"
    try:
        array = b"[%b]" % b",".join(contents)
        if array == b"[]" and contents:
            raise ValueError("an item is empty")
    except DAMAGE as error:
        raise report_damage(subject, error) from None
    return _decode_array(subject, array)


def rename_item(item: ItemRecord, is_taken: Callable[[str], object]) -> ItemRecord:
    """Return the item under an unused id: its own with a number appended."""
    new_ids = (f"{item.id}_{number}" for number in itertools.count(2))
    new_id = next(each for each in new_ids if not is_taken(each))
    fields = msgspec.json.decode(item.content, type=dict[str, msgspec.Raw])
    fields["id"] = msgspec.Raw(msgspec.json.encode(new_id))
    return ItemRecord(new_id, msgspec.json.encode(fields))


def arrange_turn(
    input_items: Iterable[ItemRecord], output_items: Iterable[ItemRecord], find_content: Callable[[str], bytes | None]
) -> list[ItemRecord]:
    """Return the items of a response as they are appended to a conversation.

    `find_content` returns the stored item with an id. An input item equal to the stored one is skipped. Any other item
    of a known id gets a new id.
    """
    arranged: list[ItemRecord] = []
    added: dict[str, bytes] = {}

    def find(item_id: str) -> bytes | None:
        return added[item_id] if item_id in added else find_content(item_id)

    def add(item: ItemRecord) -> None:
        arranged.append(item)
        if item.id is not None:
            added[item.id] = item.content

    for item in input_items:
        stored = None if item.id is None else find(item.id)
        if stored is None:
            add(item)
        elif stored != item.content:
            add(rename_item(item, find))
    for item in output_items:
        is_new = item.id is None or find(item.id) is None
        add(item if is_new else rename_item(item, find))
    return arranged


def pack_metadata(metadata: dict[str, str] | None) -> bytes:
    return encode(metadata)


def unpack_conversation(conversation_id: str, created_at: int, metadata: bytes) -> Conversation:
    try:
        decoded = msgspec.json.decode(metadata, type=dict[str, str] | None)
    except DAMAGE as error:
        raise report_damage(f"conversation {conversation_id}", error) from None
    return Conversation(id=conversation_id, created_at=created_at, metadata=decoded)


class _ConversationField(msgspec.Struct):
    """The only field that a chain reads of its oldest response's body."""

    conversation: ConversationRef | None = None


class _ToolsField(msgspec.Struct):
    """The only field that a chain reads of its newest response's body."""

    tools: msgspec.Raw = msgspec.Raw(b"[]")


_ELEMENTS_DECODER: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_TOOLS_DECODER = msgspec.json.Decoder(_ToolsField)
_CONVERSATION_DECODER = msgspec.json.Decoder(_ConversationField)


def _read_conversation(subject: str, body: bytes) -> str | None:
    try:
        conversation = _CONVERSATION_DECODER.decode(body).conversation
    except DAMAGE as error:
        raise report_damage(subject, error) from None
    return None if conversation is None else conversation.id


def _decode_array(
    subject: str, items: bytes, decode: Callable[[bytes], list[Item | Unknown]] = decode_items
) -> list[Item | Unknown]:
    try:
        return decode(items)
    except DAMAGE as error:
        raise report_damage(subject, error) from None


def report_damage(subject: str, error: Exception) -> ServerError:
    """Log that stored data cannot be read, and return the error for the client.

    Stored data is the server's responsibility, so the client gets no 400.
    """
    logger.error("the stored %s cannot be read: %s", subject, error)
    return ServerError(f"The stored {subject} cannot be read: {error}")
