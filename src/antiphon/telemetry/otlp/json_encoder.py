"""Spans as OTLP messages in JSON: OTEL_EXPORTER_OTLP_PROTOCOL=http/json.

The format is the JSON mapping of protobuf, but ids are in hex and enumerations are numbers.
"""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from antiphon.telemetry.otlp.attributes import INT64
from antiphon.telemetry.otlp.encoder import EncodedPart, EncodedSpans, encode_each
from antiphon.telemetry.otlp.frame import SpanFrame
from antiphon.telemetry.otlp.span import (
    OtlpSpan,
    SpanDetails,
    SpanEvent,
    SpanLink,
    SpanRecord,
    make_parent_flags,
    restore_span,
)

_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


class JsonEncoder:
    """Encodes spans of one process."""

    content_type = "application/json"

    def __init__(self, resource: Mapping[str, Any], schema_url: str = "") -> None:
        self._resource = {"attributes": _convert_attributes(resource)}
        self._schema_url = {"schemaUrl": schema_url} if schema_url else {}

    def encode_records(self, frame: SpanFrame, records: Sequence[SpanRecord]) -> list[EncodedPart]:
        return encode_each(_encode_span, map(restore_span, records))

    def encode_spans(self, spans: Sequence[OtlpSpan]) -> list[EncodedPart]:
        return encode_each(_encode_span, spans)

    def join_spans(self, encoded: EncodedSpans) -> bytes:
        """Return the request to the collector for encoded spans."""
        scopes = []
        for scope, parts in encoded.items():
            described = _omit_empty(
                {"name": scope.name, "version": scope.version, "attributes": _convert_attributes(scope.attributes)}
            )
            group: dict[str, Any] = {
                "scope": described,
                "spans": [msgspec.Raw(span) for part in parts for span in part.pieces],
            }
            scopes.append(group | ({"schemaUrl": scope.schema_url} if scope.schema_url else {}))
        message = {"resource": self._resource, "scopeSpans": scopes, **self._schema_url}
        return _encode({"resourceSpans": [message]})


def _encode_span(span: OtlpSpan) -> bytes:
    details = span.details or SpanDetails()
    message = _omit_empty(
        {
            "traceId": span.trace_id.hex(),
            "spanId": span.span_id.hex(),
            "traceState": details.trace_state.to_header() if details.trace_state else "",
            "parentSpanId": span.parent_id.hex(),
            "name": span.name,
            "kind": span.kind + 1,
            "startTimeUnixNano": str(span.start_time),
            "endTimeUnixNano": str(span.end_time),
            "attributes": _convert_attributes(details.attributes),
            "droppedAttributesCount": details.dropped_attributes,
            "events": [_convert_event(event) for event in details.events],
            "droppedEventsCount": details.dropped_events,
            "links": [_convert_link(link) for link in details.links],
            "droppedLinksCount": details.dropped_links,
            "flags": make_parent_flags(is_remote=span.has_remote_parent),
        }
    )
    message["status"] = _omit_empty({"message": details.status_message, "code": details.status_code.value})
    return _encode(message)


def _encode(message: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:  # a surrogate, which UTF-8 cannot encode
        return msgspec.json.encode(_replace_surrogates(message))


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_replace_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {_replace_surrogates(name): _replace_surrogates(each) for name, each in value.items()}
    return value


def _omit_empty(message: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that do not have the default value."""
    return {name: value for name, value in message.items() if value}


def _convert_event(event: SpanEvent) -> dict[str, Any]:
    return _omit_empty(
        {
            "timeUnixNano": str(event.timestamp),
            "name": event.name,
            "attributes": _convert_attributes(event.attributes),
            "droppedAttributesCount": event.dropped_attributes,
        }
    )


def _convert_link(link: SpanLink) -> dict[str, Any]:
    context = link.context
    return _omit_empty(
        {
            "traceId": f"{context.trace_id:032x}",
            "spanId": f"{context.span_id:016x}",
            "attributes": _convert_attributes(link.attributes),
            "droppedAttributesCount": link.dropped_attributes,
            "flags": make_parent_flags(is_remote=context.is_remote),
        }
    )


def _convert_attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": str(name), "value": _convert_value(value)} for name, value in attributes.items()]


def _convert_value(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": str(value)}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue" if value in INT64 else "stringValue": str(int(value))}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _NOT_FINITE.get(value, "NaN")}
    if isinstance(value, bytes):
        return {"bytesValue": b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {"kvlistValue": {"values": _convert_attributes(value)}}
    if isinstance(value, Sequence):
        return {"arrayValue": {"values": [_convert_value(each) for each in value]}}
    return {} if value is None else {"stringValue": str(value)}
