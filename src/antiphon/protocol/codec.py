"""Decode JSON bodies to structs and encode structs to JSON."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

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
from antiphon.protocol.tool_lists import SharedTools, derive
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import OpenUnion, Unknown, copy_struct
from antiphon.protocol.websocket import MessageHeader, SteerRequest

EVENTS: OpenUnion[Event] = OpenUnion("Event", (*CORE_EVENTS, *HOSTED_EVENTS))

T = TypeVar("T")

# Each distinct unknown field costs another pass over the body. The number of passes is limited, and lower for a long
# body, so that one request cannot keep the server busy.
_MAX_PASSES = 32
_MIN_PASSES = 8
_MAX_BYTES = 2**21
_MAX_SEARCHED = 2**18
# The escape of half a surrogate pair, after any number of escaped backslashes.
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?P<escape>\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)


def _encode_unknown(value: Any) -> Raw:
    if isinstance(value, Unknown):
        return Raw(value.raw)
    raise NotImplementedError(f"{type(value).__name__} is not a wire type")


_encoder = msgspec.json.Encoder(enc_hook=_encode_unknown)
encode = _encoder.encode
encode_into = _encoder.encode_into


def reuse_tools_json(response: Response) -> Response:
    """Return the response to encode: a copy with the JSON of its tools, if it shares their list with other responses.

    An agent sends the same tools with every request, and each response repeats them several times.
    """
    if type(response.tools) is not SharedTools:
        return response
    tools_json: Any = derive(response.tools, ("json",), _encode_tools)
    response = copy_struct(response)
    response.tools = tools_json
    return response


def _encode_tools(tools: list[Tool | Unknown]) -> Raw:
    return Raw(encode(tools))


_response = msgspec.json.Decoder(Response)
_header = msgspec.json.Decoder(MessageHeader)


class Decoded(Struct, Generic[T], frozen=True):
    """A request body, and the paths of its unknown fields, which were ignored."""

    body: T
    ignored: tuple[str, ...] = ()


def make_decoder(kind: type[T]) -> Callable[[bytes], Decoded[T]]:
    """Return a function that decodes request bodies of this type.

    It raises InvalidRequest with the param path if a body is invalid.
    """
    decode_known = msgspec.json.Decoder(kind).decode

    def decode(body: bytes) -> Decoded[T]:
        return Decoded(*_decode_leniently(decode_known, body, kind))

    return decode


decode_request = make_decoder(CreateRequest)
decode_count = make_decoder(CountRequest)
decode_compact = make_decoder(CompactRequest)
decode_update_conversation = make_decoder(UpdateConversation)
decode_add_items = make_decoder(AddItems)
decode_prompt_definition = make_decoder(PromptDefinition)
decode_steer = make_decoder(SteerRequest)
_decode_create_conversation = make_decoder(CreateConversation)


def decode_create_conversation(body: bytes) -> Decoded[CreateConversation]:
    """Decode the body of `POST /v1/conversations`. An empty body creates an empty conversation."""
    return _decode_create_conversation(body or b"{}")


def decode_header(body: bytes) -> MessageHeader:
    """Decode only the fields that identify a WebSocket message. Raise InvalidRequest if it is no JSON object."""
    return _decode_leniently(_header.decode, body, MessageHeader)[0]


def decode_response(body: bytes) -> Response:
    return _decode_leniently(_response.decode, body, Response)[0]


def decode_items(body: bytes) -> list[Item | Unknown]:
    """Decode an array of items for a model. Unknown fields are ignored."""
    try:
        return _decode_leniently(ITEMS.decode_list, body, list)[0]
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
        return _decode_leniently(ITEMS.decode, item.raw, ITEMS.known)[0] if isinstance(item, Unknown) else item
    except InvalidRequest:
        return item


def decode_items_lossless(body: bytes) -> list[Item | Unknown]:
    """Decode an array of items without losing data. An item with unknown or missing fields becomes `Unknown`."""
    return _decode_leniently(ITEMS.decode_list_lossless, body, list)[0]


def decode_event(body: bytes) -> Event | Unknown:
    """Decode one stream event. Raise ValueError if it is not JSON. An invalid event becomes `Unknown`."""
    _check_utf8(body)
    try:
        return EVENTS.decode(body)
    except (ValidationError, RecursionError):
        return Unknown(bytes(body))


def _find_lone_surrogate(body: bytes) -> str:
    """Describe half a surrogate pair in a body, or return "". Clients that cut a text within a character send it.

    The message of the JSON decoder does not name it. Long bodies are not searched.
    """
    found = _LONE_SURROGATE.search(body) if len(body) <= _MAX_SEARCHED else None
    return f"a string has half of a surrogate pair, {found['escape'].decode()}" if found else ""


def _decode_leniently(decode: Callable[[bytes], T], body: bytes, kind: Any) -> tuple[T, tuple[str, ...]]:
    try:
        _check_utf8(body)
        try:
            return decode(body), ()
        except ValidationError as error:
            return _decode_known_fields(decode, body, kind, error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = _find_lone_surrogate(body) or str(error)
        raise InvalidRequest(f"The body is not valid JSON: {reason}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None


def _decode_known_fields(
    decode: Callable[[bytes], T], body: bytes, kind: Any, error: ValidationError
) -> tuple[T, tuple[str, ...]]:
    """Decode a body without the unknown fields for which it was rejected. Raise InvalidRequest for any other error."""
    ignored: list[str] = []
    for _ in range(max(_MIN_PASSES, min(_MAX_PASSES, _MAX_BYTES // (len(body) + 1)))):
        invalid = validation.parse_error(error)
        if invalid.unknown_field is None:
            break
        try:
            body, found = validation.remove_field(body, invalid.path, invalid.unknown_field)
        except validation.TooManyFields:
            break
        ignored += found
        try:
            return decode(body), tuple(ignored)
        except ValidationError as another:
            error = another
    raise validation.explain_error(error, kind, body).to_invalid_request() from None


def _check_utf8(body: bytes) -> None:
    """Raise UnicodeDecodeError for invalid UTF-8: msgspec does not check strings in skipped fields."""
    if not body.isascii():
        body.decode()
