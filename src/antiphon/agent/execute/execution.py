"""A turn that a client asks for, end to end: the request, the tools that run here, and the envelope that comes of it.

Tools are of two kinds. Those of the server are run here, and the model goes on, until it calls nothing more. Those that
the client offers are the client's to run: a turn that calls one ends there, with what the server's own calls have come
to, and the client goes on from it with the results.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import Struct

from antiphon.agent.entries import Began
from antiphon.agent.execute.builder import ResponsesRequestBuilder, build_tool_results
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
from antiphon.agent.execute.tool_results import answer_calls
from antiphon.agent.execute.wire import AgentExecuteBody, Progress, tell
from antiphon.agent.history import list_calls
from antiphon.agent.journal import STOPPED, STOPPED_AT, WARNED_AT, WARNING, Journal, Signature, sign
from antiphon.agent.limits import Limits
from antiphon.agent.loop import Loop
from antiphon.agent.outcome import Outcome, RunEnded, TurnStarted
from antiphon.agent.task import Task
from antiphon.agent.transports.base import Transport
from antiphon.errors import AntiphonError, ConfigError, InvalidRequest, MissingParameter
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.tools.base import Tool, ToolContext, ToolInvocation, ToolResult
from antiphon.tools.executor import Executor

logger = logging.getLogger(__name__)

BEGIN = "<<<APTIX_SERVER_TOOL_USAGE_METADATA_BEGIN>>>"
END = "<<<APTIX_SERVER_TOOL_USAGE_METADATA_END>>>"


class UsageRegistry:
    """Tools by name, each with the text that says how it is used. One without is refused: models misuse such tools."""

    def __init__(self) -> None:
        self._usages: dict[str, str] = {}

    def register(self, name: str, usage: str | None) -> None:
        if not name or "'" in name or "\n" in name:
            raise ConfigError(f"A tool cannot be called {name!r}.")
        if usage is None or not usage.strip():
            raise ConfigError(f"The tool '{name}' has no usage text.")
        if name in self._usages:
            raise ConfigError(f"There are two tools called '{name}'.")
        self._usages[name] = usage

    def build_block(self) -> str | None:
        return build_usage_block(self._usages)


def build_usage_block(usages: Mapping[str, str | None]) -> str | None:
    """The block for these tools, in their order; None if none has a text. Those without are left out."""
    parts: list[str] = []
    for name, usage in usages.items():
        text = (usage or "").strip()
        if not text:
            logger.warning("the tool %s has no usage text and is not in the system prompt", name)
            continue
        parts += [f"<<<APTIX_TOOL_USAGE_BEGIN name='{name}'>>>", text, f"<<<APTIX_TOOL_USAGE_END name='{name}'>>>", ""]
    return "\n".join([BEGIN, *parts, END]) if parts else None


SUPPRESSED = msgspec.json.encode({"status": "suppressed", "message": STOPPED}).decode()


class Executed(Struct, frozen=True):
    """What a call came to. One that was not made has taken no time."""

    result: ToolResult
    milliseconds: int | None = None


async def _never(_: str, __: ToolContext) -> ToolResult:
    raise AssertionError("the client runs it")


# Stands for every tool of the client, whatever that calls it: a call of one is not made here, so it waits.
_THEIRS = Tool(name="theirs", description="", parameters={}, invoke=_never, needs_approval=True, repeatable=True)


class SuppressingExecutor(Executor):
    """Runs `tools`, and leaves calls by other names to the client. `executed` are the calls so far, by their ids."""

    def __init__(self, tools: Iterable[Tool], *, left_to_client: Iterable[str] = ()) -> None:
        # The guard against loops is our own, in this format's manner.
        super().__init__(msgspec.structs.replace(tool, repeatable=True) for tool in tools)
        self.tools = dict.fromkeys(left_to_client, _THEIRS) | dict(self.tools)
        self.executed: dict[str, Executed] = {}
        self._asked: Counter[Signature] = Counter()

    async def execute(self, call: ToolInvocation, context: ToolContext) -> ToolResult:
        signature = sign(call)
        self._asked[signature] += 1
        repeats = self._asked[signature]
        if repeats >= STOPPED_AT:
            return self._note(call, Executed(ToolResult(SUPPRESSED)))
        began = time.perf_counter()
        result = await super().execute(call, context)
        took = round((time.perf_counter() - began) * 1000) if call.name in self.tools else None
        return self._note(call, Executed(_warn(result) if repeats >= WARNED_AT else result, took))

    def _note(self, call: ToolInvocation, executed: Executed) -> ToolResult:
        self.executed[call.call_id] = executed
        return executed.result


def _warn(result: ToolResult) -> ToolResult:
    if isinstance(result.output, str):
        return ToolResult(f"{result.output}\n\n{WARNING}", result.is_error)
    return ToolResult([*result.output, {"type": "input_text", "text": WARNING}], result.is_error)


MAX_ITERATIONS = 10
MODEL_KEY = "agent_model"
"""Where a response says under which name its model was asked for, so that a continuation asks the same one."""


class Execution:
    """One turn. `previous` is the response that it continues. `error` is why it failed, once it has."""

    def __init__(
        self,
        asked: AgentExecuteBody,
        *,
        transport: Transport,
        defaults: ConversationContext,
        tools: Sequence[Tool] = (),
        previous: JsonObject | None = None,
    ) -> None:
        """Raises InvalidRequest for what cannot be executed."""
        self._asked = asked
        self._place = ExecutionContext(
            conversation_context_id=asked.conversation_context_id, agent_context_id=asked.agent_context_id
        )
        self.warnings: list[str] = []
        self._rag = self._read_chunks()
        self._context = _choose_context(asked, defaults, previous)
        request = self._build(tools, previous)
        self._server_tools = {tool.name for tool in tools}
        self._client_tools = set(_names(request.get("tools", ()))) - self._server_tools
        self._executor = SuppressingExecutor(tools, left_to_client=self._client_tools)
        self._model = ExecutionModel(transport, request)
        self.error: AntiphonError | None = None

    async def events(self) -> AsyncGenerator[Progress | AgentExecuteResponse, None]:
        """What happens, and the envelope last. There is no progress before the request was taken."""
        journal = Journal(f"turn_{secrets.token_hex(8)}")
        await journal.write(Began("execute", [], time.time()))
        task = Task(limits=Limits(turns=MAX_ITERATIONS), turn_retries=0)
        loop = Loop(journal, self._model, self._executor, task)
        held: list[Progress] = []
        async with aclosing(loop.events()) as happening:
            async for event in happening:
                if isinstance(event, RunEnded):
                    yield self._conclude(event.outcome)
                    return
                progress = tell(event)
                held += [progress] if progress is not None else []
                if not isinstance(event, TurnStarted):
                    for each in held:
                        yield each
                    held.clear()

    # The request

    def _build(self, tools: Sequence[Tool], previous: JsonObject | None) -> JsonObject:
        asked = self._asked
        if previous is None and not asked.instruction.strip():
            raise MissingParameter("Missing required parameter: 'Instruction'.", param="Instruction")
        block = asked.rag_context_block or (self._rag.block if self._rag is not None else None)
        usage = build_usage_block({tool.name: tool.description for tool in tools})
        built = ResponsesRequestBuilder.build(self._context, asked, block, usage)
        offered: list[JsonObject] = built.get("tools", []) if previous is None else previous.get("tools") or []
        offered = self._check_offer(offered, tools, initial=previous is None)
        self._check_texts(built, initial=previous is None)
        if previous is not None:
            calls = list_calls(previous.get("output") or ())
            built["input"] = [*answer_calls(calls, asked.tool_results_json), *built["input"]]
        if offered or tools:
            built["tools"] = [*offered, *(tool.describe() for tool in tools)]
        return built | {"store": True, "metadata": {MODEL_KEY: self._context.model_name}}

    def _check_offer(self, offered: list[JsonObject], tools: Sequence[Tool], *, initial: bool) -> list[JsonObject]:
        """The client's tools. Those of an earlier turn come with the server's, which may have changed since."""
        own = {tool.name for tool in tools}
        if not initial:
            return [tool for tool in offered if own.isdisjoint(_names([tool]))]
        for name in _names(offered):
            if name in own:
                raise InvalidRequest(
                    f"The server has a tool '{name}' of its own.", param="ToolsJson", code="duplicate_tool"
                )
        return offered

    def _check_texts(self, built: JsonObject, *, initial: bool) -> None:
        """What is wrong in the texts, or does not belong to this turn, does not lose it, but is told."""
        asked = self._asked
        if asked.tools_json and initial and "tools" not in built:
            self.warnings.append("ToolsJson is not a JSON array: it was left aside.")
        if asked.tools_json and not initial:
            self.warnings.append("ToolsJson counts in the first turn alone: it was left aside.")
        if asked.tool_results_json and initial:
            self.warnings.append("ToolResultsJson counts in a continuation alone: it was left aside.")
        elif asked.tool_results_json and build_tool_results(asked.tool_results_json) is None:
            self.warnings.append("ToolResultsJson holds no results: it was left aside.")

    def _read_chunks(self) -> RagContext | None:
        chunks = [chunk.as_chunk() for chunk in self._asked.rag_chunks]
        if not chunks:
            return None
        context = build_context(chunks)
        if len(context.sources) < len(chunks):
            self.warnings.append(f"RagChunks: the best {len(context.sources)} of {len(chunks)} are used.")
        return context

    # The envelope

    def _conclude(self, outcome: Outcome) -> AgentExecuteResponse:
        if outcome.kind == "max_turns":
            self.warnings.append(f"The model was stopped after {MAX_ITERATIONS} iterations.")
        self.error = self._model.error
        envelope = self._map_error() if self.error is not None else self._map(self._model.responses[-1])
        if self._model.responses:
            last = self._model.responses[-1]
            # What was done before an error is done, and can be gone on from.
            envelope.response_continuation_id = last["id"]
            envelope.tool_calls = self._describe_calls(last, outcome)
            envelope.usage = _add_up(self._map(response).usage for response in self._model.responses)
        envelope.warnings = self.warnings
        return envelope

    def _map(self, response: JsonObject) -> AgentExecuteResponse:
        sources = self._rag.sources if self._rag is not None else ()
        return map_response(response, self._asked, self._place, sources=sources)

    def _map_error(self) -> AgentExecuteResponse:
        assert self.error is not None
        if self._model.failed is not None and self._model.failed.get("error"):
            return self._map(self._model.failed)
        return describe_error(self.error, self._asked, self._place)

    def _describe_calls(self, response: JsonObject, outcome: Outcome) -> list[AgentToolCall]:
        outputs = {item["call_id"]: item["output"] for item in outcome.history if "output" in item}
        answerable = {call["call_id"] for call in list_calls(response["output"])}
        described: list[AgentToolCall] = []
        for call in self._map(response).tool_calls:
            if call.call_id not in answerable:
                self.warnings.append(f"The call of {call.name} was cut off: it was left out.")
                continue
            self._describe_call(call, outputs.get(call.call_id))
            described.append(call)
        return described

    def _describe_call(self, call: AgentToolCall, output: Any) -> None:
        executed = self._executor.executed.get(call.call_id)
        call.is_server_tool = call.name in self._server_tools
        call.requires_client_execution = call.name in self._client_tools and output is None
        call.was_executed = executed is not None and executed.milliseconds is not None
        if executed is not None:
            call.execution_ms = executed.milliseconds
        if output is None:
            return
        if executed is None or executed.result.is_error:
            call.error_message = _read_error(output)
        else:
            call.result_json = _as_json(output)


def describe_error(
    error: AntiphonError, asked: AgentExecuteBody | None = None, place: ExecutionContext | None = None
) -> AgentExecuteResponse:
    """The envelope of a turn that was refused, or came to nothing."""
    payload = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return map_error(error, asked or AgentExecuteBody(), place, body=msgspec.json.encode({"error": payload}))


def _choose_context(
    asked: AgentExecuteBody, defaults: ConversationContext, previous: JsonObject | None
) -> ConversationContext:
    """What the client says, else what the conversation began with, else what the settings say."""
    given = asked.conversation_context
    before = previous or {}
    named = (before.get("metadata") or {}).get(MODEL_KEY) or before.get("model")
    temperature: float | None = before.get("temperature")
    if temperature is None:
        temperature = defaults.temperature
    return ConversationContext(
        model_name=(given.model_name if given else None) or named or defaults.model_name,
        temperature=temperature if given is None or given.temperature is None else given.temperature,
        system=defaults.system if given is None or given.system is None else given.system,
    )


def _names(tools: Sequence[JsonObject]) -> Iterator[str]:
    """The names that calls of these tools go by."""
    for tool in tools:
        body = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        children = tool.get("tools")
        if tool.get("type") == "namespace" and isinstance(children, list):
            yield from _names([child for child in children if isinstance(child, dict)])
        elif isinstance(body, Mapping) and isinstance(body.get("name"), str):
            yield body["name"]


def _add_up(usages: Iterator[LlmUsage]) -> LlmUsage:
    total = LlmUsage()
    for usage in usages:
        for name in total.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(usage, name))
    return total


def _as_json(output: Any) -> str:
    if isinstance(output, str):
        try:
            read_json(output)
        except msgspec.DecodeError:
            return msgspec.json.encode(output).decode()
        return output
    return msgspec.json.encode(output).decode()


def _read_error(output: Any) -> str:
    """The message in what a model reads of an error."""
    try:
        return str(read_json(output)["error"])
    except (msgspec.DecodeError, TypeError, LookupError):
        return output if isinstance(output, str) else _as_json(output)
