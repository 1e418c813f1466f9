"""Encoded spans, compared with those of the SDK for the same calls."""

import itertools
import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from google.protobuf.json_format import ParseDict
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from antiphon.telemetry.otlp import span_queue
from antiphon.telemetry.otlp.encoder import EncodedSpans
from antiphon.telemetry.otlp.frame import SpanFrame
from antiphon.telemetry.otlp.protobuf import ProtobufEncoder
from antiphon.telemetry.otlp.provider import OtlpTracerProvider, find_finish_function
from antiphon.telemetry.otlp.span import OtlpSpan
from antiphon.telemetry.otlp.span_queue import _encode_batch

RESOURCE = Resource({"service.name": "test", "numbers": [1, 2]}, "https://example.com/resource")
REMOTE = SpanContext(0xABC, 0xDEF, True, TraceFlags(3), TraceState([("vendor", "one"), ("other", "two")]))
LOCAL = SpanContext(0x123, 0x456, False, TraceFlags(1))
VALUES: dict[str, Any] = {
    "text": "plain",
    "empty": "",
    "unicode": "Grüße, 世界 🙂",
    "long": "x" * 300,
    "longer": "y" * 40_000,
    "zero": 0,
    "one": 1,
    "true": True,
    "false": False,
    "negative": -7,
    "largest": 2**63 - 1,
    "smallest": -(2**63),
    "float": 0.25,
    "whole": 1.0,
    "infinite": float("inf"),
    "bytes": b"\x00\xff",
    "none": None,
    "strings": ["a", "", "ü"],
    "numbers": (1, 2, 3),
    "booleans": [True, False],
    "no_values": [],
    "nested": {"inner": {"deep": [1, {"x": "y"}]}, "n": 1},
    "k" * 200: "a long name",
}

LAST = 1_000_000
"""The end of spans that end now."""

Record = Callable[[trace.Tracer], None]


def record_values(tracer: trace.Tracer) -> None:
    # Twice, because the second one comes from the cache.
    for number in range(2):
        span = tracer.start_span("values", None, SpanKind.SERVER, VALUES, start_time=10 + number)
        span.end(20)


def record_equal_values(tracer: trace.Tracer) -> None:
    for value in (1, True, 1.0, "1", (1,), (True,), ("1",), 0, False):
        span = tracer.start_span("equal", start_time=1)
        span.set_attribute("same", value)
        span.end(2)


def record_tree(tracer: trace.Tracer) -> None:
    context = trace.set_span_in_context(NonRecordingSpan(REMOTE))
    parent = tracer.start_span("parent", context, SpanKind.CONSUMER, {"a": 1}, start_time=5)
    child = tracer.start_span("child", trace.set_span_in_context(parent), SpanKind.CLIENT, start_time=6)
    child.end(7)
    parent.end(8)


def record_changes(tracer: trace.Tracer) -> None:
    links = [Link(REMOTE, {"why": "before"}), Link(LOCAL), Link(trace.INVALID_SPAN_CONTEXT)]
    span = tracer.start_span("first", None, SpanKind.PRODUCER, {"a": 1, "b": 2}, links, start_time=1)
    span.update_name("renamed")
    span.set_attributes({"a": "changed", "c": [1.5]})
    span.add_event("happened", {"n": 1, "texts": ["a"]}, 3)
    span.add_event("bare", timestamp=4)
    span.add_link(LOCAL, {"more": True})
    span.set_status(StatusCode.UNSET)
    span.set_status(StatusCode.ERROR, "It failed: ü")
    span.end(9)
    span.set_attribute("late", 1)
    span.add_event("late")
    span.end(10)


def record_statuses(tracer: trace.Tracer) -> None:
    for status in (Status(StatusCode.OK), Status(StatusCode.ERROR, "no"), Status(StatusCode.ERROR)):
        span = tracer.start_span("status", start_time=1)
        span.set_status(status)
        span.set_status(StatusCode.ERROR, "later")
        span.end(2)


TYPES = {"text": str, "number": int, "ratio": float, "absent": str}
# Values of spans with one frame: texts of one length, of several lengths, and missing values.
COLUMNS: dict[str, list[tuple[Any, ...]]] = {
    "equal": [("id_1", 1, 0.5, None), ("id_2", 300, 1.0, None), ("id_1", 2**40, 0.0, None)],
    "different": [("", 0, float("inf"), None), ("Grüße", -7, -1.5, None), ("x" * 300, 2**63 - 1, 0.25, None)],
    "missing": [(None, 1, None, "a"), ("id", None, 0.5, "b"), (None, None, None, None)],
}


