"""Lenient reading of another server's events: nulls, old field names, missing fields and wrong types are accepted."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from antiphon.errors import UpstreamError
from antiphon.protocol.content import ANNOTATIONS, Annotation
from antiphon.protocol.json_text import JSON_ERRORS
from antiphon.protocol.unions import Unknown
from antiphon.upstream.fields import parse_annotation, read_list

_NULL = Raw(b"null")


class UpstreamEvent(Struct, gc=False):
    """An event of any type, with the fields that the reader uses."""

    type: Any = None
    item_id: Any = None
    output_index: Any = None
    content_index: Any = 0
    summary_index: Any = 0
    delta: Any = None
    text: Any = None
    refusal: Any = None
    arguments: Any = None
    input: Any = None
    name: Any = None
    logprobs: Any = None
    item: Raw = _NULL
    part: Any = None
    annotation: Raw = _NULL
    response: Raw = _NULL
    error: Any = None
    object: Any = None


class UpstreamResponse(Struct):
    """The response object of the events that begin or end a response."""

    id: Any = None
    model: Any = None
    status: Any = None
    error: Any = None
    incomplete_details: Any = None
    output: Raw = _NULL
    usage: Any = None

    def list_output(self) -> list[Raw]:
        """Return the output items; none if `output` is not a list."""
        try:
            return _list_decoder.decode(self.output) or []
        except msgspec.DecodeError:
            return []


_EmptyList = Annotated[list[Any], Meta(max_length=0)] | None


class PlainPart(Struct, gc=False):
    """A part that is text and nothing else. Other fields have no effect on the deltas."""

    type: Literal["output_text"]
    text: Annotated[str, Meta(min_length=1)]
    annotations: _EmptyList = None
    logprobs: _EmptyList = None


class PlainMessage(Struct, forbid_unknown_fields=True, gc=False):
    """A message of one text. Unknown fields would be passed on."""

    type: Literal["message"]
    content: tuple[PlainPart]
    id: Any = None
    role: Any = None
    status: Literal["completed"] | None = None
    phase: None = None


class PlainResponse(Struct, gc=False):
    """A whole response whose output is one text and nothing else."""

    object: Literal["response"]
    status: Literal["completed"]
    output: tuple[PlainMessage]
    model: Any = None
    usage: Any = None
    type: None = None
    error: None = None


decode_plain_response = msgspec.json.Decoder(PlainResponse).decode

_event_decoder: "msgspec.json.Decoder[UpstreamEvent]" = msgspec.json.Decoder(UpstreamEvent)
_response_decoder: "msgspec.json.Decoder[UpstreamResponse]" = msgspec.json.Decoder(UpstreamResponse)
_list_decoder: "msgspec.json.Decoder[list[Raw] | None]" = msgspec.json.Decoder(list[Raw] | None)


def read_event(data: bytes) -> UpstreamEvent:
    try:
        return _event_decoder.decode(data)
    except JSON_ERRORS:
        raise UpstreamError("The upstream sent an invalid event.") from None


def read_response(raw: Raw | bytes) -> UpstreamResponse:
    try:
        return _response_decoder.decode(raw)
    except msgspec.DecodeError:
        return UpstreamResponse()


def read_object(raw: Raw | bytes) -> dict[str, Any]:
    """Return an object with all of its fields; an empty one if the value is something else."""
    value = msgspec.json.decode(raw)
    return value if isinstance(value, dict) else {}


def read_item(raw: Raw | bytes) -> dict[str, Any]:
    """Return an item with all of its fields."""
    item = read_object(raw)
    if not item:
        raise UpstreamError("The upstream sent an output item that is not an object.")
    return item


def read_text(value: Any) -> str:
    """Return a text. Some servers send a call's arguments as an object, which is encoded."""
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()


def read_name(value: Any) -> str | None:
    """Return an id or a name. Some servers send numbers."""
    if isinstance(value, int):
        return str(value)
    return value if isinstance(value, str) else None


def read_index(value: Any) -> int:
    return value if isinstance(value, int) else 0


def read_annotation(value: Any) -> Annotation | Unknown:
    raw = bytes(value) if isinstance(value, Raw) else msgspec.json.encode(value)
    try:
        return ANNOTATIONS.decode(raw)
    except msgspec.ValidationError:
        return parse_annotation(msgspec.json.decode(raw)) or Unknown(raw)


def list_objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; none if the value is not a list. Raises if it has too many entries."""
    return [each for each in read_list(value) if isinstance(each, dict)]
