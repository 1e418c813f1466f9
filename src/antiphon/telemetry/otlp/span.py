"""A recorded span. It holds its data until the export thread encodes it."""

import traceback
from collections.abc import Mapping
from time import time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
from opentelemetry.trace import Span, SpanContext, Status, StatusCode, TraceFlags, TraceState

from antiphon.telemetry.otlp.attributes import Attributes, add_attributes
from antiphon.telemetry.otlp.frame import SpanFrame

if TYPE_CHECKING:
    from antiphon.telemetry.otlp.provider import OtlpTracer

# Flags of OTLP about the parent of a span, or about a linked span.
_IS_REMOTE_KNOWN, _IS_REMOTE = 0x100, 0x200

_FLAGS = [f"{flags:02x}" for flags in range(256)]

# Each of these names is looked up by a function of the enumeration.
_UNSET, _OK, _ERROR = StatusCode.UNSET, StatusCode.OK, StatusCode.ERROR


def make_parent_flags(*, is_remote: bool) -> int:
    """Return the flags of OTLP that state if the parent, or a linked span, belongs to another process."""
    return _IS_REMOTE_KNOWN | _IS_REMOTE if is_remote else _IS_REMOTE_KNOWN


class TracerScope:
    """The instrumentation scope of a tracer. A tracer has one object, so it is compared by identity."""

    __slots__ = ("attributes", "name", "schema_url", "version")

    def __init__(self, name: str, version: str, schema_url: str, attributes: Attributes) -> None:
        self.name = name
        self.version = version
        self.schema_url = schema_url
        self.attributes = attributes


class SpanEvent(NamedTuple):
    name: str
    timestamp: int
    attributes: Attributes
    dropped_attributes: int


class SpanLink(NamedTuple):
    context: SpanContext
    attributes: Attributes
    dropped_attributes: int


class SpanDetails:
    """The parts that most spans do not have before their end."""

    __slots__ = (
        "attributes",
        "dropped_attributes",
        "dropped_events",
        "dropped_links",
        "events",
        "links",
        "records_exception",
        "sets_status_on_exception",
        "status_code",
        "status_message",
        "trace_state",
    )

    def __init__(self, trace_state: TraceState | None = None) -> None:
        self.trace_state = trace_state
        self.attributes: Attributes = {}
        self.dropped_attributes = 0
        self.events: list[SpanEvent] = []
        self.dropped_events = 0
        self.links: list[SpanLink] = []
        self.dropped_links = 0
        self.status_code = _UNSET
        self.status_message: str | None = None
        self.records_exception = self.sets_status_on_exception = True


StartedCall = tuple["OtlpSpan", bytes, int]
"""A model call without a span object: the span above it, the id of its own span, and its start."""

SpanRecord = tuple[Any, ...]
"""A span that has ended, as it waits for its export.

The fields are: frame, tracer, trace id, span id, parent id, start, end, and the values of the attributes. The record of
a span without a frame is None and the span.
"""


