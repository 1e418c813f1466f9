"""The execution of a turn of the execute endpoint: the request, the server's tools, and the response envelope.

Tools of the server run here, and the model continues until it makes no more calls. Tools that the client offers run at
the client: a turn with a call of one ends there, with the results of the server's own calls, and the client continues
it with its results.
"""

import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import Struct

from antiphon.agent.entries import StartEntry
from antiphon.agent.execute.builder import ResponsesRequestBuilder, build_tool_results, build_usage_block
from antiphon.agent.execute.envelope import (
    AgentExecuteResponse,
    AgentToolCall,
    ConversationContext,
    ExecutionContext,
    LlmUsage,
)
from antiphon.agent.execute.mapper import map_error, map_response
from antiphon.agent.execute.model import ExecutionModel
from antiphon.agent.execute.rag import RagContext, build_context
from antiphon.agent.execute.tool_results import make_output_items
from antiphon.agent.execute.wire import AgentExecuteBody, Progress, make_progress
from antiphon.agent.history import OUTPUT_TYPES, find_complete_calls
from antiphon.agent.journal import Journal
from antiphon.agent.limits import Limits
from antiphon.agent.loop import Loop
from antiphon.agent.loop_guard import STOP_AT, STOPPED, WARN_AT, Signature, add_warning, make_signature
from antiphon.agent.outcome import Outcome, RunEnded, TurnStarted
from antiphon.agent.participants import Participant
from antiphon.agent.task import Task
from antiphon.agent.tracing import start_trace
from antiphon.agent.transports.base import Transport
from antiphon.errors import AntiphonError, InvalidRequest, MissingParameter
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.tools.base import Tool, ToolContext, ToolInvocation, ToolResult
from antiphon.tools.executor import CallObserver, Executor

MAX_ITERATIONS = 10
MODEL_KEY = "agent_model"
"""The metadata key of a response for the requested model name, so that a continuation requests the same model."""

SUPPRESSED = msgspec.json.encode({"status": "suppressed", "message": STOPPED}).decode()