def record_frames(tracer: trace.Tracer) -> None:
    finish = find_finish_function(tracer)
    remote = SpanContext(0xABC, 0xDEF, True, TraceFlags(3))
    local = tracer.start_span("parent", start_time=1)
    parents = [None, NonRecordingSpan(REMOTE), NonRecordingSpan(remote), local]
    start_times = itertools.count(2)
    for name, rows in COLUMNS.items():
        attributes = {"name": name, "list": ("x", "y"), "flag": True, "replaced": 1}
        frame = SpanFrame(name, SpanKind.CLIENT.value, attributes, TYPES)
        for parent, values in itertools.product(parents, rows):
            context = None if parent is None else trace.set_span_in_context(parent)
            span = tracer.start_span("new", context, SpanKind.CLIENT, start_time=next(start_times))
            finish(span, frame, values)
        span = tracer.start_span("new", None, SpanKind.CLIENT, start_time=next(start_times))
        span.set_attributes({"replaced": "own", "number": 5, "added": "more"})
        span.set_status(StatusCode.ERROR, "It failed.")
        finish(span, frame, rows[0])
        finish(span, frame, rows[1])  # without effect
    local.end()


def record_too_much(tracer: trace.Tracer) -> None:
    links = [Link(LOCAL, {"a": "long value", "b": 2, "c": 3}) for _ in range(4)]
    attributes = {f"name_{number}": "long value" for number in range(4)}
    span = tracer.start_span("limited", None, SpanKind.INTERNAL, attributes, links, start_time=1)
    span.set_attributes({"more": ["long value", 1], "even_more": {"inner": "long value"}})
    for number in range(4):
        span.add_event(f"event {number}", {"a": "long value", "b": 2, "c": 3}, 2)
    span.end(3)


LIMITS = {
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "3",
    "OTEL_SPAN_EVENT_COUNT_LIMIT": "2",
    "OTEL_SPAN_LINK_COUNT_LIMIT": "2",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": "1",
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT": "2",
}


