"""Server spans: one for each HTTP request and for each response on a WebSocket.

This module imports OpenTelemetry.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, StatusCode

from antiphon.server.http import HttpRequest
from antiphon.server.log import AccessLine
from antiphon.server.router import Router
from antiphon.server.websocket.socket import UpgradeRequest
from antiphon.telemetry.conventions import describe_address, record_error
from antiphon.telemetry.current_context import (
    NO_CONTEXT,
    SPAN_KEY,
    CurrentSpan,
    make_context,
    read_context,
    reset_context,
    set_context,
)
from antiphon.telemetry.otlp.frame import SpanFrame
from antiphon.telemetry.otlp.provider import OtlpTracer, find_finish_function
from antiphon.telemetry.trace_context import parse_trace_headers

Serve = Callable[[HttpRequest, Router], Awaitable[None]]
Report = Callable[[HttpRequest], None]

# Requests of load balancers and monitoring, which would be most of all spans.
_NOT_TRACED = frozenset({"/healthz", "/readyz", "/metrics"})
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_CLIENT_GONE = "client_gone"
_MAX_PATH_LENGTH = 1024
_MAX_CACHED_LENGTH = 1024
_MAX_FRAMES = 256
_SERVER_ERROR = 500
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})
_OTHER_METHOD = "_OTHER"
_WEBSOCKET = "websocket"


# The attributes of a server span whose values do not repeat.
_TYPES = {"antiphon.request.id": str, "antiphon.response.id": str}
_TYPES_WITH_PATH = {**_TYPES, "url.path": str}
_SERVER_KIND: int = SpanKind.SERVER.value

_FrameKey = tuple[str, str, bool, bytes, bytes, str, int]


class RequestSpans:
    """Makes the spans of requests. They continue the trace that the header `traceparent` names.

    A request of a trace that is not sampled has a context, but `http_request.span` is None.

    The context is that of the request's task, and is not restored: it ends with the task. The upgrade to a WebSocket
    has a context, but no span: a connection may be open for hours, and each of its responses has one.
    """

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._start_otlp_span = tracer.start if isinstance(tracer, OtlpTracer) else None
        self._finish_span = find_finish_function(tracer)
        self._frames: dict[_FrameKey, SpanFrame] = {}

    def wrap_serve(self, serve: Serve) -> Serve:
        """Return a function that starts the span of a request and serves it."""
        start_otlp_span, start_other = self._start_otlp_span, self._start_other

        def serve_traced(http_request: HttpRequest, router: Router) -> Awaitable[None]:
            if http_request.path in _NOT_TRACED:
                http_request.span = None
                return serve(http_request, router)
            headers = http_request.headers
            parent = _parse_parent(headers) if b"traceparent" in headers else None
            if start_otlp_span is not None and type(http_request) is HttpRequest:
                span = start_otlp_span(parent, _SERVER_KIND)
                http_request.span = None if span.end_time else span
                set_context({SPAN_KEY: span})
            else:
                start_other(http_request, parent)
            return serve(http_request, router)

        return serve_traced

    def wrap_report(self, report: Report) -> Report:
        """Return a function that reports a request that has been served, and ends its span."""
        find_frame, finish_span = self._frames.get, self._finish_span

        def report_traced(http_request: HttpRequest) -> None:
            report(http_request)
            span = http_request.span
            if span is None:
                return
            if http_request.error_code is not None:
                _record_error(span, http_request.error_code, http_request.status)
            route, path, read = http_request.route_path, http_request.path, http_request.headers.get
            # A path with ids differs from its route, and from the paths of other requests.
            is_fixed = path == route
            key = (
                http_request.method,
                route,
                is_fixed,
                read(b"host", b""),
                read(b"user-agent", b""),
                http_request.project,
                http_request.status,
            )
            frame = find_frame(key) or self._make_frame(key)
            if is_fixed:
                finish_span(span, frame, (http_request.id, http_request.response_id))
            else:
                finish_span(span, frame, (http_request.id, http_request.response_id, path[:_MAX_PATH_LENGTH]))

        return report_traced

    @contextmanager
    def keep_context(self) -> Iterator[None]:
        """Restore the context of the task after a request, for ASGI servers that serve several in one task."""
        token = set_context(read_context())
        try:
            yield
        finally:
            with suppress(ValueError):  # the task was dropped
                reset_context(token)

    def record_error(self, http_request: HttpRequest, error: BaseException) -> None:
        """Record the exception that ends a request without a response, such as a cancellation."""
        if http_request.span is not None:
            record_error(http_request.span, error)

    def _start_other(self, http_request: HttpRequest, parent: Span | None) -> None:
        """Start the span of a request that is an upgrade, or whose tracer is not of this package."""
        context = NO_CONTEXT if parent is None else make_context(parent)
        if isinstance(http_request, UpgradeRequest):
            http_request.span = None
            set_context(context)
            return
        # A sampler of the SDK can read the name and the attributes of a new span.
        method = http_request.method if http_request.method in _METHODS else _OTHER_METHOD
        attributes = _describe_start(http_request, method)
        span = self._tracer.start_span(method, context, SpanKind.SERVER, attributes)
        http_request.span = None if type(span) is NonRecordingSpan else span
        set_context(make_context(span))

    def _make_frame(self, key: _FrameKey) -> SpanFrame:
        """Return the frame of requests with these values, and keep it for the next ones."""
        method, route, is_fixed, host, user_agent, project, status = key
        results = {"http.route": route, "antiphon.project": project, "http.response.status_code": status}
        is_known = method in _METHODS or method == _WEBSOCKET
        name = method if is_known else _OTHER_METHOD
        http_method = "GET" if method == _WEBSOCKET else name
        attributes = _describe_request(http_method, route if is_fixed else "", host, user_agent)
        attributes |= {name: value for name, value in results.items() if value}
        types = _TYPES if is_fixed else _TYPES_WITH_PATH
        frame = SpanFrame(f"{name} {route}".rstrip(), _SERVER_KIND, attributes, types)
        if len(self._frames) >= _MAX_FRAMES:
            self._frames.clear()
        if is_known and len(host) + len(user_agent) <= _MAX_CACHED_LENGTH:
            self._frames[key] = frame
        return frame

    @contextmanager
    def trace_message(self, upgrade: HttpRequest) -> Iterator[None]:
        """Make the span of a response on a WebSocket. Its parent is the span that the upgrade request names."""
        name = f"{_WEBSOCKET} {upgrade.route_path}".rstrip()
        attributes = _describe_start(upgrade, "GET") if self._start_otlp_span is None else None
        span = self._tracer.start_span(name, None, SpanKind.SERVER, attributes)
        try:
            with CurrentSpan(span):
                yield
        except BaseException as error:
            record_error(span, error)
            raise
        finally:
            if span.is_recording():  # without a log line
                self._finish_message(span, upgrade, "", 0, None)

    def record_line(self, upgrade: HttpRequest, line: AccessLine) -> None:
        """End the current span, which is that of a response on a WebSocket, with its result."""
        span = trace.get_current_span()
        if span.is_recording():
            if line.error:
                _record_error(span, line.error, line.status)
            self._finish_message(span, upgrade, line.project or "", line.status, line.response_id)

    def _finish_message(
        self, span: Span, upgrade: HttpRequest, project: str, status: int, response_id: str | None
    ) -> None:
        host, user_agent = upgrade.headers.get(b"host", b""), upgrade.headers.get(b"user-agent", b"")
        # The path of a WebSocket has no ids.
        key = (_WEBSOCKET, upgrade.route_path, True, host, user_agent, project, status)
        frame = self._frames.get(key) or self._make_frame(key)
        self._finish_span(span, frame, (upgrade.id, response_id))


def _parse_parent(headers: Mapping[bytes, bytes]) -> Span | None:
    """Return the span that the headers name, or None if they are not valid."""
    found = {name.decode(): headers[name].decode("latin-1") for name in _TRACE_HEADERS if name in headers}
    return parse_trace_headers(found).get(SPAN_KEY)


def _record_error(span: Span, error: str, status: int) -> None:
    span.set_attribute("error.type", error)
    # An error of the client is not one of the server. A stream that fails has the status 200.
    if error != _CLIENT_GONE and (status >= _SERVER_ERROR or status == 200):
        span.set_status(StatusCode.ERROR)


def _describe_start(http_request: HttpRequest, method: str) -> dict[str, Any]:
    read = http_request.headers.get
    return _describe_request(method, http_request.path, read(b"host", b""), read(b"user-agent", b""))


def _describe_request(method: str, path: str, host: bytes, user_agent: bytes) -> dict[str, Any]:
    attributes: dict[str, Any] = {"http.request.method": method, "url.scheme": "http"}
    if path:
        attributes["url.path"] = path[:_MAX_PATH_LENGTH]
    if host:
        attributes |= describe_address(f"http://{host[:_MAX_PATH_LENGTH].decode('latin-1')}")
    if user_agent:
        attributes["user_agent.original"] = user_agent.decode("latin-1")[:_MAX_PATH_LENGTH]
    return attributes