class Execution:
    """The execution of one turn. `previous` is the response that it continues. `error` is set if the turn failed."""

    def __init__(
        self,
        body: AgentExecuteBody,
        *,
        transport: Transport,
        defaults: ConversationContext,
        tools: Sequence[Tool] = (),
        previous: JsonObject | None = None,
    ) -> None:
        """Raises InvalidRequest for a body that cannot be executed."""
        self._body = body
        self._execution_context = ExecutionContext(
            conversation_context_id=body.conversation_context_id, agent_context_id=body.agent_context_id
        )
        self.warnings: list[str] = []
        self._rag = self._build_rag_context()
        self._context = _choose_context(body, defaults, previous)
        request = self._build_request(tools, previous)
        self._server_tools = {tool.name for tool in tools}
        self._client_tools = set(_find_tool_names(request.get("tools", ()))) - self._server_tools
        self._executor = SuppressingExecutor(tools, client_tools=self._client_tools)
        self._model = ExecutionModel(transport, request)
        self.error: AntiphonError | None = None

    async def events(self) -> AsyncGenerator[Progress | AgentExecuteResponse, None]:
        """Execute the turn: yield progress, and the envelope last. Progress starts when the server has accepted."""
        journal = Journal(f"turn_{secrets.token_hex(8)}")
        await journal.write(StartEntry("execute", [], time.time()))
        # The answer at the limit is the last iteration.
        task = Task(limits=Limits(turns=MAX_ITERATIONS - 1), turn_retries=0)
        trace = start_trace(
            journal.run_id, agent="execute", model=self._context.model_name, items=self._model.first_items
        )
        executor: Executor = self._executor
        if trace is not None:
            self._model.wrap_transport(trace.wrap_transport)
            executor = trace.wrap_executor(executor)
        loop = Loop(journal, Participant(model=self._model, executor=executor, task=task))
        outcome: Outcome | None = None
        try:
            async with aclosing(self._read_progress(loop)) as events:
                async for event in events:
                    if not isinstance(event, RunEnded):
                        yield event
                        continue
                    outcome = event.outcome
                    yield self._make_envelope(outcome)
        finally:
            if trace is not None:
                trace.end(outcome, sys.exc_info()[1])

    async def _read_progress(self, loop: Loop) -> AsyncGenerator[Progress | RunEnded, None]:
        """Yield progress, from the time at which the server has accepted the request, and the end of the run last."""
        held: list[Progress] = []
        async with aclosing(loop.events()) as events:
            async for event in events:
                if isinstance(event, RunEnded):
                    yield event
                    return
                progress = make_progress(event)
                held += [progress] if progress is not None else []
                if not isinstance(event, TurnStarted):
                    for each in held:
                        yield each
                    held.clear()

    # The request

    def _build_request(self, tools: Sequence[Tool], previous: JsonObject | None) -> JsonObject:
        body, is_initial = self._body, previous is None
        if is_initial and not body.instruction.strip():
            raise MissingParameter("Missing required parameter: 'Instruction'.", param="Instruction")
        block = body.rag_context_block or (self._rag.block if self._rag is not None else None)
        usage = build_usage_block({tool.name: tool.description for tool in tools})
        request = ResponsesRequestBuilder.build(self._context, body, block, usage)
        client_tools: list[JsonObject] = request.get("tools", []) if previous is None else previous.get("tools") or []
        client_tools = self._check_client_tools(client_tools, tools, is_initial=is_initial)
        self._check_json_texts(request, is_initial=is_initial)
        if previous is not None:
            calls = find_complete_calls(previous.get("output") or ())
            request["input"] = [*make_output_items(calls, body.tool_results_json), *request["input"]]
        if client_tools or tools:
            request["tools"] = [*client_tools, *(tool.describe() for tool in tools)]
        return request | {"store": True, "metadata": {MODEL_KEY: self._context.model_name}}

    def _check_client_tools(
        self, client_tools: list[JsonObject], tools: Sequence[Tool], *, is_initial: bool
    ) -> list[JsonObject]:
        """Return the client's tools. The tools of a previous response include the server's, which may have changed."""
        own = {tool.name for tool in tools}
        if not is_initial:
            return [tool for tool in client_tools if own.isdisjoint(_find_tool_names([tool]))]
        for name in _find_tool_names(client_tools):
            if name in own:
                raise InvalidRequest(
                    f"The server has a tool '{name}' of its own.", param="ToolsJson", code="duplicate_tool"
                )
        return client_tools

    def _check_json_texts(self, request: JsonObject, *, is_initial: bool) -> None:
        """Collect warnings about malformed or ignored JSON texts. They do not fail the turn."""
        body = self._body
        if body.tools_json and is_initial and "tools" not in request:
            self.warnings.append("ToolsJson is ignored: it is not a JSON array.")
        if body.tools_json and not is_initial:
            self.warnings.append("ToolsJson is ignored: it applies only to the first turn.")
        if body.tool_results_json and is_initial:
            self.warnings.append("ToolResultsJson is ignored: it applies only to a continuation.")
        elif body.tool_results_json and build_tool_results(body.tool_results_json) is None:
            self.warnings.append("ToolResultsJson is ignored: it contains no results.")

    def _build_rag_context(self) -> RagContext | None:
        chunks = [chunk.to_chunk() for chunk in self._body.rag_chunks]
        if not chunks:
            return None
        context = build_context(chunks)
        if len(context.sources) < len(chunks):
            self.warnings.append(f"RagChunks: the best {len(context.sources)} of {len(chunks)} are used.")
        return context

    # The envelope

    def _make_envelope(self, outcome: Outcome) -> AgentExecuteResponse:
        if outcome.kind == "max_turns":
            self.warnings.append(f"The model was stopped after {MAX_ITERATIONS} iterations.")
        self.error = self._model.error
        envelope = self._map_error() if self.error is not None else self._map(self._model.responses[-1])
        if self._model.responses:
            last = self._model.responses[-1]
            # The turns before an error are finished, and the client can continue from them.
            envelope.response_continuation_id = last["id"]
            envelope.tool_calls = self._describe_calls(last, outcome)
            envelope.usage = _sum_usage(self._map(response).usage for response in self._model.responses)
        envelope.warnings = self.warnings
        return envelope

    def _map(self, response: JsonObject) -> AgentExecuteResponse:
        sources = self._rag.sources if self._rag is not None else ()
        return map_response(response, self._body, self._execution_context, sources=sources)

    def _map_error(self) -> AgentExecuteResponse:
        assert self.error is not None
        if self._model.failed is not None and self._model.failed.get("error"):
            return self._map(self._model.failed)
        return make_error_envelope(self.error, self._body, self._execution_context)

    def _describe_calls(self, response: JsonObject, outcome: Outcome) -> list[AgentToolCall]:
        outputs = _find_last_outputs(outcome.history)
        complete = {call["call_id"] for call in find_complete_calls(response["output"])}
        described: list[AgentToolCall] = []
        for call in self._map(response).tool_calls:
            if call.call_id not in complete:
                self.warnings.append(f"The call of {call.name} was cut off and is omitted.")
                continue
            self._describe_call(call, outputs.get(call.call_id))
            described.append(call)
        return described

    def _describe_call(self, call: AgentToolCall, output: Any) -> None:
        executed = None if output is None else self._executor.executed.get(call.call_id)
        call.is_server_tool = call.name in self._server_tools
        call.requires_client_execution = call.name in self._client_tools and output is None
        call.was_executed = executed is not None and executed.milliseconds is not None
        if executed is not None:
            call.execution_ms = executed.milliseconds
        if output is None:
            return
        if executed is None or executed.result.is_error:
            call.error_message = _find_error_message(output)
        else:
            call.result_json = _to_json(output)


