"""Spans and metrics of the engine, after the semantic conventions of OpenTelemetry for generative AI.

Every call of a backend is a span `chat`, also one that repeats or continues an answer. Every call of a hosted tool is a
span `execute_tool`. An attempt at a background response is a span `background`, below that of the request. All of them
are below the current span of their task.

This module imports OpenTelemetry. The server imports it only if traces or metrics are on.
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self

import msgspec
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, StatusCode

from antiphon import offload
from antiphon.backends.base import Backend, Turn
from antiphon.backends.upstream_backend import UpstreamBackend
from antiphon.engine.serve.hosted.journal import CallRecord
from antiphon.engine.serve.stage import Stage
from antiphon.protocol import codec
from antiphon.protocol.hosted import ImageGenerationCall
from antiphon.protocol.items import OutputItem
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat
from antiphon.protocol.response import Response, Usage
from antiphon.protocol.tools import hide_credentials
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ClaimedRun
from antiphon.stream import deltas
from antiphon.stream.composer import Composer
from antiphon.stream.delta_codec import join_text
from antiphon.stream.deltas import Delta, Deltas
from antiphon.telemetry.conventions import (
    MAX_CONTENT_BYTES,
    REQUEST_ATTRIBUTES,
    TRACEPARENT,
    describe_address,
    describe_usage,
    encode_attribute,
    find_error_type,
    format_traceparent,
    make_current,
    note_omission,
    parse_trace_headers,
    record_error,
)
from antiphon.telemetry.messages import make_input_messages, make_output_messages

logger = logging.getLogger(__name__)

CANCELLED = "cancelled"
_TOOL_CALLS = (deltas.ToolCall, deltas.CustomToolCall)
_BACKENDS = "antiphon.backends."
_PROVIDERS = {"responses": "openai", "chat_completions": "openai", "anthropic_messages": "anthropic"}
_DATA_STORES = frozenset({"file_search"})

_response_id: ContextVar[str] = ContextVar("response_id", default="")


class ModelCallRecord(msgspec.Struct, frozen=True, gc=False):
    """A model call that has ended, for metrics. `first_chunk` are the seconds until the first deltas of a stream."""

    provider: str
    request_model: str
    response_model: str
    address: str
    port: str
    error: str
    seconds: float
    first_chunk: float | None
    usage: Usage | None


class ModelCallMetrics(Protocol):
    """Receives the model calls. Its method must be quick and must not raise."""

    def record_call(self, record: ModelCallRecord) -> None: ...


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

    def wrap_backend(self, name: str, backend: Backend) -> "TracedBackend":
        """Return the backend with a record of each model call."""
        return TracedBackend(backend, self, find_provider_name(name, backend))

    def set_response_id(self, response_id: str) -> None:
        """Set the id of the response that the current task works on, for the spans of its model calls."""
        _response_id.set(response_id)

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
            attributes["gen_ai.tool.call.arguments"] = record.arguments
        span = self.tracer.start_span(f"execute_tool {record.name}", kind=SpanKind.INTERNAL, attributes=attributes)
        try:
            async with aclosing(run):
                while True:
                    # The span is the current one only while the tool runs, not while the client reads.
                    with make_current(span):
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
            with make_current(span):
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


def find_provider_name(name: str, backend: Backend) -> str:
    """Return the value of `gen_ai.provider.name`. The conventions name the API, not the vendor of the model."""
    module = type(backend).__module__
    if not module.startswith(_BACKENDS):  # of another package
        return name
    kind = module.removeprefix(_BACKENDS).partition(".")[0]
    return _PROVIDERS.get(kind, f"antiphon.{kind}")


class TracedBackend(Stage):
    """A backend with a record of each model call."""

    def __init__(self, inner: Backend, telemetry: EngineTelemetry, provider: str) -> None:
        super().__init__(inner)
        self._telemetry = telemetry
        self.provider = provider
        url = inner.upstream.options.base_url if isinstance(inner, UpstreamBackend) else ""
        self.address = describe_address(url)
        self.host = str(self.address.get("server.address", ""))
        self.port = str(self.address.get("server.port", ""))

    async def stream(self, turn: Turn) -> Deltas:
        call = ModelCall(self._telemetry, self, turn)
        if call.span is None:
            try:
                return TracedDeltas(await self.inner.stream(turn), call)
            except BaseException as error:
                call.end(error)
                raise
        try:
            if self._telemetry.captures_content and call.span.is_recording():
                call.span.set_attributes(await offload.run(_describe_content, turn))
            with make_current(call.span):
                answer = await self.inner.stream(turn)
        except BaseException as error:
            call.end(error)
            raise
        return TracedDeltas(answer, call)


class ModelCall:
    """A model call in progress."""

    __slots__ = (
        "_backend",
        "_emitted",
        "_first_chunk",
        "_has_calls",
        "_is_ended",
        "_last",
        "_served",
        "_started_at",
        "_telemetry",
        "_turn",
        "_usage",
        "span",
    )

    def __init__(self, telemetry: EngineTelemetry, backend: TracedBackend, turn: Turn) -> None:
        self._started_at = time.perf_counter()
        self._telemetry = telemetry
        self._backend = backend
        self._turn = turn
        self._first_chunk: float | None = None
        self._usage: Usage | None = None
        self._served: deltas.Served | None = None
        self._last: deltas.Finish | deltas.Failure | None = None
        self._has_calls = False
        self._is_ended = False
        self.span: Span | None = None
        if telemetry.tracer is not None:
            self.span = telemetry.tracer.start_span(
                f"chat {turn.request.model or ''}".rstrip(),
                kind=SpanKind.CLIENT,
                attributes=_describe_request(turn.request, backend),
            )
        # The deltas of an answer whose text is recorded.
        self._emitted: list[Delta] | None = [] if telemetry.captures_content else None

    def observe(self, batch: Sequence[Delta]) -> None:
        """Take note of a batch of deltas."""
        if self._first_chunk is None and batch:
            self._first_chunk = time.perf_counter() - self._started_at
        if self._emitted is not None:
            self._emitted += batch
        for delta in batch:
            kind = type(delta)
            if kind is deltas.Text or kind is deltas.Reasoning:
                continue
            if isinstance(delta, deltas.TokenUsage):
                self._usage = delta.usage
            elif isinstance(delta, deltas.Finish | deltas.Failure):
                self._last = delta
            elif isinstance(delta, deltas.Served):
                self._served = delta
            elif isinstance(delta, _TOOL_CALLS):
                self._has_calls = True

    def end(self, error: BaseException | None = None) -> None:
        """Record the end of the call. `error` is the exception that ended it. Later calls have no effect."""
        if self._is_ended:
            return
        self._is_ended = True
        error_type = self._find_error_type(error)
        metrics, span = self._telemetry.metrics, self.span
        if metrics is not None:
            metrics.record_call(self._make_record(error_type))
        if span is None:
            return
        if span.is_recording():
            self._describe_answer(span, error, error_type)
        span.end()

    def _find_error_type(self, error: BaseException | None) -> str:
        if error is not None:
            return find_error_type(error)
        if isinstance(self._last, deltas.Failure):
            return self._last.code
        return "" if self._last is not None else CANCELLED

    def _make_record(self, error_type: str) -> ModelCallRecord:
        backend = self._backend
        return ModelCallRecord(
            backend.provider,
            self._turn.request.model or "",
            self._find_model(),
            backend.host,
            backend.port,
            error_type,
            time.perf_counter() - self._started_at,
            self._first_chunk if self._turn.streamed else None,
            self._usage,
        )

    def _find_model(self) -> str:
        """Return the model that has answered, as the upstream names it if it does."""
        served = self._served
        return self._turn.request.model or "" if served is None else served.named or served.model

    def _describe_answer(self, span: Span, error: BaseException | None, error_type: str) -> None:
        reason = self._find_reason(error_type)
        attributes: dict[str, Any] = {
            "gen_ai.response.model": self._find_model(),
            "gen_ai.response.finish_reasons": [reason],
        }
        response_id = _response_id.get()
        if response_id:
            attributes["gen_ai.response.id"] = response_id
        if self._usage is not None:
            attributes |= describe_usage(self._usage)
        if self._first_chunk is not None and self._turn.streamed:
            attributes["gen_ai.response.time_to_first_chunk"] = self._first_chunk
        if self._emitted:
            attributes["gen_ai.output.messages"] = _encode_output(self._emitted, reason)
        span.set_attributes(attributes)
        if error is not None:
            record_error(span, error)
        elif error_type:
            span.set_attribute("error.type", error_type)
            if isinstance(self._last, deltas.Failure):
                span.set_status(StatusCode.ERROR, self._last.message)

    def _find_reason(self, error_type: str) -> str:
        """Return the reason why the model stopped, as the conventions name it."""
        if error_type:
            return CANCELLED if error_type == CANCELLED else "error"
        assert isinstance(self._last, deltas.Finish)
        return "tool_call" if self._has_calls and self._last.reason == "stop" else self._last.reason


class TracedDeltas:
    """The deltas of a model call that is recorded."""

    __slots__ = ("_call", "_deltas", "_observe")

    def __init__(self, answer: Deltas, call: ModelCall) -> None:
        self._deltas = answer
        self._call = call
        self._observe = call.observe

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Delta]:
        try:
            batch = await anext(self._deltas)
        except StopAsyncIteration:
            self._call.end()
            raise
        except BaseException as error:
            self._call.end(error)
            raise
        self._observe(batch)
        return batch

    async def aclose(self) -> None:
        try:
            await self._deltas.aclose()
        finally:
            self._call.end()


def _describe_request(request: CreateRequest, backend: TracedBackend) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": backend.provider,
        **backend.address,
    }
    for name, attribute in REQUEST_ATTRIBUTES.items():
        value = getattr(request, name, None)
        if value is not None:
            attributes[attribute] = value
    if request.text is not None and isinstance(request.text.format, JsonSchemaFormat | JsonObjectFormat):
        attributes["gen_ai.output.type"] = "json"
    if request.conversation is not None:
        conversation = request.conversation
        attributes["gen_ai.conversation.id"] = conversation if isinstance(conversation, str) else conversation.id
    return attributes


def _describe_content(turn: Turn) -> dict[str, str]:
    """Return the input of a model call, without images, files and credentials."""
    request = turn.request
    attributes = {"gen_ai.input.messages": encode_attribute(make_input_messages(_to_json(turn.items)))}
    if request.instructions:
        parts = [{"type": "text", "content": request.instructions}]
        attributes["gen_ai.system_instructions"] = encode_attribute(parts)
    if request.tools:
        tools = [hide_credentials(tool) for tool in request.tools]
        attributes["gen_ai.tool.definitions"] = encode_attribute(_to_json(tools))
    return attributes


def _encode_output(emitted: Sequence[Delta], reason: str) -> str:
    """Return the output of an answer. An answer that broke off has only its complete items."""
    size = sum(len(delta.text) for delta in emitted if isinstance(delta, deltas.Text | deltas.Reasoning))
    if size > MAX_CONTENT_BYTES:
        return note_omission(size)
    numbers = iter(range(len(emitted) + 1))
    composer = Composer(
        Response(id="", created_at=0, model=""), new_id=lambda prefix: f"{prefix}_{next(numbers, 0)}", now=int
    )
    try:
        composer.compose(join_text(emitted))
    except Exception:  # the engine reports deltas in an illegal order
        logger.debug("the output of a model call cannot be recorded", exc_info=True)
    return encode_attribute(make_output_messages(_to_json(composer.output), reason))


def _encode_item(item: OutputItem | Unknown) -> str:
    """Return the item of a hosted call, without the data of images."""
    if isinstance(item, ImageGenerationCall):
        item = msgspec.structs.replace(item, result=None)
    return encode_attribute(_omit_data(_to_json([item])[0]))


def _omit_data(value: Any) -> Any:
    """Return a JSON value without data URLs."""
    if isinstance(value, dict):
        return {name: _omit_data(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_omit_data(each) for each in value]
    return value if not isinstance(value, str) or not value.startswith("data:") else f"data of {len(value)} bytes"


def _to_json(items: Sequence[Any]) -> list[Any]:
    decoded: list[Any] = msgspec.json.decode(codec.encode(items))
    return decoded
