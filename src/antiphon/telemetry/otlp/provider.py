"""A tracer for OTLP over HTTP, behind the classes of OpenTelemetry's API.

A span of the SDK and its export take more instructions than a third of a short request. This tracer records a span in
a struct of msgspec, and the thread of the export encodes it.
"""

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import time_ns
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits
from opentelemetry.trace import Link, Span, SpanKind, TraceFlags, TraceState

from antiphon.telemetry.current_context import SPAN_KEY, read_context
from antiphon.telemetry.otlp.attributes import clean_value
from antiphon.telemetry.otlp.frame import SpanFrame
from antiphon.telemetry.otlp.ids import UNUSED, encode_traceparent, make_ids
from antiphon.telemetry.otlp.sampling import Sampler, make_sampler
from antiphon.telemetry.otlp.span import OtlpSpan, SpanDetails, TracerScope
from antiphon.telemetry.otlp.span_queue import SpanQueue

_SAMPLED = int(TraceFlags.SAMPLED)
# The id of the trace is random in all of its bits.
_RANDOM = 0x02
# No span has more shared attributes.
_MAX_SHARED = 32
_CLOSE_MILLISECONDS = 5_000
_NEW_FLAGS = _RANDOM | _SAMPLED


class OtlpTracerProvider(trace.TracerProvider):  # type: ignore[misc]
    """Makes tracers whose spans go to one queue.

    Raises ValueError for a variable of the limits or of the queue that is not valid.
    """

    def __init__(
        self, make_resource: Callable[[], Resource], *, user_agent: str, shutdown_on_exit: bool = True
    ) -> None:
        self._sampler = make_sampler()
        self._limits = SpanLimits()
        self.queue = SpanQueue(make_resource, user_agent)
        self._tracers: dict[tuple[str, str, str, str], OtlpTracer] = {}
        self._lock = threading.Lock()
        self._shutdown_on_exit = shutdown_on_exit
        if shutdown_on_exit:
            atexit.register(self.shutdown)
        queue = weakref.ref(self.queue)
        os.register_at_fork(after_in_child=lambda: _reset(queue()))

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> "OtlpTracer":
        name, version = instrumenting_module_name, instrumenting_library_version or ""
        url, described = schema_url or "", clean_value(attributes or {})
        key = (name, version, url, repr(described))
        with self._lock:
            if key not in self._tracers:
                scope = TracerScope(name, version, url, described)
                self._tracers[key] = OtlpTracer(self._sampler, self._limits, self.queue, scope)
            return self._tracers[key]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export all spans that have ended. Return False if that was not possible in time."""
        return self.queue.flush(timeout_millis / 1000)

    def shutdown(self, timeout_millis: int = _CLOSE_MILLISECONDS) -> None:
        """Export the last spans and end the thread of the export. Spans that end later are dropped."""
        if self._shutdown_on_exit:
            atexit.unregister(self.shutdown)
        self.queue.close(timeout_millis / 1000)


def _find_max_unchecked(limits: SpanLimits) -> int:
    """Return the number of own attributes up to which a span cannot exceed a limit. -1 if each value has a limit."""
    if limits.max_span_attribute_length is not None:
        return -1
    return sys.maxsize if limits.max_span_attributes is None else limits.max_span_attributes - _MAX_SHARED


def _reset(queue: SpanQueue | None) -> None:
    if queue is not None:
        queue.reset()


class OtlpTracer(trace.Tracer):  # type: ignore[misc]
    """Starts spans of one instrumentation scope."""

    def __init__(self, sampler: Sampler, limits: SpanLimits, queue: SpanQueue, scope: TracerScope) -> None:
        self._sampler = sampler
        self.limits = limits
        self.max_unchecked = _find_max_unchecked(limits)
        # All new traces are recorded, and no span needs a check of its limits.
        self._is_simple = sampler.records_new and self.max_unchecked >= 0
        self.queue = queue
        self.scope = scope

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        span = self.start((read_context() if context is None else context).get(SPAN_KEY), kind._value_)
        if span.end_time:
            return span
        span.name = name
        if start_time is not None:
            span.start_time = start_time
        if attributes:
            span.set_attributes(attributes)
        if links:
            for link in links:
                span.add_link(link.context, link.attributes)
        if not record_exception or not set_status_on_exception:
            details = span.get_details()
            details.records_exception, details.sets_status_on_exception = record_exception, set_status_on_exception
        return span

    def start(self, parent: Span | None, kind: int) -> OtlpSpan:
        """Start a span that `OtlpSpan.finish` names and describes. `kind` is the number of the SpanKind.

        A span that is not sampled has ended.
        """
        try:
            trace_id, span_id, call_id, header = UNUSED.pop()
        except IndexError:
            trace_id, span_id, call_id, header = make_ids()
        if parent is None:
            if self._is_simple:
                return OtlpSpan(self, "", kind, trace_id, span_id, b"", _NEW_FLAGS, time_ns(), call_id, header)
        elif type(parent) is OtlpSpan and parent.tracer.queue is self.queue:
            # Every sampler gives the spans of one trace the same decision.
            span = OtlpSpan(self, "", kind, parent.trace_id, span_id, parent.span_id, parent.flags, time_ns())
            if parent.details is not None:
                span.details = self._make_details(parent.trace_state)
            if not parent.flags & _SAMPLED:
                span.end_time = span.start_time
            return span
        return self._start_first(parent, kind, trace_id, span_id, call_id)

    def _make_details(self, state: TraceState | None) -> SpanDetails | None:
        """Return None if a new span needs no details. A span without them is not checked for limits."""
        return SpanDetails(state) if state or self.max_unchecked < 0 else None

    def _start_first(
        self, parent: Span | None, kind: int, new_trace_id: bytes, span_id: bytes, call_id: bytes
    ) -> OtlpSpan:
        """Start the first span of a trace here. Its parent belongs to another process, or to another tracer."""
        remote = None if parent is None else parent.get_span_context()
        if remote is None or not remote.is_valid:
            trace_id, parent_id, is_remote, is_parent_sampled = new_trace_id, b"", False, None
            flags, state = _RANDOM, None
        else:
            trace_id, parent_id = remote.trace_id.to_bytes(16, "big"), remote.span_id.to_bytes(8, "big")
            flags, state, is_remote = remote.trace_flags & _RANDOM, remote.trace_state, remote.is_remote
            is_parent_sampled = bool(remote.trace_flags & _SAMPLED)
        span = OtlpSpan(self, "", kind, trace_id, span_id, parent_id, flags, time_ns())
        span.has_remote_parent = is_remote
        span.details = self._make_details(state)
        if not self._sampler.decide(int.from_bytes(trace_id, "big"), is_parent_sampled=is_parent_sampled):
            span.end_time = span.start_time
            return span
        span.flags |= _SAMPLED
        if span.details is None:
            span.call_id, span.call_header = call_id, encode_traceparent(span.trace_id, call_id, span.flags)
        return span

    @contextmanager
    def start_as_current_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
    ) -> Iterator[Span]:
        span = self.start_span(
            name, context, kind, attributes, links, start_time, record_exception, set_status_on_exception
        )
        with trace.use_span(span, end_on_exit, record_exception, set_status_on_exception):
            yield span


def find_finish_function(tracer: trace.Tracer | None) -> Callable[[Any, SpanFrame, tuple[Any, ...]], None]:
    """Return the function that sets the name and the last attributes of a span of the tracer, and ends it."""
    return OtlpSpan.finish if isinstance(tracer, OtlpTracer) else _finish_span


def _finish_span(span: Span, frame: SpanFrame, values: tuple[Any, ...]) -> None:
    span.update_name(frame.name)
    span.set_attributes(frame.merge_values(values))
    span.end()