def make_error_envelope(
    error: AntiphonError, body: AgentExecuteBody | None = None, context: ExecutionContext | None = None
) -> AgentExecuteResponse:
    """Return the envelope of a turn that was rejected or failed."""
    payload = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return map_error(error, body or AgentExecuteBody(), context, body=msgspec.json.encode({"error": payload}))


class ExecutedCall(Struct, frozen=True):
    """The result of a call. `milliseconds` is None for a call that was not run."""

    result: ToolResult
    milliseconds: int | None = None


class SuppressingExecutor(Executor):
    """Runs `tools`, and leaves the calls of client tools pending. `executed` are the calls so far, by id.

    The loop guard of this endpoint differs from the agent's: a suppressed call has a successful result.
    """

    def __init__(self, tools: Iterable[Tool], *, client_tools: Iterable[str] = ()) -> None:
        # Repeatable, so that the guard of the loop does not apply too.
        super().__init__(msgspec.structs.replace(tool, repeatable=True) for tool in tools)
        self.tools = dict.fromkeys(client_tools, _CLIENT_TOOL) | dict(self.tools)
        self.executed: dict[str, ExecutedCall] = {}
        self._counts: Counter[Signature] = Counter()

    async def execute(
        self, call: ToolInvocation, context: ToolContext, observer: CallObserver | None = None
    ) -> ToolResult:
        signature = make_signature(call)
        self._counts[signature] += 1
        repeat = self._counts[signature]
        if repeat >= STOP_AT:
            if observer is not None:
                await observer.begin()
            return self._record(call, ExecutedCall(ToolResult(SUPPRESSED)))
        started = time.perf_counter()
        result = await super().execute(call, context, observer)
        milliseconds = round((time.perf_counter() - started) * 1000) if call.name in self.tools else None
        return self._record(call, ExecutedCall(add_warning(result) if repeat >= WARN_AT else result, milliseconds))

    def _record(self, call: ToolInvocation, executed: ExecutedCall) -> ToolResult:
        self.executed[call.call_id] = executed
        return executed.result


async def _fail_client_tool(_: str, __: ToolContext) -> ToolResult:
    raise AssertionError("the client runs it")


# Replaces every tool of the client. It needs approval, so its calls stay pending and end the turn.
_CLIENT_TOOL = Tool(
    name="client_tool", description="", parameters={}, invoke=_fail_client_tool, needs_approval=True, repeatable=True
)


def _choose_context(
    body: AgentExecuteBody, defaults: ConversationContext, previous: JsonObject | None
) -> ConversationContext:
    """Return the request's values, else the conversation's, else the configured defaults."""
    requested = body.conversation_context
    before = previous or {}
    model = (before.get("metadata") or {}).get(MODEL_KEY) or before.get("model")
    temperature: float | None = before.get("temperature")
    if temperature is None:
        temperature = defaults.temperature
    return ConversationContext(
        model_name=(requested.model_name if requested else None) or model or defaults.model_name,
        temperature=temperature if requested is None or requested.temperature is None else requested.temperature,
        system=defaults.system if requested is None or requested.system is None else requested.system,
    )


def _find_tool_names(tools: Sequence[JsonObject]) -> Iterator[str]:
    """Yield the names in calls of these tools."""
    for tool in tools:
        body = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        children = tool.get("tools")
        if tool.get("type") == "namespace" and isinstance(children, list):
            yield from _find_tool_names([child for child in children if isinstance(child, dict)])
        elif isinstance(body, Mapping) and isinstance(body.get("name"), str):
            yield body["name"]


def _find_last_outputs(history: Iterable[JsonObject]) -> dict[str, Any]:
    """Return the outputs of the calls, by id. A model may use an id twice: then the last call counts."""
    outputs: dict[str, Any] = {}
    for item in history:
        if item.get("type") in OUTPUT_TYPES:
            outputs.pop(item["call_id"], None)
        elif item.get("type") in OUTPUT_TYPES.values():
            outputs[item["call_id"]] = item["output"]
    return outputs


def _sum_usage(usages: Iterator[LlmUsage]) -> LlmUsage:
    total = LlmUsage()
    for usage in usages:
        for name in total.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(usage, name))
    return total


def _to_json(output: Any) -> str:
    if isinstance(output, str):
        try:
            read_json(output)
        except msgspec.DecodeError:
            return msgspec.json.encode(output).decode()
        return output
    return msgspec.json.encode(output).decode()


def _find_error_message(output: Any) -> str:
    """Return the message in the output of a failed call."""
    try:
        return str(read_json(output)["error"])
    except (msgspec.DecodeError, TypeError, LookupError):
        return output if isinstance(output, str) else _to_json(output)
