"""Server spans: one for each HTTP request and for each response on a WebSocket.

This module imports OpenTelemetry.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode

from antiphon.server.http import HttpRequest
from antiphon.server.log import AccessLine
from antiphon.server.router import Router
from antiphon.server.websocket.socket import UpgradeRequest
from antiphon.telemetry.conventions import describe_address, parse_trace_headers, record_error

Serve = Callable[[HttpRequest, Router], Awaitable[None]]

# Requests of load balancers and monitoring, which would be most of all spans.
_NOT_TRACED = frozenset({"/healthz", "/readyz", "/metrics"})
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_CLIENT_GONE = "client_gone"
_MAX_PATH_LENGTH = 1024
_SERVER_ERROR = 500
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})
_OTHER_METHOD = "_OTHER"


class RequestSpans:
    """Makes the spans of requests. They continue the trace that the header `traceparent` names."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def wrap(self, serve: Serve) -> Serve:
        """Return the function with a span around it."""

        async def serve_traced(http_request: HttpRequest, router: Router) -> None:
            if http_request.path in _NOT_TRACED:
                await serve(http_request, router)
                return
            parent = _read_parent(http_request)
            if isinstance(http_request, UpgradeRequest):
                # A connection may be open for hours. Each of its responses has a span.
                with _use(parent):
                    await serve(http_request, router)
                return
            method = http_request.method if http_request.method in _METHODS else _OTHER_METHOD
            span = self._tracer.start_span(method, parent, SpanKind.SERVER, _describe_request(http_request, method))
            try:
                with _use(trace.set_span_in_context(span, parent)):
                    await serve(http_request, router)
            except BaseException as error:
                record_error(span, error)
                raise
            finally:
                if span.is_recording():
                    _record_end(span, http_request, method)
                span.end()

        return serve_traced

    @contextmanager
    def trace_message(self, upgrade: HttpRequest) -> Iterator[None]:
        """Make the span of a response on a WebSocket. Its parent is the span that the upgrade request names."""
        attributes = _describe_request(upgrade, "GET") | {"antiphon.request.id": upgrade.id}
        if upgrade.route_path:
            attributes["http.route"] = upgrade.route_path
        span = self._tracer.start_span(
            f"websocket {upgrade.route_path}".rstrip(), kind=SpanKind.SERVER, attributes=attributes
        )
        try:
            with _use(trace.set_span_in_context(span)):
                yield
        except BaseException as error:
            record_error(span, error)
            raise
        finally:
            span.end()

    def record_line(self, line: AccessLine) -> None:
        """Add the result of a response on a WebSocket to the current span."""
        span = trace.get_current_span()
        ids = {"antiphon.project": line.project, "antiphon.response.id": line.response_id}
        _record_result(span, ids, line.status, line.error)


def _read_parent(http_request: HttpRequest) -> contexts.Context:
    headers = http_request.headers
    if b"traceparent" not in headers:
        return contexts.Context()
    return parse_trace_headers(
        {name.decode(): headers[name].decode("latin-1") for name in _TRACE_HEADERS if name in headers}
    )


def _describe_request(http_request: HttpRequest, method: str) -> dict[str, Any]:
    headers = http_request.headers
    attributes: dict[str, Any] = {
        "http.request.method": method,
        "url.path": http_request.path[:_MAX_PATH_LENGTH],
        "url.scheme": "http",
    }
    if b"host" in headers:
        attributes |= describe_address(f"http://{headers[b'host'].decode('latin-1')}")
    if b"user-agent" in headers:
        attributes["user_agent.original"] = headers[b"user-agent"].decode("latin-1")[:_MAX_PATH_LENGTH]
    return attributes


def _record_end(span: Span, http_request: HttpRequest, method: str) -> None:
    if http_request.route_path:
        span.update_name(f"{method} {http_request.route_path}")
    attributes = {
        "http.route": http_request.route_path,
        "antiphon.request.id": http_request.id,
        "antiphon.project": http_request.project,
        "antiphon.response.id": http_request.response_id,
    }
    _record_result(span, attributes, http_request.status, http_request.error_code)


def _record_result(span: Span, attributes: dict[str, str | None], status: int, error: str | None) -> None:
    """Set the attributes that have a value, and the result. One call of the span costs less than several."""
    values = attributes | {"http.response.status_code": status, "error.type": error}
    span.set_attributes({name: value for name, value in values.items() if value})
    # An error of the client is not one of the server. A stream that fails has the status 200.
    if error is not None and error != _CLIENT_GONE and (status >= _SERVER_ERROR or status == 200):
        span.set_status(StatusCode.ERROR)


@contextmanager
def _use(context: contexts.Context) -> Iterator[None]:
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)
