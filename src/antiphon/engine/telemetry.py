"""Spans and metrics of the engine, after the semantic conventions of OpenTelemetry for generative AI.

Every call of a backend is a span `chat`, also one that repeats or continues an answer. Every call of a hosted tool is a
span `execute_tool`. An attempt at a background response is a span `background`, below that of the request. All of them
are below the current span of their task.

This module imports OpenTelemetry. The server imports it only if traces or metrics are on.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, StatusCode

from antiphon.backends.base import Backend
from antiphon.engine.model_calls import ModelCallMetrics, TracedBackend, find_provider_name
from antiphon.engine.serve.hosted.journal import CallRecord
from antiphon.protocol import codec
from antiphon.protocol.hosted import ImageGenerationCall
from antiphon.protocol.items import OutputItem
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ClaimedRun
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.telemetry.conventions import (
    encode_attribute,
    limit_content,
    record_error,
)
from antiphon.telemetry.current_context import CurrentSpan
from antiphon.telemetry.otlp.provider import OtlpTracer, find_finish_function
from antiphon.telemetry.otlp.span import SpanRecord
from antiphon.telemetry.trace_context import TRACEPARENT, format_traceparent, parse_trace_headers

_DATA_STORES = frozenset({"file_search"})


class EngineTelemetry:
    """The traces and metrics of one engine. Without a `tracer` there are no spans, without `metrics` no metrics."""

    def __init__(
        self,
        tracer: trace.Tracer | None,
        metrics: ModelCallMetrics | None = None,
        *,
        captures_content: bool = False,
    ) -> None:
        self.tracer = tracer
        self.metrics = metrics
        self.captures_content = captures_content and tracer is not None
        self.start_otlp_span = tracer.start if isinstance(tracer, OtlpTracer) else None
        self.ended_spans: list[SpanRecord] = tracer.queue.records if isinstance(tracer, OtlpTracer) else []
        self.finish_span = find_finish_function(tracer)

    def wrap_backend(self, name: str, backend: Backend) -> TracedBackend:
        """Return the backend with a record of each model call."""
        return TracedBackend(backend, self, find_provider_name(name, backend))

    def format_traceparent(self) -> str:
        """Return the current span, to continue its trace in another task or process."""
        return "" if self.tracer is None else format_traceparent()

    async def trace_hosted_call(
        self, run: AsyncGenerator[Sequence[Delta], None], record: CallRecord
    ) -> AsyncGenerator[Sequence[Delta], None]:
        """Run a call of a hosted tool in a span of its own."""
        if self.tracer is None:
            async with aclosing(run):
                async for each in run:
                    yield each
            return
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": record.name,
            "gen_ai.tool.call.id": record.call_id or record.key,
        }
        if self.captures_content:
            attributes["gen_ai.tool.call.arguments"] = limit_content(record.arguments)
        span = self.tracer.start_span(f"execute_tool {record.name}", kind=SpanKind.INTERNAL, attributes=attributes)
        try:
            async with aclosing(run):
                while True:
                    # The span is the current one only while the tool runs, not while the client reads.
                    with CurrentSpan(span):
                        batch: Sequence[Delta] | None = await anext(aiter(run), None)
                    if batch is None:
                        break
                    self._record_item(span, batch)
                    yield batch
        except BaseException as error:
            record_error(span, error)
            raise
        finally:
            span.end()

    def _record_item(self, span: Span, batch: Sequence[Delta]) -> None:
        """Record the result of a hosted call, if the batch has its final item."""
        for delta in batch:
            if not isinstance(delta, deltas.CloseItem | deltas.WholeItem) or delta.item is None:
                continue
            item = delta.item
            kind = item.type.removesuffix("_call")
            span.set_attribute("gen_ai.tool.type", "datastore" if kind in _DATA_STORES else "extension")
            span.set_attribute("antiphon.tool.item_type", item.type)
            if getattr(item, "status", None) == "failed" or getattr(item, "error", None):
                span.set_attribute("error.type", "tool_error")
                span.set_status(StatusCode.ERROR)
            if self.captures_content:
                span.set_attribute("gen_ai.tool.call.result", _encode_item(item))

    @contextmanager
    def trace_attempt(
        self, claimed: ClaimedRun, traceparent: str, get_response: Callable[[], Response | None]
    ) -> Iterator[None]:
        """Make a span for an attempt at a background response. It belongs to the trace of the request."""
        if self.tracer is None:
            yield
            return
        context = parse_trace_headers({TRACEPARENT: traceparent})
        accepted = trace.get_current_span(context).get_span_context()
        span = self.tracer.start_span(
            f"background {claimed.model}".rstrip(),
            context,
            SpanKind.CONSUMER,
            {
                "antiphon.response.id": claimed.response_id,
                "antiphon.project": claimed.project,
                "antiphon.attempt": claimed.attempt,
            },
            [Link(accepted)] if accepted.is_valid else [],
        )
        try:
            with CurrentSpan(span):
                yield
        except BaseException as error:
            record_error(span, error)
            raise
        finally:
            response = get_response()
            if response is not None:
                span.set_attribute("antiphon.response.status", response.status or "")
                if response.error is not None:
                    span.set_attribute("error.type", response.error.code)
                    span.set_status(StatusCode.ERROR, response.error.message)
            span.end()


def _encode_item(item: OutputItem | Unknown) -> str:
    """Return the item of a hosted call, without the data of images."""
    if isinstance(item, ImageGenerationCall):
        item = msgspec.structs.replace(item, result=None)
    return encode_attribute(_omit_data(msgspec.json.decode(codec.encode(item))))


def _omit_data(value: Any) -> Any:
    """Return a JSON value without data URLs."""
    if isinstance(value, dict):
        return {name: _omit_data(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_omit_data(each) for each in value]
    return value if not isinstance(value, str) or not value.startswith("data:") else f"data of {len(value)} bytes"
