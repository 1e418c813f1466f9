"""Spans as OTLP messages in protobuf, encoded directly to bytes.

The numbers are those of the fields in `opentelemetry/proto/trace/v1/trace.proto` and the files that it imports. Most
attributes of spans repeat: names of models, paths, hosts. So attributes of few and short values are encoded once.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import add
from typing import Any

from opentelemetry.trace import SpanContext

from antiphon.telemetry.otlp.attributes import INT64
from antiphon.telemetry.otlp.encoder import EncodedPart, EncodedSpans, encode_each
from antiphon.telemetry.otlp.frame import SpanFrame
from antiphon.telemetry.otlp.span import (
    OtlpSpan,
    SpanDetails,
    SpanRecord,
    TracerScope,
    make_parent_flags,
    restore_span,
)

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

# Bounds of the caches.
_MAX_NUMBERS = 256
_MAX_HEADS = 256


def _encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class _Varints(dict[int, bytes]):
    """Encoded numbers. Small ones, such as lengths, are encoded once."""

    def __missing__(self, number: int) -> bytes:
        encoded = _encode_varint(number)
        if number < 1 << 14:
            self[number] = encoded
        return encoded


_varints = _Varints()


def _make_tag(field: int, wire_type: int) -> bytes:
    return _encode_varint(field << 3 | wire_type)


def _encode_message(tag: bytes, content: bytes) -> bytes:
    return tag + _varints[len(content)] + content


def _encode_text(tag: bytes, text: str) -> bytes:
    """Return a field of type string. A surrogate, which UTF-8 cannot encode, is replaced."""
    return _encode_message(tag, text.encode(errors="replace"))


def _encode_count(tag: bytes, count: int) -> bytes:
    """Return a field with a number. The default value, zero, is left out."""
    return tag + _varints[count] if count else b""


# AnyValue and KeyValue
_KEY, _VALUE = _make_tag(1, _LENGTH), _make_tag(2, _LENGTH)
_ENTRY = _make_tag(1, _LENGTH)
_STRING_VALUE = _make_tag(1, _LENGTH)
_BOOL_VALUE = _make_tag(2, _VARINT)
_INT_VALUE = _make_tag(3, _VARINT)
_DOUBLE_VALUE = _make_tag(4, _FIXED64)
_ARRAY_VALUE = _make_tag(5, _LENGTH)
_MAPPING_VALUE = _make_tag(6, _LENGTH)
_BYTES_VALUE = _make_tag(7, _LENGTH)
_pack_double = struct.Struct("<d").pack


def _encode_value(value: Any) -> bytes:
    """Return an AnyValue. A number of more than 64 bits becomes a string."""
    if isinstance(value, str):
        return _encode_text(_STRING_VALUE, value)
    if isinstance(value, bool):
        return _BOOL_VALUE + (b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _INT_VALUE + _varints[value % (1 << 64)] if value in INT64 else _encode_value(str(value))
    if isinstance(value, float):
        return _DOUBLE_VALUE + _pack_double(value)
    if isinstance(value, bytes):
        return _encode_message(_BYTES_VALUE, value)
    if isinstance(value, Mapping):
        return _encode_message(_MAPPING_VALUE, _encode_attributes(_ENTRY, value))
    if isinstance(value, Sequence):
        return _encode_message(_ARRAY_VALUE, b"".join([_encode_message(_ENTRY, _encode_value(each)) for each in value]))
    return b"" if value is None else _encode_value(str(value))


def _encode_attribute(tag: bytes, name: str, value: Any) -> bytes:
    return _encode_message(tag, _encode_text(_KEY, str(name)) + _encode_message(_VALUE, _encode_value(value)))


def _encode_attributes(tag: bytes, attributes: Mapping[str, Any]) -> bytes:
    return b"".join([_encode_attribute(tag, name, value) for name, value in attributes.items()])


# Span
_TRACE_STATE = _make_tag(3, _LENGTH)
_NAME = _make_tag(5, _LENGTH)
_KIND = _make_tag(6, _VARINT)
_ATTRIBUTE = _make_tag(9, _LENGTH)
_DROPPED_ATTRIBUTES = _make_tag(10, _VARINT)
_EVENT = _make_tag(11, _LENGTH)
_DROPPED_EVENTS = _make_tag(12, _VARINT)
_LINK = _make_tag(13, _LENGTH)
_DROPPED_LINKS = _make_tag(14, _VARINT)
_STATUS = _make_tag(15, _LENGTH)
_FLAGS = _make_tag(16, _FIXED32)
# The ids, with their lengths.
_TRACE_ID = _make_tag(1, _LENGTH) + b"\x10"
_SPAN_ID = _make_tag(2, _LENGTH) + b"\x08"
_PARENT_ID = _make_tag(4, _LENGTH) + b"\x08"
_START, _END = _make_tag(7, _FIXED64), _make_tag(8, _FIXED64)

# Event and Link
_EVENT_TIME = _make_tag(1, _FIXED64)
_EVENT_NAME = _make_tag(2, _LENGTH)
_EVENT_ATTRIBUTE = _make_tag(3, _LENGTH)
_EVENT_DROPPED = _make_tag(4, _VARINT)
_LINK_ATTRIBUTE = _make_tag(4, _LENGTH)
_LINK_DROPPED = _make_tag(5, _VARINT)
_LINK_FLAGS = _make_tag(6, _FIXED32)
_pack_fixed64 = struct.Struct("<Q").pack
_pack_fixed32 = struct.Struct("<I").pack

# Status
_STATUS_MESSAGE = _make_tag(2, _LENGTH)
_STATUS_CODE = _make_tag(3, _VARINT)

# Messages around the spans
_RESOURCE_SPANS = _make_tag(1, _LENGTH)
_RESOURCE = _make_tag(1, _LENGTH)
_RESOURCE_ATTRIBUTE = _make_tag(1, _LENGTH)
_SCOPE_SPANS = _make_tag(2, _LENGTH)
_SCOPE = _make_tag(1, _LENGTH)
_SCOPE_NAME = _make_tag(1, _LENGTH)
_SCOPE_VERSION = _make_tag(2, _LENGTH)
_SCOPE_ATTRIBUTE = _make_tag(3, _LENGTH)
_SPAN = _make_tag(2, _LENGTH)
_SCHEMA_URL = _make_tag(3, _LENGTH)

# The end of most spans: a status that is not set, and the flags.
_NO_STATUS = _STATUS + b"\x00"
_LOCAL = _FLAGS + _pack_fixed32(make_parent_flags(is_remote=False))
_REMOTE = _FLAGS + _pack_fixed32(make_parent_flags(is_remote=True))


class _Heads(dict[int, bytes]):
    """The bytes of an attribute before its value, by the size of the value. The number of entries is bounded."""

    def __init__(self, name: str, value_tag: bytes, *, has_length: bool) -> None:
        self._key = _encode_text(_KEY, name)
        self._value_tag = value_tag
        self._has_length = has_length

    def __missing__(self, size: int) -> bytes:
        value = self._value_tag + _varints[size] if self._has_length else self._value_tag
        entry = self._key + _VALUE + _varints[len(value) + size] + value
        head = _ATTRIBUTE + _varints[len(entry) + size] + entry
        if size < _MAX_HEADS:
            self[size] = head
        return head


class _EncodedNumbers(dict[int | None, bytes]):
    """Encoded attributes of one name, by their value. None is left out. The number of entries is bounded."""

    def __init__(self, name: str) -> None:
        super().__init__({None: b""})
        self._name = name
        self._heads = _Heads(name, _INT_VALUE, has_length=False)

    def __missing__(self, value: Any) -> bytes:
        # A backend of another package may count in floats. A range compares one with all of its numbers.
        if not isinstance(value, int) or value not in INT64:
            return _encode_attribute(_ATTRIBUTE, self._name, value)
        number = _varints[value % (1 << 64)]
        encoded = self._heads[len(number)] + number
        if len(self) < _MAX_NUMBERS:
            self[value] = encoded
        return encoded


class _Columns:
    """The fields of several spans of one frame. A column has one value a span. Loops over the spans run in C.

    Fields whose length is the same in all spans are packed with one struct. The others follow: fields of a message can
    have any order.
    """

    def __init__(self) -> None:
        self._constant = b""
        self._heads: list[bytes] = []
        self._formats: list[str] = []
        self._packed: list[Iterable[Any]] = []
        self._sized: list[Sequence[bytes]] = []

    def add_constant(self, encoded: bytes) -> None:
        """Add encoded fields that are the same in all spans."""
        self._constant += encoded

    def add(self, head: bytes, code: str, column: Iterable[Any]) -> None:
        """Add a field whose values have one length. `head` is before each value, and `code` its format in a struct."""
        self._heads.append(head)
        self._formats.append(code)
        self._packed.append(column)

    def add_sized(self, column: Sequence[bytes]) -> None:
        """Add encoded fields of different lengths, or parts of such fields in their order."""
        self._sized.append(column)

    def join(self, count: int) -> EncodedPart:
        """Return this number of spans as fields of the message around them."""
        heads = [self._constant + self._heads[0], *self._heads[1:]]
        size = self._make_struct(heads).size
        if not self._sized:
            heads[0] = _SPAN + _varints[size] + heads[0]
        packed = self._make_struct(heads)
        fields = chain.from_iterable(zip(map(repeat, heads), self._packed, strict=True))
        # All are packed now: a value of a wrong type must fail here.
        spans = list(map(packed.pack, *fields))
        if not self._sized:
            return EncodedPart(spans, count * packed.size)
        lengths = map(len, self._sized[0])
        for column in self._sized[1:]:
            lengths = map(add, lengths, map(len, column))
        sizes = list(map(add, lengths, repeat(size)))
        tags = [_SPAN + _varints[size] for size in sizes]
        pieces = chain.from_iterable(zip(tags, spans, *self._sized, strict=True))
        return EncodedPart(pieces, sum(sizes) + sum(map(len, tags)))

    def _make_struct(self, heads: Sequence[bytes]) -> struct.Struct:
        codes = zip(heads, self._formats, strict=True)
        return struct.Struct("<" + "".join([f"{len(head)}s{code}" for head, code in codes]))


class _TextAttribute:
    """Encodes the values of one attribute of type str in many spans."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._heads = _Heads(name, _STRING_VALUE, has_length=True)

    def add_values(self, values: Sequence[Any], columns: _Columns) -> None:
        if not all(values):
            _add_some(self._name, values, columns)
            return
        try:
            encoded = list(map(str.encode, values))
        except UnicodeEncodeError:  # a surrogate
            _add_some(self._name, values, columns)
            return
        lengths = list(map(len, encoded))
        if lengths.count(lengths[0]) == len(lengths):
            columns.add(self._heads[lengths[0]], f"{lengths[0]}s", encoded)
        else:
            columns.add_sized(list(map(self._heads.__getitem__, lengths)))
            columns.add_sized(encoded)


