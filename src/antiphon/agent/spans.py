"""Spans of agent runs, after the semantic conventions of OpenTelemetry for generative AI.

A run is a span `invoke_agent`. Its children are a span `chat` for each request to the model, also for one that is
repeated, and a span `execute_tool` for each tool call. The run of a subagent is a child of the call that started it. An
agent to which the run is handed off has a span `invoke_agent` below that of the run. A resumed run is linked to the
span of the process before. Without another parent it is also a child of that span, so that all spans of a run are in
one trace.

This module imports OpenTelemetry. `tracing.py` imports it only if traces are on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.trace import Link, Span, SpanKind, StatusCode

from antiphon.agent.outcome import Outcome
from antiphon.agent.transports.base import TERMINAL, Events, Transport
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.unions import Unknown
from antiphon.telemetry.conventions import (
    REQUEST_ATTRIBUTES,
    describe_address,
    describe_usage,
    encode_attribute,
    limit_content,
    make_tracer,
    record_error,
)
from antiphon.telemetry.current_context import CurrentSpan
from antiphon.telemetry.messages import find_finish_reason, make_input_messages, make_output_messages
from antiphon.telemetry.trace_context import TRACEPARENT, format_traceparent, parse_trace_headers
from antiphon.tools.base import ApprovalRequired, Tool, ToolContext, ToolInvocation, ToolResult
from antiphon.tools.executor import CallObserver, Executor
from antiphon.upstream.usage import parse_usage

T = TypeVar("T")

# The conventions name the API, not the vendor of the model: agents use OpenAI's Responses API on every server.
PROVIDER = "openai"

# The keys of a tool in a request that may have credentials of an MCP server.
_SECRET_KEYS = ("authorization", "headers")


class Tracing:
    """The traces of this process."""

    def __init__(self, provider: trace.TracerProvider, *, captures_content: bool) -> None:
        self._provider = provider
        self.tracer = make_tracer(provider)
        self.captures_content = captures_content

    def start_run(
        self,
        run_id: str,
        *,
        agent: str,
        model: str,
        parent_id: str | None,
        session_id: str | None,
        earlier: str,
        items: Sequence[JsonObject],
    ) -> "RunTrace":
        """Start the span of a run. `earlier` is the `traceparent` of the process that executed it before, or ""."""
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.agent.name": agent,
            "gen_ai.request.model": model,
            "antiphon.run.id": run_id,
        }
        if parent_id is not None:
            attributes["antiphon.run.parent_id"] = parent_id
        if session_id is not None:
            attributes["gen_ai.conversation.id"] = session_id
        if self.captures_content:
            attributes["gen_ai.input.messages"] = encode_attribute(make_input_messages(items))
        context = contexts.get_current()
        links = []
        if earlier:
            before = parse_trace_headers({TRACEPARENT: earlier})
            links.append(Link(trace.get_current_span(before).get_span_context()))
            if not trace.get_current_span(context).get_span_context().is_valid:
                context = before
        span = self.tracer.start_span(f"invoke_agent {agent}", context, SpanKind.INTERNAL, attributes, links)
        return RunTrace(self, span, context)

    def make_headers(self) -> dict[str, str]:
        """Return the headers with which a server continues the current trace."""
        headers: dict[str, str] = {}
        propagate.inject(headers)
        return headers

    def flush(self) -> None:
        """Export the spans that are waiting."""
        flush = getattr(self._provider, "force_flush", None)
        if flush is not None:
            flush()


class RunTrace:
    """The span of one run, and the spans below it."""

    def __init__(self, tracing: Tracing, span: Span, context: contexts.Context) -> None:
        self._tracing = tracing
        self._run_span = span
        self._context = trace.set_span_in_context(span, context)
        self._agent_span = span
        """The span of the agent that works now: that of the run, or of an agent to which it was handed off."""

    @property
    def traceparent(self) -> str:
        """The identity of the span of the run, in the format of the W3C."""
        return format_traceparent(trace.set_span_in_context(self._run_span))

    def hand_off(self, agent: str, model: str) -> None:
        """Start the span of the agent that takes over. The spans that follow are below it."""
        self._end_handoff()
        context = trace.set_span_in_context(self._run_span, self._context)
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.agent.name": agent,
            "gen_ai.request.model": model,
        }
        self._agent_span = self._tracing.tracer.start_span(
            f"invoke_agent {agent}", context, SpanKind.INTERNAL, attributes
        )

    def wrap_transport(self, transport: Transport) -> "TracedTransport":
        return TracedTransport(self, transport)

    def wrap_executor(self, executor: Executor) -> "TracedExecutor":
        return TracedExecutor(self, executor)

    async def record_request(self, model: str, send: Callable[[], Awaitable[T]]) -> T:
        """Send a request to a model within a span. For requests that no transport of the agent sends."""
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": PROVIDER}
        attributes |= {"gen_ai.request.model": model} if model else {}
        span = self.start_span(f"chat {model}".rstrip(), SpanKind.CLIENT, attributes)
        try:
            with CurrentSpan(span):
                return await send()
        except BaseException as error:
            record_error(span, error)
            raise
        finally:
            span.end()

    @property
    def captures_content(self) -> bool:
        return self._tracing.captures_content

    def start_span(self, name: str, kind: SpanKind, attributes: Mapping[str, Any]) -> Span:
        """Start a span below that of the agent."""
        context = trace.set_span_in_context(self._agent_span, self._context)
        return self._tracing.tracer.start_span(name, context, kind, attributes)

    def end(self, outcome: Outcome | None, error: BaseException | None = None) -> None:
        """End the span of the run. Without an outcome it was cancelled, or has raised `error`."""
        self._end_handoff()
        span = self._run_span
        if outcome is not None:
            span.set_attributes({"antiphon.outcome": outcome.kind, "antiphon.turns": outcome.turns})
            span.set_attributes(describe_usage(outcome.usage))
            if outcome.cost is not None:
                span.set_attribute("antiphon.cost", outcome.cost)
            if outcome.error is not None:
                span.set_attribute("error.type", outcome.error.code)
                span.set_status(StatusCode.ERROR, outcome.error.message)
            if self.captures_content:
                answer = {"type": "message", "role": "assistant", "content": outcome.text}
                span.set_attribute("gen_ai.output.messages", encode_attribute(make_output_messages([answer], "stop")))
        else:
            record_error(span, error or asyncio.CancelledError())
        span.end()

    def _end_handoff(self) -> None:
        if self._agent_span is not self._run_span:
            self._agent_span.end()
            self._agent_span = self._run_span


class TracedTransport:
    """A transport with a span for each request."""

    def __init__(self, run: RunTrace, transport: Transport) -> None:
        self._run = run
        self._transport = transport

    async def stream(self, request: dict[str, Any]) -> Events:
        attributes = self._describe_request(request)
        span = self._run.start_span(f"chat {request.get('model', '')}".rstrip(), SpanKind.CLIENT, attributes)
        try:
            # The context is current only while the request is sent. The reader of the events has its own.
            with CurrentSpan(span):
                events = await self._transport.stream(request)
        except BaseException as error:
            record_error(span, error)
            span.end()
            raise
        return self._read(span, events)

    async def close(self) -> None:
        await self._transport.close()

    async def _read(self, span: Span, events: Events) -> Events:
        is_finished = False
        try:
            async with aclosing(events):
                async for batch in events:
                    if not is_finished and batch:
                        is_finished = self._record_end(span, batch[-1])
                    yield batch
        except BaseException as error:
            if not is_finished:
                record_error(span, error)
            raise
        finally:
            span.end()

    def _record_end(self, span: Span, event: Event | Unknown) -> bool:
        """Record the response if this is the last event of it."""
        if event.type not in TERMINAL:
            return False
        response = msgspec.json.decode(codec.encode(event)).get("response")
        if isinstance(response, dict):
            record_response(span, response, captures_content=self._run.captures_content)
        return True

    def _describe_request(self, request: JsonObject) -> dict[str, Any]:
        attributes: dict[str, Any] = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": PROVIDER}
        for name, attribute in REQUEST_ATTRIBUTES.items():
            if isinstance(request.get(name), str | int | float):
                attributes[attribute] = request[name]
        if (request.get("text") or {}).get("format", {}).get("type", "text") != "text":
            attributes["gen_ai.output.type"] = "json"
        attributes |= describe_address(getattr(self._transport, "url", ""))
        if self._run.captures_content:
            attributes["gen_ai.input.messages"] = encode_attribute(make_input_messages(request["input"]))
            if request.get("instructions"):
                parts = [{"type": "text", "content": request["instructions"]}]
                attributes["gen_ai.system_instructions"] = encode_attribute(parts)
            if request.get("tools"):
                tools = [{key: tool[key] for key in tool if key not in _SECRET_KEYS} for tool in request["tools"]]
                attributes["gen_ai.tool.definitions"] = encode_attribute(tools)
        return attributes


class TracedExecutor(Executor):
    """An executor with a span for each call. The span is the current one for the tool."""

    def __init__(self, run: RunTrace, executor: Executor) -> None:
        self._run = run
        self._executor = executor

    @property
    def tools(self) -> Mapping[str, Tool]:
        return self._executor.tools

    @tools.setter
    def tools(self, tools: Mapping[str, Tool]) -> None:
        self._executor.tools = tools

    async def execute(
        self, call: ToolInvocation, context: ToolContext[Any], observer: CallObserver | None = None
    ) -> ToolResult:
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.name,
            "gen_ai.tool.call.id": call.call_id,
            "gen_ai.tool.type": "function",
            "antiphon.idempotency_key": context.idempotency_key,
        }
        if call.name in self.tools:
            attributes["gen_ai.tool.description"] = self.tools[call.name].description
        if self._run.captures_content:
            attributes["gen_ai.tool.call.arguments"] = limit_content(call.arguments)
        span = self._run.start_span(f"execute_tool {call.name}", SpanKind.INTERNAL, attributes)
        try:
            with CurrentSpan(span):
                result = await self._executor.execute(call, context, _SpanObserver(span, observer or CallObserver()))
        except ApprovalRequired:
            span.set_attribute("antiphon.outcome", "needs_approval")
            raise
        except BaseException as error:
            record_error(span, error)
            raise
        else:
            if result.is_error:
                span.set_attribute("error.type", "tool_error")
                span.set_status(StatusCode.ERROR)
            if self._run.captures_content:
                text = result.output
                output = limit_content(text) if isinstance(text, str) else encode_attribute(text)
                span.set_attribute("gen_ai.tool.call.result", output)
            return result
        finally:
            span.end()


class _SpanObserver(CallObserver):
    """Adds an event to the span for each attempt after the first, and for a tool that does not stop."""

    def __init__(self, span: Span, observer: CallObserver) -> None:
        self._span = span
        self._observer = observer
        self._count = 0

    async def begin(self) -> None:
        self._count += 1
        if self._count > 1:
            self._span.add_event("retry", {"antiphon.attempt": self._count})
        await self._observer.begin()

    def give_up(self) -> None:
        self._span.add_event("abandoned")
        self._observer.give_up()


def record_response(span: Span, response: JsonObject, *, captures_content: bool) -> None:
    """Add the attributes of a finished response, and its error if it failed."""
    if not span.is_recording():
        return
    reason = find_finish_reason(response)
    span.set_attribute("gen_ai.response.finish_reasons", [reason])
    for name in ("id", "model"):
        if isinstance(response.get(name), str):
            span.set_attribute(f"gen_ai.response.{name}", response[name])
    usage = parse_usage(response.get("usage"))
    if usage is not None:
        span.set_attributes(describe_usage(usage))
    error = response.get("error")
    if isinstance(error, dict):
        span.set_attribute("error.type", str(error.get("code") or "_OTHER"))
        span.set_status(StatusCode.ERROR, str(error.get("message") or ""))
    if captures_content:
        output = [item for item in response.get("output") or [] if isinstance(item, dict)]
        span.set_attribute("gen_ai.output.messages", encode_attribute(make_output_messages(output, reason)))
