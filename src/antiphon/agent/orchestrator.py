"""The loop that reviews something by calling tools until it submits its decision."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from antiphon.agent.provider import ToolCall, Turn

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


class Review(Struct, frozen=True, kw_only=True):
    """How the loop ended: with a decision, at its limit, or without progress."""

    kind: Literal["decision", "max_turns", "no_progress"]
    decision: dict[str, Any]
    turns: int


async def run_orchestrator(
    provider: TurnTaker, tools: Sequence[OrchestratorTool], prompt: str, max_turns: int = MAX_TURNS
) -> dict[str, Any]:
    """The decision that the model submits, or the one that stands for none."""
    return (await review(provider, tools, prompt, max_turns=max_turns)).decision


async def review(
    provider: TurnTaker,
    tools: Sequence[OrchestratorTool],
    prompt: str,
    *,
    max_turns: int = MAX_TURNS,
    nudge: str = NUDGE,
) -> Review:
    """Take turns until there is a decision. After a turn of text alone the model is nudged to go on."""
    by_name = {tool.name: tool for tool in tools}
    offered = [_offer(tool) for tool in tools]
    if SUBMIT_DECISION not in by_name:
        offered.append(DECISION_TOOL)
    previous: str | None = None
    pending: dict[str, str] = {}
    for number in range(1, max_turns + 1):
        if previous is None:
            turn = await provider.generate_responses_turn(None, prompt, offered, None)
        else:
            turn = await provider.generate_responses_turn(previous, None if pending else nudge, None, pending)
        previous, pending = turn.response_id, {}
        for call in turn.tool_calls:
            if call.name == SUBMIT_DECISION:
                return Review(kind="decision", decision=_read_decision(call), turns=number)
            pending[call.id] = await _run_tool(by_name, call)
        if not turn.tool_calls and not turn.text.strip():
            return Review(kind="no_progress", decision=dict(EXHAUSTED), turns=number)
    return Review(kind="max_turns", decision=dict(EXHAUSTED), turns=max_turns)


def _offer(tool: OrchestratorTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "strict": True,
    }


def _read_decision(call: ToolCall) -> dict[str, Any]:
    try:
        decision = json.loads(call.arguments)
    except ValueError:
        return dict(UNPARSED)
    return decision if isinstance(decision, dict) else dict(UNPARSED)


async def _run_tool(tools: Mapping[str, OrchestratorTool], call: ToolCall) -> str:
    """What the model reads: whatever goes wrong in a tool is its output, not the loop's end."""
    tool = tools.get(call.name)
    if tool is None:
        return json.dumps({"error": "unknown tool requested"})
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError as error:
        return json.dumps({"error": f"failed to parse arguments: {error}"})
    try:
        result = tool.run(**arguments)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else json.dumps(result)
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
