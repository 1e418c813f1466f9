"""Bytes to structs and back: the one door between the wire and the rest of the package."""

import re
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct, ValidationError

from antiphon.errors import InvalidRequest, MissingParameter
from antiphon.protocol.events import CORE_EVENTS, Event
from antiphon.protocol.hosted_events import HOSTED_EVENTS
from antiphon.protocol.items import ITEMS, Item
from antiphon.protocol.open import Family, Unknown
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response

EVENTS: Family[Event] = Family((*CORE_EVENTS, *HOSTED_EVENTS))

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


class DecodedRequest(Struct, frozen=True):
    """A request, and the paths of the fields in it that we do not know and left aside."""

    request: CreateRequest
    ignored: tuple[str, ...] = ()


def decode_request(body: bytes) -> DecodedRequest:
    """The body of a create call. Raises InvalidRequest, naming the field, when it is not one."""
    request, ignored = _decode_leniently(_request, body)
    return DecodedRequest(request, ignored)


def decode_response(body: bytes) -> Response:
    return _decode_leniently(_response, body)[0]


def decode_items(body: bytes) -> list[Item | Unknown]:
    """An array of items."""
    try:
        return ITEMS.many(body)
    except ValidationError as error:
        raise _explain(error) from None


def decode_event(body: bytes) -> Event | Unknown:
    """One stream event. An event we know by name but not in this form is kept as it is."""
    try:
        return EVENTS.one(body)
    except ValidationError:
        return Unknown(bytes(body))


_SUFFIX = r"(?: - at `\$[\w.\[\]]*`)*$"
_UNKNOWN_FIELD = re.compile(rf"^Object contains unknown field `(?P<field>.*?)`{_SUFFIX}", re.DOTALL)
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<field>[^`]*)`")
_PATH = re.compile(r" - at `\$([\w.\[\]]*)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")

# Each unknown field costs another pass over the body: enough for any real client, too little to keep a server busy.
_MOST_UNKNOWN_FIELDS = 32


def _decode_leniently(decoder: "msgspec.json.Decoder[T]", body: bytes) -> tuple[T, tuple[str, ...]]:
    ignored: list[str] = []
    try:
        while True:
            try:
                return decoder.decode(body), tuple(ignored)
            except ValidationError as error:
                unknown = _UNKNOWN_FIELD.match(str(error))
                if unknown is None or len(ignored) == _MOST_UNKNOWN_FIELDS:
                    raise _explain(error) from None
                path, field = _path(str(error)), unknown["field"]
                body = _without(body, [*_steps(path), field])
                ignored.append(f"{path}.{field}".removeprefix("."))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None


def _steps(path: str) -> list[str | int]:
    return [int(index) if index else name for name, index in _STEP.findall(path)]


def _without(body: bytes, path: list[str | int]) -> bytes:
    """The JSON without the field at `path`; everything beside the way there stays as it was, byte for byte."""
    step, *rest = path
    if isinstance(step, int):
        elements = msgspec.json.decode(body, type=list[Raw])
        elements[step] = Raw(_without(bytes(elements[step]), rest))
        return msgspec.json.encode(elements)
    fields = msgspec.json.decode(body, type=dict[str, Raw])
    if step not in fields:  # a name made up to look like the path in an error message
        raise InvalidRequest(f"Unknown parameter: {step!r}.", code="unknown_parameter")
    if rest:
        fields[step] = Raw(_without(bytes(fields[step]), rest))
    else:
        del fields[step]
    return msgspec.json.encode(fields)


def _path(message: str) -> str:
    """The path of a msgspec error. Every level adds its own part at the end, so the outermost comes last."""
    return "".join(reversed(_PATH.findall(message)))


def _explain(error: ValidationError) -> InvalidRequest:
    message = str(error)
    path = _path(message).removeprefix(".").replace("[...]", "")  # msgspec does not name the key of a mapping
    reason = _PATH.sub("", message)
    missing = _MISSING_FIELD.match(reason)
    if missing is not None:
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return MissingParameter(f"Missing required parameter: '{param}'.", param=param)
    code = "invalid_type" if reason.startswith("Expected") and ", got" in reason else "invalid_value"
    if not path:
        return InvalidRequest(f"The body is wrong: {reason}.", code=code)
    return InvalidRequest(f"Invalid value for '{path}': {reason}.", param=path, code=code)