class _NumberAttribute:
    """Encodes the values of one attribute of type int in many spans."""

    def __init__(self, name: str) -> None:
        self._numbers = _EncodedNumbers(name)

    def add_values(self, values: Sequence[Any], columns: _Columns) -> None:
        if values.count(values[0]) == len(values):  # many counts are zero
            columns.add_constant(self._numbers[values[0]])
        else:
            columns.add_sized(list(map(self._numbers.__getitem__, values)))


class _DoubleAttribute:
    """Encodes the values of one attribute of type float in many spans."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._head = _encode_attribute(_ATTRIBUTE, name, 0.0)[:-8]

    def add_values(self, values: Sequence[Any], columns: _Columns) -> None:
        if all(values):
            columns.add(self._head, "d", values)
        else:
            _add_some(self._name, values, columns)


def _add_some(name: str, values: Sequence[Any], columns: _Columns) -> None:
    """Add an attribute that some spans do not have: their value is None. The values can have any type."""
    if values.count(None) < len(values):
        encode = _encode_attribute
        columns.add_sized([b"" if value is None else encode(_ATTRIBUTE, name, value) for value in values])


_Attribute = _TextAttribute | _NumberAttribute | _DoubleAttribute
_ATTRIBUTE_TYPES: dict[type, type[_Attribute]] = {str: _TextAttribute, int: _NumberAttribute, float: _DoubleAttribute}


class ProtobufEncoder:
    """Encodes spans of one process. Not safe for threads."""

    content_type = "application/x-protobuf"

    def __init__(self, resource: Mapping[str, Any], schema_url: str = "") -> None:
        encoded = _encode_attributes(_RESOURCE_ATTRIBUTE, resource)
        self._resource = _encode_message(_RESOURCE, encoded)
        self._end = _encode_text(_SCHEMA_URL, schema_url) if schema_url else b""
        self._scopes: dict[TracerScope, tuple[bytes, bytes]] = {}
        self._attributes: dict[tuple[str, type], _Attribute] = {}

    def encode_records(self, frame: SpanFrame, records: Sequence[SpanRecord]) -> list[EncodedPart]:
        try:
            return [self._encode_columns(frame, records)]
        except Exception:  # a value of another type than that of its column
            return self.encode_spans([restore_span(record) for record in records])

    def encode_spans(self, spans: Sequence[OtlpSpan]) -> list[EncodedPart]:
        return encode_each(_encode_span, spans)

    def join_spans(self, encoded: EncodedSpans) -> bytes:
        # Every piece is copied once: lengths are known before the pieces are joined.
        pieces: list[Iterable[bytes]] = []
        size = len(self._resource) + len(self._end)
        for scope, parts in encoded.items():
            head, end = self._scopes.get(scope) or self._encode_scope(scope)
            length = len(head) + len(end) + sum(part.size for part in parts)
            tag = _SCOPE_SPANS + _varints[length]
            pieces += [(tag, head), *(part.pieces for part in parts), (end,)]
            size += len(tag) + length
        start = (_RESOURCE_SPANS + _varints[size], self._resource)
        return b"".join(chain(start, chain.from_iterable(pieces), (self._end,)))

    def _encode_columns(self, frame: SpanFrame, records: Sequence[SpanRecord]) -> EncodedPart:
        if not frame.encoded:
            frame.encoded = _encode_frame(frame)
        _, _, trace_ids, span_ids, parent_ids, starts, ends, values = zip(*records, strict=True)
        columns = _Columns()
        columns.add_constant(frame.encoded)
        columns.add(_TRACE_ID, "16s", trace_ids)
        columns.add(_SPAN_ID, "8s", span_ids)
        if all(parent_ids):
            columns.add(_PARENT_ID, "8s", parent_ids)
        elif any(parent_ids):
            columns.add_sized([_PARENT_ID + parent_id if parent_id else b"" for parent_id in parent_ids])
        columns.add(_START, "Q", starts)
        columns.add(_END, "Q", ends)
        for attribute, column in zip(frame.types.items(), zip(*values, strict=True), strict=True):
            self._find_attribute(attribute).add_values(column, columns)
        return columns.join(len(records))

    def _find_attribute(self, attribute: tuple[str, type]) -> _Attribute:
        if attribute not in self._attributes:
            name, kind = attribute
            self._attributes[attribute] = _ATTRIBUTE_TYPES[kind](name)
        return self._attributes[attribute]

    def _encode_scope(self, scope: TracerScope) -> tuple[bytes, bytes]:
        encoded = _encode_text(_SCOPE_NAME, scope.name) if scope.name else b""
        encoded += _encode_text(_SCOPE_VERSION, scope.version) if scope.version else b""
        encoded += _encode_attributes(_SCOPE_ATTRIBUTE, scope.attributes)
        end = _encode_text(_SCHEMA_URL, scope.schema_url) if scope.schema_url else b""
        self._scopes[scope] = _encode_message(_SCOPE, encoded), end
        return self._scopes[scope]


def _encode_frame(frame: SpanFrame) -> bytes:
    return b"".join(
        (
            _encode_text(_NAME, frame.name),
            _KIND + _varints[frame.kind + 1],
            _encode_attributes(_ATTRIBUTE, frame.attributes),
            _NO_STATUS,
            _REMOTE if frame.has_remote_parent else _LOCAL,
        )
    )


def _encode_span(span: OtlpSpan) -> bytes:
    parts = [
        _TRACE_ID + span.trace_id,
        _SPAN_ID + span.span_id,
        _PARENT_ID + span.parent_id if span.parent_id else b"",
        _encode_text(_NAME, span.name),
        _KIND + _varints[span.kind + 1],
        _START + _pack_fixed64(span.start_time),
        _END + _pack_fixed64(span.end_time),
        _NO_STATUS if span.details is None else _encode_details(span.details),
        _REMOTE if span.has_remote_parent else _LOCAL,
    ]
    return _encode_message(_SPAN, b"".join(parts))


def _encode_details(details: SpanDetails) -> bytes:
    parts = [
        _encode_text(_TRACE_STATE, details.trace_state.to_header()) if details.trace_state else b"",
        _encode_attributes(_ATTRIBUTE, details.attributes),
        _encode_count(_DROPPED_ATTRIBUTES, details.dropped_attributes),
    ]
    for event in details.events:
        encoded = (
            _EVENT_TIME
            + _pack_fixed64(event.timestamp)
            + _encode_text(_EVENT_NAME, event.name)
            + _encode_attributes(_EVENT_ATTRIBUTE, event.attributes)
            + _encode_count(_EVENT_DROPPED, event.dropped_attributes)
        )
        parts.append(_encode_message(_EVENT, encoded))
    parts.append(_encode_count(_DROPPED_EVENTS, details.dropped_events))
    for link in details.links:
        encoded = (
            _encode_ids(link.context)
            + _encode_attributes(_LINK_ATTRIBUTE, link.attributes)
            + _encode_count(_LINK_DROPPED, link.dropped_attributes)
            + _LINK_FLAGS
            + _pack_fixed32(make_parent_flags(is_remote=link.context.is_remote))
        )
        parts.append(_encode_message(_LINK, encoded))
    parts.append(_encode_count(_DROPPED_LINKS, details.dropped_links))
    message = _encode_text(_STATUS_MESSAGE, details.status_message) if details.status_message else b""
    parts.append(_encode_message(_STATUS, message + _encode_count(_STATUS_CODE, details.status_code.value)))
    return b"".join(parts)


def _encode_ids(context: SpanContext) -> bytes:
    """Return the ids of a linked span. The SDK leaves out its `tracestate`, too."""
    trace_id: int = context.trace_id
    span_id: int = context.span_id
    return _TRACE_ID + trace_id.to_bytes(16, "big") + _SPAN_ID + span_id.to_bytes(8, "big")
