"""What another server sends, read leniently: null where the API has a value, old names, fields that are not there."""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from antiphon.errors import UpstreamError
from antiphon.protocol.content import ANNOTATIONS, Annotation
from antiphon.protocol.unions import Unknown

_NOTHING = Raw(b"null")


class Event(Struct, gc=False):
    """Any event: those of its fields that some event is told by."""

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
    item: Raw = _NOTHING
    part: Any = None
    annotation: Raw = _NOTHING
    response: Raw = _NOTHING
    error: Any = None
    object: Any = None


class Outcome(Struct):
    """A response: what there is to know of it at its end."""

    id: Any = None
    model: Any = None
    status: Any = None
    error: Any = None
    incomplete_details: Any = None
    output: Raw = _NOTHING
    usage: Any = None

    def list_output(self) -> list[Raw]:
        """The items; none if that is no list."""
        try:
            return _lists.decode(self.output) or []
        except msgspec.DecodeError:
            return []


_events: "msgspec.json.Decoder[Event]" = msgspec.json.Decoder(Event)
_outcomes: "msgspec.json.Decoder[Outcome]" = msgspec.json.Decoder(Outcome)
_lists: "msgspec.json.Decoder[list[Raw] | None]" = msgspec.json.Decoder(list[Raw] | None)


def read_event(data: bytes) -> Event:
    try:
        return _events.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UpstreamError("The upstream sent an event that cannot be read.") from None


def read_outcome(raw: Raw | bytes) -> Outcome:
    try:
        return _outcomes.decode(raw)
    except msgspec.DecodeError:
        return Outcome()


def read_object(raw: Raw | bytes) -> dict[str, Any]:
    """An object with all of its fields; empty if it is something else."""
    value = msgspec.json.decode(raw)
    return value if isinstance(value, dict) else {}


def read_item(raw: Raw | bytes) -> dict[str, Any]:
    """An item with all of its fields."""
    item = read_object(raw)
    if not item:
        raise UpstreamError("The upstream sent an item that is none.")
    return item


def read_text(value: Any) -> str:
    """Arguments that should be a string; some servers send the object itself."""
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()


def read_name(value: Any) -> str | None:
    """An id, or a name: not every server keeps to text."""
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
        return Unknown(raw)


def list_objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; none if it is no list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