class OtlpSpan(msgspec.Struct, eq=False, gc=False):
    """A span. Times are in nanoseconds. After its end it does not change any more.

    A span that is not sampled ends when it starts, so it records nothing. It only passes on the ids of its trace.

    `kind` is the number of the SpanKind. `call_id` and `call_header` are the id and the header of the first model
    call below this span; the id is cleared when the call starts. `sent_header` is this header while the request of the
    call is sent. The classes of msgspec are made in C, so this one is only registered as a subclass of OpenTelemetry's
    `Span`.
    """

    tracer: "OtlpTracer"
    name: str
    kind: int
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    flags: int
    start_time: int
    call_id: bytes = b""
    call_header: bytes = b""
    has_remote_parent: bool = False
    details: SpanDetails | None = None
    end_time: int = 0
    context: SpanContext | None = None
    sent_header: bytes = b""

    @property
    def trace_state(self) -> TraceState | None:
        return None if self.details is None else self.details.trace_state

    def get_span_context(self) -> SpanContext:
        # Most spans are never asked for it, and it takes longer than all the rest of a new span.
        context = self.context
        if context is None:
            trace_id, span_id = int.from_bytes(self.trace_id, "big"), int.from_bytes(self.span_id, "big")
            context = self.context = SpanContext(trace_id, span_id, False, TraceFlags(self.flags), self.trace_state)
        return context

    def format_traceparent(self) -> str:
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{_FLAGS[self.flags]}"

    def is_sampled(self) -> bool:
        return bool(self.flags & TraceFlags.SAMPLED)

    def is_recording(self) -> bool:
        return not self.end_time

    def set_attribute(self, key: str, value: Any) -> None:
        self.set_attributes({key: value})

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        if self.end_time:
            return
        details = self.get_details()
        if len(details.attributes) + len(attributes) <= self.tracer.max_unchecked:
            details.attributes.update(attributes)
            return
        limits = self.tracer.limits
        details.dropped_attributes += add_attributes(
            details.attributes, attributes, limits.max_span_attributes, limits.max_span_attribute_length
        )

    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None) -> None:
        if self.end_time:
            return
        limits = self.tracer.limits
        added: Attributes = {}
        dropped = add_attributes(added, attributes or {}, limits.max_event_attributes, limits.max_attribute_length)
        event = SpanEvent(name, time_ns() if timestamp is None else timestamp, added, dropped)
        details = self.get_details()
        details.dropped_events += _append(details.events, event, limits.max_events)

    def add_link(self, context: SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        if self.end_time or not (context.is_valid or attributes or context.trace_state):
            return
        limits = self.tracer.limits
        added: Attributes = {}
        dropped = add_attributes(added, attributes or {}, limits.max_link_attributes, limits.max_attribute_length)
        details = self.get_details()
        details.dropped_links += _append(details.links, SpanLink(context, added, dropped), limits.max_links)

    def update_name(self, name: str) -> None:
        if not self.end_time:
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if self.end_time:
            return
        if not isinstance(status, Status):
            status = Status(status, description)
        details = self.get_details()
        # A status OK is final.
        if details.status_code is not _OK and status.status_code is not _UNSET:
            details.status_code, details.status_message = status.status_code, status.description

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        kind = type(exception)
        is_builtin = kind.__module__ in ("", "builtins", None)
        described: Attributes = {
            "exception.type": kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}",
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**described, **(attributes or {})}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        if not self.end_time:
            self.end_time = time_ns() if end_time is None else end_time
            self.tracer.queue.add((None, self))

    def finish(self, frame: SpanFrame, values: tuple[Any, ...]) -> None:
        """Set the name and the last attributes of a span, and end it."""
        if self.end_time:
            return
        end_time = time_ns()
        if self.details is not None:
            self.name = frame.name
            self.set_attributes(frame.merge_values(values))
            self.end(end_time)
            return
        self.end_time = end_time
        if self.has_remote_parent:
            frame = frame.get_remote()
        tracer = self.tracer
        queue = tracer.queue
        records = queue.records  # as in `add`, without another call
        records.append((frame, tracer, self.trace_id, self.span_id, self.parent_id, self.start_time, end_time, values))
        if len(records) >= queue.alert_size:
            queue.handle_alert()

    def get_details(self) -> SpanDetails:
        if self.details is None:
            self.details = SpanDetails()
        return self.details

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        if exc_val is not None and self.is_recording():
            details = self.get_details()
            if details.records_exception:
                self.record_exception(exc_val, escaped=True)
            if details.sets_status_on_exception:
                self.set_status(_ERROR, f"{type(exc_val).__name__}: {exc_val}")
        self.end()


Span.register(OtlpSpan)


def restore_span(record: SpanRecord) -> OtlpSpan:
    """Return the span of a record with a frame, with all of its attributes."""
    frame, tracer, trace_id, span_id, parent_id, start_time, end_time, values = record
    details = SpanDetails()
    details.attributes = frame.merge_values(values)
    ids = (trace_id, span_id, parent_id)
    return OtlpSpan(
        tracer,
        frame.name,
        frame.kind,
        *ids,
        0,
        start_time,
        has_remote_parent=frame.has_remote_parent,
        details=details,
        end_time=end_time,
    )


def _append(entries: list[Any], entry: Any, max_count: int | None) -> int:
    """Append an entry. Return the number of older ones that are dropped because there are too many."""
    entries.append(entry)
    if max_count is None or len(entries) <= max_count:
        return 0
    del entries[0]
    return 1