def normalize(request: Any) -> Any:
    """Replace random ids by the order in which they appear, and the current time by a constant.

    Sort attributes and spans: their order has no meaning.
    """
    ids: dict[bytes, bytes] = {}
    spans = [span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
    spans.sort(key=lambda span: span.start_time_unix_nano)
    for span in spans:
        for field in ("trace_id", "span_id"):
            value = getattr(span, field)
            if len(value.lstrip(b"\0")) > 2:
                setattr(span, field, ids.setdefault(value, b"%d" % len(ids)))
    for span in spans:
        span.end_time_unix_nano = min(span.end_time_unix_nano, LAST)
        span.parent_span_id = ids.get(span.parent_span_id, span.parent_span_id)
        for each in (span, *span.events, *span.links):
            each.attributes.sort(key=lambda attribute: attribute.key)
    for scope in (scope for each in request.resource_spans for scope in each.scope_spans):
        scope.spans.sort(key=lambda span: span.start_time_unix_nano)
    return request


def export_with_sdk(record: Record) -> Any:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=RESOURCE, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    record(provider.get_tracer("scope", "1.2", "https://example.com/schema", {"key": "value"}))
    return normalize(encode_spans(exporter.get_finished_spans()))


def encode(record: Record) -> list[bytes]:
    """Return the payloads of the spans. The provider has no collector, so they stay in its queue."""
    provider = OtlpTracerProvider(lambda: RESOURCE, user_agent="test", shutdown_on_exit=False)
    queue = provider.queue
    queue._start = lambda: None  # type: ignore[method-assign]  # no export
    record(provider.get_tracer("scope", "1.2", "https://example.com/schema", {"key": "value"}))
    assert queue._encoder is not None
    return list(_encode_batch(queue._encoder, list(queue.records)))


def read_json(body: bytes) -> Any:
    """Return OTLP in JSON as a message. Unlike the JSON of protobuf, it has ids in hex."""
    content = json.loads(body)
    for group in (scope for resource in content["resourceSpans"] for scope in resource["scopeSpans"]):
        for span in group["spans"]:
            for holder in (span, *span.get("links", [])):
                for field in ("traceId", "spanId", "parentSpanId"):
                    if field in holder:
                        holder[field] = b64encode(bytes.fromhex(holder[field])).decode()
    return ParseDict(content, ExportTraceServiceRequest())


RECORDS = [record_values, record_equal_values, record_tree, record_changes, record_statuses, record_frames]


@pytest.mark.parametrize("record", RECORDS)
def test_protobuf_equals_the_export_of_the_sdk(record: Record) -> None:
    (payload,) = encode(record)
    assert normalize(ExportTraceServiceRequest.FromString(payload)) == export_with_sdk(record)


@pytest.mark.parametrize("record", RECORDS)
def test_json_equals_the_export_of_the_sdk(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    (payload,) = encode(record)
    assert normalize(read_json(payload)) == export_with_sdk(record)


@pytest.mark.parametrize("length", ["", "4"])
def test_limits_equal_those_of_the_sdk(monkeypatch: pytest.MonkeyPatch, length: str) -> None:
    for name, value in LIMITS.items():
        monkeypatch.setenv(name, value)
    if length:
        monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", length)
    (payload,) = encode(record_too_much)
    assert normalize(ExportTraceServiceRequest.FromString(payload)) == export_with_sdk(record_too_much)


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json"])
def test_unusual_values_become_strings(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)

    def record(tracer: trace.Tracer) -> None:
        attributes: dict[Any, Any] = {"large": 2**70, "object": StatusCode, "surrogate": "a\ud800b", 5: "number"}
        tracer.start_span("odd \ud800", attributes=attributes).end()

    (payload,) = encode(record)
    message = read_json(payload) if protocol == "http/json" else ExportTraceServiceRequest.FromString(payload)
    span = message.resource_spans[0].scope_spans[0].spans[0]
    found = {each.key: each.value.string_value for each in span.attributes}
    assert (span.name, found) == (
        "odd ?",
        {"large": str(2**70), "object": str(StatusCode), "surrogate": "a?b", "5": "number"},
    )


def test_exception_in_a_span_is_recorded_as_by_the_sdk() -> None:
    def record(tracer: trace.Tracer) -> None:
        with pytest.raises(LookupError), tracer.start_span("failing", start_time=1):
            raise LookupError("gone")
        with pytest.raises(LookupError), tracer.start_as_current_span("current", start_time=1):
            raise LookupError("gone")

    def describe(request: Any) -> list[Any]:
        spans = request.resource_spans[0].scope_spans[0].spans
        events = [
            (each.name, [(a.key, a.value.string_value[:30]) for a in each.attributes])
            for span in spans
            for each in span.events
        ]
        return [[(span.name, span.status.message) for span in spans], events]

    (payload,) = encode(record)
    assert describe(normalize(ExportTraceServiceRequest.FromString(payload))) == describe(export_with_sdk(record))


def test_large_batch_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_queue, "_MAX_PAYLOAD_BYTES", 1000)

    def record(tracer: trace.Tracer) -> None:
        for number, size in enumerate((400, 400, 400, 5000)):
            tracer.start_span(str(number), attributes={"text": "x" * size}).end()

    messages = [ExportTraceServiceRequest.FromString(payload) for payload in encode(record)]
    names = [[span.name for span in each.resource_spans[0].scope_spans[0].spans] for each in messages]
    assert names == [["0", "1"], ["2"], ["3"]]


def test_large_spans_are_encoded_when_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of spans with the text of prompts would take half a gigabyte, twice."""
    monkeypatch.setattr(span_queue, "_MAX_PAYLOAD_BYTES", 10_000)
    provider = OtlpTracerProvider(lambda: RESOURCE, user_agent="test", shutdown_on_exit=False)
    queue, encoder = provider.queue, ProtobufEncoder({})
    queue._start = lambda: None  # type: ignore[method-assign]  # no export
    tracer = provider.get_tracer("scope")
    for number in range(9):
        tracer.start_span(f"text {number}", attributes={"text": "x" * 4000}).end()
        tracer.start_span(f"plain {number}").end()
    failed = tracer.start_span("failed")
    failed.set_status(StatusCode.ERROR, "x" * 9000)
    failed.end()
    encoded: list[int] = []
    encode_spans = encoder.encode_spans

    def count_spans(spans: Sequence[OtlpSpan]) -> EncodedSpans:
        encoded.append(len(spans))
        return encode_spans(spans)

    monkeypatch.setattr(encoder, "encode_spans", count_spans)
    sizes = [(len(payload) < 10_000, sum(encoded)) for payload in _encode_batch(encoder, list(queue.records))]
    assert sizes == [(True, 4), (True, 8), (True, 12), (True, 16), (True, 18), (True, 19)]


@pytest.mark.parametrize("values", [("a", 5.0), ("a", "5"), (5, 1), (b"a", 1)])
def test_value_of_another_type_than_its_column_loses_no_span(values: tuple[Any, ...]) -> None:
    """A backend of another package may report anything as its usage."""
    frame = SpanFrame("name", SpanKind.CLIENT.value, {}, {"text": str, "number": int})

    def record(tracer: trace.Tracer) -> None:
        for number, each in enumerate((("x", 1), values, ("y", 2))):
            span = tracer.start_span("new", None, SpanKind.CLIENT, start_time=number + 1)
            find_finish_function(tracer)(span, frame, each)
        tracer.start_span("other", start_time=9).end()

    (payload,) = encode(record)
    assert normalize(ExportTraceServiceRequest.FromString(payload)) == export_with_sdk(record)


def test_span_that_cannot_be_encoded_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def record(tracer: trace.Tracer) -> None:
        tracer.start_span("wrong", start_time=-1).end()
        tracer.start_span("right").end()

    (payload,) = encode(record)
    (group,) = ExportTraceServiceRequest.FromString(payload).resource_spans[0].scope_spans
    assert [span.name for span in group.spans] == ["right"]
    assert "a span could not be encoded" in caplog.text


def test_cache_of_attributes_is_bounded() -> None:
    def record(tracer: trace.Tracer) -> None:
        for number in range(600):
            tracer.start_span(f"name {number}", attributes={"id": f"id_{number}", f"name_{number}": number}).end()

    provider_payloads = encode(record)
    spans = [
        span
        for payload in provider_payloads
        for span in ExportTraceServiceRequest.FromString(payload).resource_spans[0].scope_spans[0].spans
    ]
    assert [span.attributes[0].value.string_value for span in spans] == [f"id_{number}" for number in range(600)]
    assert [span.attributes[1].key for span in spans] == [f"name_{number}" for number in range(600)]


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json"])
@pytest.mark.parametrize("variable", ["OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"])
def test_limits_of_frames_equal_those_of_the_sdk(monkeypatch: pytest.MonkeyPatch, protocol: str, variable: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv(variable, "3")
    (payload,) = encode(record_frames)
    message = read_json(payload) if protocol == "http/json" else ExportTraceServiceRequest.FromString(payload)
    assert normalize(message) == export_with_sdk(record_frames)


def test_more_values_of_a_frame_than_the_cache_holds_are_encoded() -> None:
    frame = SpanFrame("name", SpanKind.CLIENT.value, {}, {"text": str, "number": int})
    rows = [("x" * number, number * 100) for number in range(600)]

    def record(tracer: trace.Tracer) -> None:
        for values in rows:
            find_finish_function(tracer)(tracer.start_span("new"), frame, values)

    (payload,) = encode(record)
    spans = ExportTraceServiceRequest.FromString(payload).resource_spans[0].scope_spans[0].spans
    found = [tuple(each.value for each in span.attributes) for span in spans]
    assert [(text.string_value, number.int_value) for text, number in found] == rows


def test_surrogate_in_a_frame_is_replaced() -> None:
    frame = SpanFrame("name", SpanKind.CLIENT.value, {}, {"text": str})

    def record(tracer: trace.Tracer) -> None:
        for text in ("id_1", "a\ud800"):
            find_finish_function(tracer)(tracer.start_span("new"), frame, (text,))

    (payload,) = encode(record)
    spans = ExportTraceServiceRequest.FromString(payload).resource_spans[0].scope_spans[0].spans
    assert [span.attributes[0].value.string_value for span in spans] == ["id_1", "a?"]


def test_span_is_a_span_of_the_api() -> None:
    def record(tracer: trace.Tracer) -> None:
        span = tracer.start_span("one")
        assert type(span) is OtlpSpan
        assert isinstance(span, trace.Span)
        context = span.get_span_context()
        assert (context.is_valid, context.is_remote, context.trace_flags) == (True, False, 3)
        with trace.use_span(span, end_on_exit=True):
            assert trace.get_current_span() is span
        assert not span.is_recording()

    assert len(encode(record)) == 1
