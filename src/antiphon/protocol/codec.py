"""Bytes to structs and back: the one door between the wire and the rest of the package."""

from collections.abc import Callable
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


def _keep_raw(value: Any) -> Raw:
    if isinstance(value, Unknown):
        return Raw(value.raw)
    raise NotImplementedError(f"{type(value).__name__} is not a wire type")


_encoder = msgspec.json.Encoder(enc_hook=_keep_raw)
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
_glance = msgspec.json.Decoder(MessageHeader)
_steer = msgspec.json.Decoder(SteerRequest)


class DecodedRequest(Struct, frozen=True):
    """A request, and the paths of the fields in it that we do not know and left aside."""

    request: CreateRequest
    ignored: tuple[str, ...] = ()


class Decoded(NamedTuple, Generic[T]):
    """Any other body, and the paths of the fields in it that we do not know and left aside."""

    body: T
    ignored: tuple[str, ...]


def decode_request(body: bytes) -> DecodedRequest:
    """The body of a create call. Raises InvalidRequest, naming the field, when it is not one."""
    request, ignored = _decode_leniently(_request.decode, body)
    return DecodedRequest(request, ignored)


def decode_count(body: bytes) -> Decoded[CountRequest]:
    """The body of a call that counts tokens. These raise like `decode_request`."""
    return Decoded(*_decode_leniently(_count.decode, body))


def decode_compact(body: bytes) -> Decoded[CompactRequest]:
    """The body of a call that compacts a conversation."""
    return Decoded(*_decode_leniently(_compact.decode, body))


def decode_create_conversation(body: bytes) -> Decoded[CreateConversation]:
    """The body of a call that makes a conversation. None at all asks for an empty one."""
    return Decoded(*_decode_leniently(_create_conversation.decode, body or b"{}"))


def decode_update_conversation(body: bytes) -> Decoded[UpdateConversation]:
    return Decoded(*_decode_leniently(_update_conversation.decode, body))


def decode_add_items(body: bytes) -> Decoded[AddItems]:
    return Decoded(*_decode_leniently(_add_items.decode, body))


def decode_prompt_definition(body: bytes) -> Decoded[PromptDefinition]:
    return Decoded(*_decode_leniently(_prompt_definition.decode, body))


def decode_header(body: bytes) -> MessageHeader:
    """What kind of message this is, whatever else may be wrong with it. Raises InvalidRequest if it is no object."""
    return _decode_leniently(_glance.decode, body)[0]


def decode_steer(body: bytes) -> Decoded[SteerRequest]:
    """A `response.steer` message."""
    return Decoded(*_decode_leniently(_steer.decode, body))


def decode_response(body: bytes) -> Response:
    return _decode_leniently(_response.decode, body)[0]


def decode_items(body: bytes) -> list[Item | Unknown]:
    """An array of items as a model is to read them: fields that we do not know are left aside."""
    try:
        return _decode_leniently(ITEMS.decode_list, body)[0]
    except InvalidRequest:
        return [_read_kept(item) for item in decode_items_lossless(body)]


def _read_kept(item: Item | Unknown) -> Item | Unknown:
    try:
        return _decode_leniently(ITEMS.decode, item.raw)[0] if isinstance(item, Unknown) else item
    except InvalidRequest:
        return item


def decode_items_lossless(body: bytes) -> list[Item | Unknown]:
    """An array of items with all that is in them: one that has more in it than we know, or less, stays as it is."""
    return _decode_leniently(ITEMS.decode_list_lossless, body)[0]


def decode_event(body: bytes) -> Event | Unknown:
    """One stream event; ValueError if it is not JSON. One we know by name but not in this form is kept as it is."""
    _check_utf8(body)
    try:
        return EVENTS.decode(body)
    except (ValidationError, RecursionError):
        return Unknown(bytes(body))


# Each kind of unknown field costs another pass over the body: enough of them for any real client, and fewer over a long
# body, so that nobody can keep a server busy with one.
_MOST_PASSES = 32
_FEWEST_PASSES = 8
_MOST_BYTES = 2**21


def _decode_leniently(decode: Callable[[bytes], T], body: bytes) -> tuple[T, tuple[str, ...]]:
    ignored: list[str] = []
    try:
        _check_utf8(body)
        passes = max(_FEWEST_PASSES, min(_MOST_PASSES, _MOST_BYTES // (len(body) + 1)))
        while True:
            try:
                return decode(body), tuple(ignored)
            except ValidationError as error:
                fault = validation.parse_error(error)
                if fault.unknown_field is None or not passes:
                    raise fault.to_invalid_request() from None
                body, found = validation.remove_field(body, fault.path, fault.unknown_field)
                ignored += found
                passes -= 1
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None


def _check_utf8(body: bytes) -> None:
    """msgspec does not look into the strings it passes over, and what we do not know is sent on as it came."""
    if not body.isascii():
        body.decode()
