"""Model calls as spans `chat` and as metrics, after the semantic conventions of OpenTelemetry for generative AI.

This module imports OpenTelemetry.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, StatusCode, Tracer

from antiphon import offload
from antiphon.backends.base import Backend, Turn
from antiphon.backends.upstream_backend import UpstreamBackend
from antiphon.engine.serve.stage import Stage
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest, get_conversation_id, wants_json
from antiphon.protocol.response import Response, Usage
from antiphon.protocol.tools import hide_credentials
from antiphon.stream import deltas
from antiphon.stream.composer import Composer
from antiphon.stream.delta_codec import join_text
from antiphon.stream.deltas import CustomToolCall, Delta, Deltas, Failure, Finish, Served, Text, TokenUsage, ToolCall
from antiphon.telemetry.conventions import (
    MAX_CONTENT_BYTES,
    REQUEST_ATTRIBUTES,
    describe_address,
    encode_attribute,
    find_error_type,
    note_omission,
    record_error,
)
from antiphon.telemetry.current_context import SPAN_KEY, CurrentSpan, read_context
from antiphon.telemetry.messages import make_input_messages, make_output_messages
from antiphon.telemetry.otlp.frame import SpanFrame
from antiphon.telemetry.otlp.span import OtlpSpan, StartedCall

if TYPE_CHECKING:
    from antiphon.engine.telemetry import EngineTelemetry

logger = logging.getLogger(__name__)

CANCELLED = "cancelled"
_BACKENDS = "antiphon.backends."
_PROVIDERS = {"responses": "openai", "chat_completions": "openai", "anthropic_messages": "anthropic"}

_MAX_FRAMES = 256
# A client can choose any name of a model if an upstream takes any. Longer names are cut.
_MAX_MODEL_LENGTH = 256

# The parameters of a request beside the model that have an attribute.
_PARAMETERS = ("max_output_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty")
# The attributes of a model call whose values do not repeat.
_TYPES = {
    "gen_ai.conversation.id": str,
    "gen_ai.response.id": str,
    "gen_ai.response.time_to_first_chunk": float,
    "gen_ai.usage.input_tokens": int,
    "gen_ai.usage.output_tokens": int,
    "gen_ai.usage.cache_read.input_tokens": int,
    "gen_ai.usage.reasoning.output_tokens": int,
}
_CLIENT_KIND: int = SpanKind.CLIENT.value

# The last delta of each of these types is recorded.
_RECORDED = frozenset({Served, TokenUsage, Finish, Failure, ToolCall, CustomToolCall})

_is_recorded = _RECORDED.__contains__
_FEW = 8
# The deltas of an answer that is a text. A stream has several texts.
_TEXT_ANSWER = [Text, TokenUsage, Finish]

# The requested model, the parameters, the type of the output, the model that has answered, and the finish reason.
_FrameKey = tuple[Any, ...]


CallLabels = tuple[str, str, str, str, str, str]
"""The provider, the requested model, the model that has answered, the address, the port and the type of the error."""


class ModelCallMetrics(Protocol):
    """Receives the model calls that have ended. Its method must be quick and must not raise."""

    def record_call(self, labels: CallLabels, seconds: float, first_chunk: float | None, usage: Usage | None) -> None:
        """Count a call. `first_chunk` are the seconds until the first deltas of a stream."""


def find_provider_name(name: str, backend: Backend) -> str:
    """Return the value of `gen_ai.provider.name`. The conventions name the API, not the vendor of the model."""
    module = type(backend).__module__
    if not module.startswith(_BACKENDS):  # of another package
        return name
    kind = module.removeprefix(_BACKENDS).partition(".")[0]
    return _PROVIDERS.get(kind, f"antiphon.{kind}")


class TracedBackend(Stage):
    """A backend with a record of each model call."""

    def __init__(self, inner: Backend, telemetry: "EngineTelemetry", provider: str) -> None:
        super().__init__(inner)
        self.captures_content = telemetry.captures_content
        self._tracer = telemetry.tracer
        self._start_otlp_span = telemetry.start_otlp_span
        self._finish_span = telemetry.finish_span
        self._metrics = telemetry.metrics
        self._provider = provider
        # Backends of this package need no current span: `encode_trace_headers` finds the header of the call.
        is_own = type(inner).__module__.startswith(_BACKENDS)
        self._is_simple = is_own and not telemetry.captures_content and telemetry.start_otlp_span is not None
        self._ended_spans = telemetry.ended_spans
        url = inner.upstream.options.base_url if isinstance(inner, UpstreamBackend) else ""
        address = describe_address(url)
        self._host = str(address.get("server.address", ""))
        self._port = str(address.get("server.port", ""))
        self._attributes = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": provider, **address}
        self._frames: dict[_FrameKey, SpanFrame] = {}

    async def stream(self, turn: Turn) -> Deltas:
        started_at, parent = perf_counter(), read_context().get(SPAN_KEY)
        span: Span | StartedCall | None = None
        try:
            if self._is_simple and type(parent) is OtlpSpan and parent.call_id:
                span = parent, parent.call_id, time_ns()
                parent.call_id, parent.sent_header = b"", parent.call_header
                try:
                    answer = await self.inner.stream(turn)
                finally:
                    parent.sent_header = b""
            elif self._tracer is None or (type(parent) is OtlpSpan and not parent.is_sampled()):
                answer = await self.inner.stream(turn)
                if self._metrics is None:
                    return answer
            else:
                span = started = self._start_span(self._tracer, parent, turn.request)
                if self.captures_content and started.is_recording():
                    started.set_attributes(await offload.run(_describe_content, turn))
                # The span is the current one only while the request is sent. The reader of the deltas has its own.
                with CurrentSpan(started):
                    answer = await self.inner.stream(turn)
        except BaseException as error:
            ModelCall(self, turn, span, started_at).end(error)
            raise
        whole: Any = getattr(answer, "whole", None)
        if whole is None or self.captures_content:
            return ModelCall(self, turn, span, started_at, answer)
        # Nothing more will happen, so the deltas need no wrapper.
        first_chunk = perf_counter() - started_at if turn.streamed else None
        if _is_text([*map(type, whole)]):
            self._finish(turn, span, started_at, first_chunk, turn.request.model, whole[-1].reason, whole[-2])
        else:
            last: dict[type, Any] = {}
            for delta in whole if len(whole) <= _FEW else _skip_text(whole):
                last[type(delta)] = delta
            self.record_end(turn, span, started_at, first_chunk, last)
        return answer

    def _start_span(self, tracer: Tracer, parent: Span | None, request: CreateRequest) -> Span:
        if self._start_otlp_span is not None:
            return self._start_otlp_span(parent, _CLIENT_KIND)
        # A sampler of the SDK can read the attributes of a new span.
        model = _limit_name(request.model or "")
        parameters = [getattr(request, name) for name in _PARAMETERS]
        attributes = self.describe_request(model, parameters, "json" if wants_json(request) else None)
        return tracer.start_span(f"chat {model}".rstrip(), None, SpanKind.CLIENT, attributes)

    def record_end(
        self,
        turn: Turn,
        span: Span | StartedCall | None,
        started_at: float,
        first_chunk: float | None,
        last: Mapping[type, Any],
        error: BaseException | None = None,
        emitted: Sequence[Delta] = (),
    ) -> None:
        """Record the end of a call. `last` has the last delta of each type, `emitted` has all if they are recorded.

        `error` is the exception that ended the call. `first_chunk` are the seconds until the first deltas.
        """
        finish = last.get(Finish)
        if error is None and finish is not None:
            error_type, reason = "", finish.reason
            if reason == "stop" and (ToolCall in last or CustomToolCall in last):
                reason = "tool_call"
        else:
            error_type = _find_failure(error, last)
            reason = CANCELLED if error_type == CANCELLED else "error"
        served = last.get(Served)
        # The upstream may name the model that has answered.
        answered_by = turn.request.model if served is None else served.named or served.model
        if (error_type or emitted) and span is not None and type(span) is not NonRecordingSpan:
            span = _make_span(*span) if isinstance(span, tuple) else span
            if error_type:
                _record_failure(span, error, error_type, last)
            if emitted:
                span.set_attribute("gen_ai.output.messages", _encode_output(emitted, reason))
        self._finish(turn, span, started_at, first_chunk, answered_by, reason, last.get(TokenUsage), error_type)

    def _finish(
        self,
        turn: Turn,
        span: Span | StartedCall | None,
        started_at: float,
        first_chunk: float | None,
        answered_by: str | None,
        reason: str,
        counted: TokenUsage | None,
        error_type: str = "",
    ) -> None:
        """Count a call and end its span. `answered_by` is the model that has answered."""
        request = turn.request
        if self._metrics is not None:
            labels = (self._provider, request.model or "", answered_by or "", self._host, self._port, error_type)
            usage = None if counted is None else counted.usage
            self._metrics.record_call(labels, perf_counter() - started_at, first_chunk, usage)
        if span is None or type(span) is NonRecordingSpan:
            return
        key = (
            request.model,
            request.max_output_tokens,
            request.temperature,
            request.top_p,
            request.frequency_penalty,
            request.presence_penalty,
            "json" if request.text is not None and wants_json(request) else None,
            answered_by,
            reason,
        )
        frame = self._frames.get(key) or self._make_frame(key)
        conversation = None if request.conversation is None else get_conversation_id(request)
        values: tuple[Any, ...]
        if counted is None:
            values = (conversation, turn.response_id or None, first_chunk, None, None, None, None)
        else:
            usage = counted.usage
            values = (
                conversation,
                turn.response_id or None,
                first_chunk,
                usage.input_tokens,
                usage.output_tokens,
                usage.input_tokens_details.cached_tokens,
                usage.output_tokens_details.reasoning_tokens,
            )
        if type(span) is tuple:
            parent, span_id, start_time = span
            # The queue is checked at the end of the span above it.
            self._ended_spans.append(
                (frame, self._tracer, parent.trace_id, span_id, parent.span_id, start_time, time_ns(), values)
            )
        else:
            self._finish_span(span, frame, values)

    def describe_request(self, model: str, parameters: Iterable[Any], output_type: str | None) -> dict[str, Any]:
        """Return the attributes that are known before the call."""
        attributes = self._attributes | ({"gen_ai.request.model": model} if model else {})
        named = zip(_PARAMETERS, parameters, strict=True)
        attributes |= {REQUEST_ATTRIBUTES[name]: value for name, value in named if value is not None}
        return attributes if output_type is None else attributes | {"gen_ai.output.type": output_type}

    def _make_frame(self, key: _FrameKey) -> SpanFrame:
        """Return the frame of calls with these values, and keep it for the next ones."""
        model, served_model = _limit_name(key[0]), _limit_name(key[-2])
        _, *parameters, output_type, _, reason = key
        result = {"gen_ai.response.model": served_model, "gen_ai.response.finish_reasons": (reason,)}
        attributes = self.describe_request(model, parameters, output_type) | result
        frame = SpanFrame(f"chat {model}".rstrip(), _CLIENT_KIND, attributes, _TYPES)
        if len(self._frames) >= _MAX_FRAMES:
            self._frames.clear()
        if (key[0] or "", key[-2] or "") == (model, served_model):  # not cut
            self._frames[key] = frame
        return frame


class ModelCall:
    """A model call in progress, and its deltas. It ends with the last delta."""

    __slots__ = (
        "_backend",
        "_deltas",
        "_emitted",
        "_first_chunk",
        "_is_ended",
        "_last",
        "_span",
        "_started_at",
        "_turn",
    )

    def __init__(
        self,
        backend: TracedBackend,
        turn: Turn,
        span: Span | StartedCall | None,
        started_at: float,
        answer: Deltas | None = None,
    ) -> None:
        self._backend = backend
        self._turn = turn
        self._span = span
        self._started_at = started_at
        self._deltas: Any = answer
        self._first_chunk: float | None = None
        self._is_ended = False
        self._last: dict[type, Any] = {}
        # The deltas of an answer whose text is recorded.
        self._emitted: list[Delta] | None = [] if backend.captures_content else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Delta]:
        try:
            batch: Sequence[Delta] = await anext(self._deltas)
        except StopAsyncIteration:
            self.end()
            raise
        except BaseException as error:
            self.end(error)
            raise
        if self._first_chunk is None and batch and self._turn.streamed:
            self._first_chunk = perf_counter() - self._started_at
        if self._emitted is not None:
            self._emitted += batch
        last = self._last
        for delta in batch if len(batch) <= _FEW else _skip_text(batch):
            last[type(delta)] = delta
        if last and (Finish in last or Failure in last):
            self.end()
        return batch

    async def aclose(self) -> None:
        try:
            await self._deltas.aclose()
        finally:
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Record the end of the call. `error` is the exception that ended it. Later calls have no effect."""
        if not self._is_ended:
            self._is_ended = True
            self._backend.record_end(
                self._turn, self._span, self._started_at, self._first_chunk, self._last, error, self._emitted or ()
            )


