"""The loop that reviews something by calling tools until it submits its decision."""

import inspect
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from msgspec import Struct, structs

from antiphon.agent.entries import Began
from antiphon.agent.journal import Journal, State, text_of
from antiphon.agent.limits import Limits
from antiphon.agent.loop import Loop
from antiphon.agent.model import Answer
from antiphon.agent.model import Turn as Turns
from antiphon.agent.outcome import Outcome, RunEnded
from antiphon.agent.provider import Turn
from antiphon.agent.task import Task
from antiphon.errors import AntiphonError, ConfigError
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.response import Usage
from antiphon.tools.base import Tool, ToolContext, ToolResult
from antiphon.tools.executor import Executor, make_error_result

MAX_TURNS = 20
SUBMIT_DECISION = "submit_decision"
EXHAUSTED: dict[str, Any] = {"is_approved": False, "reason": "Max turns reached or no actionable response"}
UNPARSED: dict[str, Any] = {"is_approved": False, "reason": "Failed to parse LLM decision."}
NUDGE = f"Continue, or call {SUBMIT_DECISION} with your decision."

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
    """A tool of the loop: `run` takes the parsed arguments by name, and gives JSON as text or anything JSON can say."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[..., Any]


class TurnTaker(Protocol):
    async def generate_responses_turn(
        self,
        previous_response_id: str | None = None,
        user_input: str | Sequence[dict[str, Any]] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        function_outputs: Mapping[str, str] | None = None,
    ) -> Turn: ...


class ProviderModel:
    """Takes the loop's turns through a provider, which is told only what is new in each."""

    def __init__(self, provider: TurnTaker, tools: Sequence[dict[str, Any]]) -> None:
        self._provider = provider
        self._tools = tools
        self.error: AntiphonError | None = None
        """Why the last turn failed, if it did."""

    async def take_turn(self, state: State, told: Sequence[JsonObject], *, use_tools: bool) -> Turns:
        try:
            turn = await self._ask(state, told)
        except AntiphonError as error:
            self.error = error
            raise
        output: list[JsonObject] = [{"type": "message", "role": "assistant", "content": turn.text}] if turn.text else []
        output += [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            for call in turn.tool_calls
        ]
        yield Answer(turn.response_id, output, Usage(0, 0, 0))

    async def _ask(self, state: State, told: Sequence[JsonObject]) -> Turn:
        if state.response_id is None:
            return await self._provider.generate_responses_turn(None, text_of(state.history), self._tools, None)
        outputs = {item["call_id"]: item["output"] for item in state.history[state.sent :]}
        return await self._provider.generate_responses_turn(state.response_id, text_of(told) or None, None, outputs)


async def run_orchestrator(
    provider: TurnTaker, tools: Sequence[OrchestratorTool | Tool], prompt: str, max_turns: int = MAX_TURNS
) -> dict[str, Any]:
    """The decision that the model submits, or the one that stands for none. What the provider raises is raised."""
    if max_turns < 1:
        return dict(EXHAUSTED)
    model = ProviderModel(provider, _offer_all(tools))
    outcome = await _review(model, tools, prompt, max_turns=max_turns, nudge=NUDGE)
    if model.error is not None:
        raise model.error
    if outcome.kind != "decision":
        return dict(EXHAUSTED)
    return dict(UNPARSED) if outcome.output is None else dict(outcome.output)


async def review(
    provider: TurnTaker,
    tools: Sequence[OrchestratorTool | Tool],
    prompt: str,
    *,
    max_turns: int = MAX_TURNS,
    nudge: str = NUDGE,
) -> Outcome:
    """The same, with how it ended. After a turn of text alone the model is nudged to go on."""
    model = ProviderModel(provider, _offer_all(tools))
    return await _review(model, tools, prompt, max_turns=max_turns, nudge=nudge)


async def _review(
    model: ProviderModel, tools: Sequence[OrchestratorTool | Tool], prompt: str, *, max_turns: int, nudge: str
) -> Outcome:
    journal = Journal(f"run_{secrets.token_hex(8)}")
    await journal.write(Began("orchestrator", [{"role": "user", "content": prompt}], time.time()))
    task = Task(limits=Limits(turns=max_turns, wrap_up=False), decision=SUBMIT_DECISION, nudge=nudge, turn_retries=0)
    executor = Executor([_make_tool(tool) for tool in tools], unknown="unknown tool requested")
    loop = Loop(journal, model, executor, task)
    outcome: Outcome | None = None
    async with aclosing(loop.events()) as events:
        async for event in events:
            if isinstance(event, RunEnded):
                outcome = event.outcome
    assert outcome is not None, "a run ends by saying how"
    return outcome


def _offer_all(tools: Sequence[OrchestratorTool | Tool]) -> list[dict[str, Any]]:
    offered = [tool.describe() if isinstance(tool, Tool) else _offer(tool) for tool in tools]
    return offered if any(tool.name == SUBMIT_DECISION for tool in tools) else [*offered, DECISION_TOOL]


def _offer(tool: OrchestratorTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "strict": True,
    }


def _make_tool(tool: OrchestratorTool | Tool) -> Tool:
    """What goes wrong in it is an output in the words of this loop."""
    if isinstance(tool, Tool):
        if tool.needs_approval:
            raise ConfigError(f"The tool '{tool.name}' needs approval, and nobody can give it here.")
        return structs.replace(tool, repeatable=True)

    async def invoke(text: str, _: ToolContext) -> ToolResult:
        try:
            arguments = json.loads(text or "{}")
        except ValueError as error:
            return make_error_result(f"failed to parse arguments: {error}")
        if not isinstance(arguments, dict):
            return make_error_result("failed to parse arguments: they are not an object")
        result = tool.run(**arguments)
        if inspect.isawaitable(result):
            result = await result
        return ToolResult(result if isinstance(result, str) else json.dumps(result))

    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        invoke=invoke,
        # A review may look at the same thing as often as it has turns for.
        repeatable=True,
    )
