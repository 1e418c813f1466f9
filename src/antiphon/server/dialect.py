"""Dialects: responses and events in the form of OpenAI's API, or of Open Responses where the two differ.

The engine and the store use OpenAI's form, which is more complete. A dialect is applied on output, because two clients
of one response may use different dialects.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from antiphon.config.settings import Dialect
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.events import (
    TERMINAL,
    Created,
    Event,
    InProgress,
    Lifecycle,
    Queued,
    ReasoningDelta,
    ReasoningDone,
    ReasoningTextDelta,
    ReasoningTextDone,
)
from antiphon.protocol.request import JsonSchemaFormat
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.server.keepalive import EncodeKeepalive, encode_keepalive, encode_keepalive_comment, encode_keepalive_json

Batch = Sequence[Event | Unknown]

HEADER = b"x-antiphon-compat"
_LIFECYCLE: tuple[type[Lifecycle], ...] = (Created, Queued, InProgress, *TERMINAL)
_LIFECYCLE_TYPES = frozenset(kind.__struct_config__.tag for kind in _LIFECYCLE)
_RENAMED_TYPES = frozenset({"response.reasoning_text.delta", "response.reasoning_text.done"})
_FIELDS: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])
_NULL = Raw(b"null")


class OutputDialect(msgspec.Struct, frozen=True):
    """The form of a server's output.

    `encode_keepalive` is for streams of server-sent events, `encode_keepalive_message` for WebSockets. None: idle
    WebSockets get only ping frames.
    """

    adapt_events: Callable[[Batch], Batch]
    adapt_response: Callable[[Response], Response]
    encode_keepalive: EncodeKeepalive
    encode_keepalive_message: EncodeKeepalive | None


def choose_dialect(headers: Mapping[bytes, bytes], default: Dialect) -> OutputDialect:
    """Return the dialect that a request's header names, else the configured one."""
    requested = headers.get(HEADER)
    if requested is None:
        return _DIALECTS[default]
    dialect = _DIALECTS.get(requested.strip().lower().decode("latin-1"))
    if dialect is None:
        known = ", ".join(_DIALECTS)
        raise InvalidRequest(f"The header {HEADER.decode()} must be one of: {known}.", code="invalid_header")
    return dialect


def _pass_events(batch: Batch) -> Batch:
    return batch


def _pass_response(response: Response) -> Response:
    return response


# Open Responses


def _adapt_events(batch: Batch) -> Batch:
    get_adapter = _ADAPTERS.get
    return [event if (adapt := get_adapter(type(event))) is None else adapt(event) for event in batch]


def _rename_delta(event: ReasoningTextDelta) -> Event:
    return ReasoningDelta(event.sequence_number, event.item_id, event.output_index, event.content_index, event.delta)


def _rename_done(event: ReasoningTextDone) -> Event:
    return ReasoningDone(event.sequence_number, event.item_id, event.output_index, event.content_index, event.text)


def _adapt_lifecycle(event: Lifecycle) -> Event:
    response = _remove_schema(event.response)
    return event if response is event.response else msgspec.structs.replace(event, response=response)


def _remove_schema(response: Response) -> Response:
    """Return the response with null instead of the schema of its text format: Open Responses allows only null."""
    text_format = response.text.format
    if type(text_format) is not JsonSchemaFormat or text_format.schema is None:
        return response
    echoed = msgspec.structs.replace(text_format, schema=None)
    return msgspec.structs.replace(response, text=msgspec.structs.replace(response.text, format=echoed))


def _adapt_encoded_event(event: Unknown) -> Event | Unknown:
    """Adapt an event of the event log, which is not decoded."""
    kind = event.type
    if kind in _RENAMED_TYPES:
        decoded = codec.decode_event(event.raw)
        return event if isinstance(decoded, Unknown) else _ADAPTERS[type(decoded)](decoded)
    if kind in _LIFECYCLE_TYPES and b'"json_schema"' in event.raw:
        return Unknown(_set_null(event.raw, "response", "text", "format", "schema"))
    return event


def _set_null(raw: bytes | Raw, name: str, *path: str) -> bytes:
    """Return a JSON object with null at this path. An object without the path is returned unchanged."""
    fields = _FIELDS.decode(raw)
    if name not in fields:
        return bytes(raw)
    fields[name] = Raw(_set_null(fields[name], *path)) if path else _NULL
    return codec.encode(fields)


# By the type of the event. Events of other types are the same in both dialects.
_ADAPTERS: dict[type[Any], Callable[[Any], Event | Unknown]] = {
    Unknown: _adapt_encoded_event,
    ReasoningTextDelta: _rename_delta,
    ReasoningTextDone: _rename_done,
    **dict.fromkeys(_LIFECYCLE, _adapt_lifecycle),
}
_DIALECTS: dict[str, OutputDialect] = {
    "openai": OutputDialect(_pass_events, _pass_response, encode_keepalive, encode_keepalive_json),
    "open-responses": OutputDialect(_adapt_events, _remove_schema, encode_keepalive_comment, None),
}
