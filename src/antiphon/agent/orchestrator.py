"""A review: a model calls tools until it submits its decision."""

import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct, structs

from antiphon.agent.entries import StartEntry
from antiphon.agent.history import join_text
from antiphon.agent.journal import Journal
from antiphon.agent.limits import Limits
from antiphon.agent.loop import Loop
from antiphon.agent.model_answer import ModelAnswer, TurnStream
from antiphon.agent.outcome import Outcome
from antiphon.agent.participants import Participant
from antiphon.agent.provider import Turn
from antiphon.agent.run_state import RunState
from antiphon.agent.run_stream import read_outcome
from antiphon.agent.task import Task
from antiphon.agent.tracing import start_trace
from antiphon.callbacks import call_callback
from antiphon.errors import AntiphonError, ConfigError
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.response import Usage
from antiphon.tools.base import Tool, ToolContext, ToolResult
from antiphon.tools.executor import Executor, make_error_result

if TYPE_CHECKING:
    from antiphon.agent.spans import RunTrace

MAX_TURNS = 20
SUBMIT_DECISION = "submit_decision"
EXHAUSTED: dict[str, Any] = {"is_approved": False, "reason": "Max turns reached or no actionable response"}
UNPARSED: dict[str, Any] = {"is_approved": False, "reason": "Failed to parse LLM decision."}
REMINDER = f"Continue, or call {SUBMIT_DECISION} with your decision."

DECISION_TOOL: dict[str, Any] = {
    "type": "function",
    "name": SUBMIT_DECISION,
    "description": "Submit the final decision. This ends the review.",
    "parameters": {
        "type": "object",
        "properties": {
            "is_approved": {"type": "boolean", "description": "Whether it is approved."},
            "reason": {"type": "string", "description": "Why."},
        },
        "required": ["is_approved", "reason"],
        "additionalProperties": False,
    },
    "strict": True,
}


class OrchestratorTool(Struct, frozen=True, kw_only=True):
    """A tool of a review. `run` gets the arguments by name and returns JSON as text, or a value to encode as JSON."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[..., Any]


class TurnProvider(Protocol):
    """The part of `Provider` that a review uses."""

    async def generate_responses_turn(
        self,
        previous_response_id: str | None = None,
        user_input: str | Sequence[dict[str, Any]] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        function_outputs: Mapping[str, str] | None = None,
    ) -> Turn: ...


class ProviderModel:
    """A model client that takes its turns through a provider and sends only new items."""

    interrupted_usage = Usage(0, 0, 0)

    def __init__(self, provider: TurnProvider, tools: Sequence[dict[str, Any]]) -> None:
        self._provider = provider
        self._tools = tools
        self.name = str(getattr(provider, "model", ""))
        self.trace: RunTrace | None = None
        self.error: AntiphonError | None = None
        """The error of the last turn, if it failed."""

    async def take_turn(self, state: RunState, extra_input: Sequence[JsonObject], *, use_tools: bool) -> TurnStream:
        request = partial(self._request_turn, state, extra_input)
        try:
            turn = await (request() if self.trace is None else self.trace.record_request(self.name, request))
        except AntiphonError as error:
            self.error = error
            raise
        output: list[JsonObject] = [{"type": "message", "role": "assistant", "content": turn.text}] if turn.text else []
        output += [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            for call in turn.tool_calls
        ]
        yield ModelAnswer(turn.response_id, output, Usage(0, 0, 0))

    async def _request_turn(self, state: RunState, extra_input: Sequence[JsonObject]) -> Turn:
        if state.response_id is None:
            return await self._provider.generate_responses_turn(None, join_text(state.history), self._tools, None)
        outputs = {item["call_id"]: item["output"] for item in state.history[state.sent_count :]}
        text = join_text(extra_input) or None
        return await self._provider.generate_responses_turn(state.response_id, text, None, outputs)


async def run_orchestrator(
    provider: TurnProvider, tools: Sequence[OrchestratorTool | Tool], prompt: str, max_turns: int = MAX_TURNS
) -> dict[str, Any]:
    """Return the decision that the model submits, or a rejection without one. Raises the errors of the provider."""
    if max_turns < 1:
        return dict(EXHAUSTED)
    model = ProviderModel(provider, _describe_tools(tools))
    outcome = await _review(model, tools, prompt, max_turns=max_turns, reminder=REMINDER)
    if model.error is not None:
        raise model.error
    if outcome.kind != "decision":
        return dict(EXHAUSTED)
    return dict(UNPARSED) if outcome.output is None else dict(outcome.output)


async def review(
    provider: TurnProvider,
    tools: Sequence[OrchestratorTool | Tool],
    prompt: str,
    *,
    max_turns: int = MAX_TURNS,
    reminder: str = REMINDER,
) -> Outcome:
    """Run a review and return its outcome. After a turn of text alone the model gets the text `reminder`."""
    model = ProviderModel(provider, _describe_tools(tools))
    return await _review(model, tools, prompt, max_turns=max_turns, reminder=reminder)


async def _review(
    model: ProviderModel, tools: Sequence[OrchestratorTool | Tool], prompt: str, *, max_turns: int, reminder: str
) -> Outcome:
    journal = Journal(f"run_{secrets.token_hex(8)}")
    items: list[JsonObject] = [{"role": "user", "content": prompt}]
    await journal.write(StartEntry("orchestrator", items, time.time()))
    limits = Limits(turns=max_turns, wrap_up=False)
    task = Task(limits=limits, decision=SUBMIT_DECISION, reminder=reminder, turn_retries=0)
    executor = Executor([_make_tool(tool) for tool in tools], unknown="unknown tool requested")
    trace = model.trace = start_trace(journal.run_id, agent="orchestrator", model=model.name, items=items)
    if trace is not None:
        executor = trace.wrap_executor(executor)
    outcome: Outcome | None = None
    try:
        outcome = await read_outcome(Loop(journal, Participant(model=model, executor=executor, task=task)).events())
        return outcome
    finally:
        if trace is not None:
            trace.end(outcome, sys.exc_info()[1])


def _describe_tools(tools: Sequence[OrchestratorTool | Tool]) -> list[dict[str, Any]]:
    described = [tool.describe() if isinstance(tool, Tool) else _describe(tool) for tool in tools]
    return described if any(tool.name == SUBMIT_DECISION for tool in tools) else [*described, DECISION_TOOL]


def _describe(tool: OrchestratorTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "strict": True,
    }


def _make_tool(tool: OrchestratorTool | Tool) -> Tool:
    """Return the tool for the executor. Failures become outputs in the format of the review."""
    if isinstance(tool, Tool):
        if tool.needs_approval:
            raise ConfigError(f"The tool '{tool.name}' needs approval, which a review cannot get.")
        return structs.replace(tool, repeatable=True)

    async def invoke(text: str, _: ToolContext) -> ToolResult:
        try:
            arguments = json.loads(text or "{}")
        except ValueError as error:
            return make_error_result(f"failed to parse arguments: {error}")
        if not isinstance(arguments, dict):
            return make_error_result("failed to parse arguments: they are not an object")
        result = await call_callback(partial(tool.run, **arguments))
        return ToolResult(result if isinstance(result, str) else json.dumps(result))

    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        invoke=invoke,
        # A review may repeat a call in every turn.
        repeatable=True,
    )
