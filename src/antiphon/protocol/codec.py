"""Decode JSON bodies to structs and encode structs to JSON."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct, ValidationError

from antiphon.errors import InvalidRequest
from antiphon.protocol import validation
from antiphon.protocol.conversation import AddItems, CreateConversation, UpdateConversation
from antiphon.protocol.events import CORE_EVENTS, Event
from antiphon.protocol.hosted_events import HOSTED_EVENTS
from antiphon.protocol.items import ITEMS, Item
from antiphon.protocol.prompt import PromptDefinition
from antiphon.protocol.request import CompactRequest, CountRequest, CreateRequest
from antiphon.protocol.response import Response
from antiphon.protocol.unions import OpenUnion, Unknown
from antiphon.protocol.websocket import MessageHeader, SteerRequest

EVENTS: OpenUnion[Event] = OpenUnion("Event", (*CORE_EVENTS, *HOSTED_EVENTS))

T = TypeVar("T")


# Each distinct unknown field costs another pass over the body. The number of passes is limited, and lower for a long
# body, so that one request cannot keep the server busy.
_MAX_PASSES = 32
_MIN_PASSES = 8
_MAX_BYTES = 2**21


def _encode_unknown(value: Any) -> Raw:
    if isinstance(value, Unknown):
        return Raw(value.raw)
    raise NotImplementedError(f"{type(value).__name__} is not a wire type")


_encoder = msgspec.json.Encoder(enc_hook=_encode_unknown)
encode = _encoder.encode
encode_into = _encoder.encode_into

_request = msgspec.json.Decoder(CreateRequest)
_response = msgspec.json.Decoder(Response)
_count = msgspec.json.Decoder(CountRequest)
_compact = msgspec.json.Decoder(CompactRequest)
_create_conversation = msgspec.json.Decoder(CreateConversation)
_update_conversation = msgspec.json.Decoder(UpdateConversation)
_add_items = msgspec.json.Decoder(AddItems)
_prompt_definition = msgspec.json.Decoder(PromptDefinition)
_header = msgspec.json.Decoder(MessageHeader)
_steer = msgspec.json.Decoder(SteerRequest)


class DecodedRequest(Struct, frozen=True):
    """A create request, and the paths of its unknown fields, which were ignored."""

    request: CreateRequest
    ignored: tuple[str, ...] = ()


class Decoded(NamedTuple, Generic[T]):
    """Any other body, and the paths of its unknown fields, which were ignored."""

    body: T
    ignored: tuple[str, ...]


def make_decoder(kind: type[T]) -> Callable[[bytes], Decoded[T]]:
    """Return a function that decodes request bodies of this type."""
    decoder = msgspec.json.Decoder(kind)

    def decode(body: bytes) -> Decoded[T]:
        return Decoded(*_decode_leniently(decoder.decode, body))

    return decode


def decode_request(body: bytes) -> DecodedRequest:
    """Decode the body of `POST /v1/responses`. Raise InvalidRequest with the param path if it is invalid.

    All functions here that decode a request body raise it.
    """
    request, ignored = _decode_leniently(_request.decode, body)
    return DecodedRequest(request, ignored)


def decode_count(body: bytes) -> Decoded[CountRequest]:
    """Decode the body of `POST /v1/responses/input_tokens`."""
    return Decoded(*_decode_leniently(_count.decode, body))


def decode_compact(body: bytes) -> Decoded[CompactRequest]:
    """Decode the body of `POST /v1/responses/compact`."""
    return Decoded(*_decode_leniently(_compact.decode, body))


def decode_create_conversation(body: bytes) -> Decoded[CreateConversation]:
    """Decode the body of `POST /v1/conversations`. An empty body creates an empty conversation."""
    return Decoded(*_decode_leniently(_create_conversation.decode, body or b"{}"))


def decode_update_conversation(body: bytes) -> Decoded[UpdateConversation]:
    return Decoded(*_decode_leniently(_update_conversation.decode, body))


def decode_add_items(body: bytes) -> Decoded[AddItems]:
    return Decoded(*_decode_leniently(_add_items.decode, body))


def decode_prompt_definition(body: bytes) -> Decoded[PromptDefinition]:
    return Decoded(*_decode_leniently(_prompt_definition.decode, body))


def decode_header(body: bytes) -> MessageHeader:
    """Decode only the fields that identify a WebSocket message. Raise InvalidRequest if it is no JSON object."""
    return _decode_leniently(_header.decode, body)[0]


def decode_steer(body: bytes) -> Decoded[SteerRequest]:
    """Decode a `response.steer` message."""
    return Decoded(*_decode_leniently(_steer.decode, body))


def decode_response(body: bytes) -> Response:
    return _decode_leniently(_response.decode, body)[0]


def decode_items(body: bytes) -> list[Item | Unknown]:
    """Decode an array of items for a model. Unknown fields are ignored."""
    try:
        return _decode_leniently(ITEMS.decode_list, body)[0]
    except InvalidRequest:
        return [_ignore_unknown_fields(item) for item in decode_items_lossless(body)]


def decode_item_arrays(bodies: Sequence[bytes]) -> list[list[Item | Unknown]]:
    """Decode several arrays of items, each as `decode_items` does: in one pass if all items are of known types."""
    joined = b"[%b]" % b",".join(bodies)
    try:
        _check_utf8(joined)
        arrays = ITEMS.decode_lists(joined)
    except (ValueError, RecursionError):
        return [decode_items(body) for body in bodies]
    # A damaged body can consist of several arrays.
    return arrays if len(arrays) == len(bodies) else [decode_items(body) for body in bodies]


def _ignore_unknown_fields(item: Item | Unknown) -> Item | Unknown:
    try:
        return _decode_leniently(ITEMS.decode, item.raw)[0] if isinstance(item, Unknown) else item
    except InvalidRequest:
        return item


def decode_items_lossless(body: bytes) -> list[Item | Unknown]:
    """Decode an array of items without losing data. An item with unknown or missing fields becomes `Unknown`."""
    return _decode_leniently(ITEMS.decode_list_lossless, body)[0]


def decode_event(body: bytes) -> Event | Unknown:
    """Decode one stream event. Raise ValueError if it is not JSON. An invalid event becomes `Unknown`."""
    _check_utf8(body)
    try:
        return EVENTS.decode(body)
    except (ValidationError, RecursionError):
        return Unknown(bytes(body))


def _decode_leniently(decode: Callable[[bytes], T], body: bytes) -> tuple[T, tuple[str, ...]]:
    try:
        _check_utf8(body)
        try:
            return decode(body), ()
        except ValidationError as error:
            return _decode_known_fields(decode, body, error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None


def _decode_known_fields(
    decode: Callable[[bytes], T], body: bytes, error: ValidationError
) -> tuple[T, tuple[str, ...]]:
    """Decode a body without the unknown fields for which it was rejected. Raise InvalidRequest for any other error."""
    ignored: list[str] = []
    for _ in range(max(_MIN_PASSES, min(_MAX_PASSES, _MAX_BYTES // (len(body) + 1)))):
        invalid = validation.parse_error(error)
        if invalid.unknown_field is None:
            break
        body, found = validation.remove_field(body, invalid.path, invalid.unknown_field)
        ignored += found
        try:
            return decode(body), tuple(ignored)
        except ValidationError as another:
            error = another
    raise validation.parse_error(error).to_invalid_request() from None


def _check_utf8(body: bytes) -> None:
    """Raise UnicodeDecodeError for invalid UTF-8: msgspec does not check strings in skipped fields."""
    if not body.isascii():
        body.decode()
