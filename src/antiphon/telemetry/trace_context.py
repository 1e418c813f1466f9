"""The headers `traceparent` and `tracestate` of the W3C, which continue a trace in another process.

The rules are those of the propagator of OpenTelemetry. It is not used, because it takes several times as long.
"""

import re
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags, TraceState

from antiphon.telemetry.current_context import NO_CONTEXT, SPAN_KEY, find_current_span, make_context, read_context
from antiphon.telemetry.otlp.ids import encode_traceparent, read_span_id
from antiphon.telemetry.otlp.span import OtlpSpan

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

_MAX_LENGTH = 512
_FORMAT = re.compile(
    r"[ \t]*(?P<version>[0-9a-f]{2})-(?P<trace_id>[0-9a-f]{32})-(?P<span_id>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<rest>-.*|[ \t]*)"
)
_MAX_MEMBERS = 32
_MEMBER = re.compile(
    r"(?P<key>[a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
    r"=(?P<value>[ -+\--<>-~]{0,255}[!-+\--<>-~])"
)


def parse_trace_headers(headers: Mapping[str, str]) -> Context:
    """Return a context with the span that the headers name. It is empty if they are not valid."""
    found = _parse_traceparent(headers.get(TRACEPARENT, ""))
    if found is None:
        return NO_CONTEXT
    trace_id, span_id, flags = found
    context = SpanContext(
        trace_id,
        span_id,
        is_remote=True,
        trace_flags=TraceFlags(flags),
        trace_state=_parse_tracestate(headers.get(TRACESTATE, "")),
    )
    return make_context(NonRecordingSpan(context))


def format_traceparent(context: Context | None = None) -> str:
    """Return the current span, or that of the context, as `traceparent`. "" if there is none."""
    return _format_span(trace.get_current_span(context))


def encode_trace_headers() -> bytes:
    """Return `traceparent` and `tracestate` of the current model call or span as lines of a request, or b"".

    There is no `baggage`: it may have data that a client means for its own servers only.
    """
    span = read_context().get(SPAN_KEY)
    if type(span) is OtlpSpan:
        if span.sent_header:
            return span.sent_header
        if span.details is None:
            return encode_traceparent(span.trace_id, span.span_id, span.flags)
    value = "" if span is None else _format_span(span)
    if span is None or not value:
        return b""
    state = span.get_span_context().trace_state
    lines = f"traceparent: {value}\r\n" + (f"tracestate: {state.to_header()}\r\n" if state else "")
    return lines.encode("latin-1")


def read_trace_ids() -> tuple[str, str] | None:
    """Return the ids of the current trace and of the current model call or span in hex, or None if there are none."""
    span = find_current_span()
    if type(span) is OtlpSpan:
        return span.trace_id.hex(), read_span_id(span.sent_header) if span.sent_header else span.span_id.hex()
    found = trace.INVALID_SPAN_CONTEXT if span is None else span.get_span_context()
    return (f"{found.trace_id:032x}", f"{found.span_id:016x}") if found.is_valid else None


def _format_span(span: Span) -> str:
    if type(span) is OtlpSpan:
        return span.format_traceparent()
    found = span.get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}" if found.is_valid else ""


def _parse_traceparent(text: str) -> tuple[int, int, int] | None:
    """Return the id of the trace, the id of the span and the flags. Later versions may have more fields."""
    match = _FORMAT.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["rest"].strip(" \t")):
        return None
    trace_id, span_id = int(match["trace_id"], 16), int(match["span_id"], 16)
    return (trace_id, span_id, int(match["flags"], 16)) if trace_id and span_id else None


def _parse_tracestate(text: str) -> TraceState | None:
    """Return the entries of other tracing systems. A list that is too long or not valid is ignored.

    The function of OpenTelemetry would log it, so clients could fill the log.
    """
    if not text or len(text) > _MAX_LENGTH:
        return None
    members = [member for each in text.split(",") if (member := each.strip(" \t"))]
    matches = [match for member in members if (match := _MEMBER.fullmatch(member))]
    entries = {match["key"]: match["value"] for match in matches}
    return TraceState(list(entries.items())) if len(entries) == len(members) <= _MAX_MEMBERS else None