def _find_failure(error: BaseException | None, last: Mapping[type, Any]) -> str:
    """Return the value of `error.type` for a call that has failed, or that was cancelled."""
    if error is not None:
        return find_error_type(error)
    return last[Failure].code if Failure in last else CANCELLED


def _make_span(parent: OtlpSpan, span_id: bytes, start_time: int) -> OtlpSpan:
    """Return the span of a call that was started without a span object."""
    ids = (parent.trace_id, span_id, parent.span_id)
    return OtlpSpan(parent.tracer, "", _CLIENT_KIND, *ids, parent.flags, start_time)


def _record_failure(span: Span, error: BaseException | None, error_type: str, last: Mapping[type, Any]) -> None:
    if error is not None:
        record_error(span, error)
        return
    span.set_attribute("error.type", error_type)
    if Failure in last:
        span.set_status(StatusCode.ERROR, last[Failure].message)


def _is_text(kinds: list[type]) -> bool:
    """Return True for the types of the deltas of an answer that is only a text."""
    return kinds == _TEXT_ANSWER or (kinds[-3:] == _TEXT_ANSWER and kinds.count(Text) == len(kinds) - 2)


def _skip_text(batch: Sequence[Delta]) -> Iterable[Delta]:
    """Return the deltas that are recorded. The loop is in C, which pays only for more than a few deltas."""
    return compress(batch, map(_is_recorded, map(type, batch)))


def _limit_name(model: str | None) -> str:
    return (model or "")[:_MAX_MODEL_LENGTH]


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


def _to_json(items: Sequence[Any]) -> list[Any]:
    decoded: list[Any] = msgspec.json.decode(codec.encode(items))
    return decoded
