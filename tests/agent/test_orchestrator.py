"""S4: the review that ends in a decision. Each test names the contract lines that it covers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from antiphon import tool
from antiphon.agent.orchestrator import DECISION_TOOL, REMINDER, OrchestratorTool, review, run_orchestrator
from antiphon.agent.provider import ToolCall, Turn
from antiphon.errors import ConfigError, RateLimited

EXHAUSTED = {"is_approved": False, "reason": "Max turns reached or no actionable response"}


class Script:
    """A provider with scripted turns. It repeats the last one."""

    def __init__(self, *turns: tuple[str, list[ToolCall]]) -> None:
        self._turns = turns
        self.requests: list[tuple[Any, ...]] = []

    async def generate_responses_turn(
        self,
        previous_response_id: str | None = None,
        user_input: str | Sequence[dict[str, Any]] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        function_outputs: Mapping[str, str] | None = None,
    ) -> Turn:
        outputs = dict(function_outputs) if function_outputs is not None else None
        self.requests.append((previous_response_id, user_input, tools, outputs))
        text, calls = self._turns[min(len(self.requests), len(self._turns)) - 1]
        return Turn(text, calls, f"resp_{len(self.requests)}")


def call(name: str, arguments: Any = None, call_id: str = "call_1") -> ToolCall:
    return ToolCall(call_id, name, arguments if isinstance(arguments, str) else json.dumps(arguments or {}))


def decide(**decision: Any) -> ToolCall:
    return call("submit_decision", {"is_approved": True, "reason": "good"} | decision, "call_d")


def make_tools(ran: list[Any] | None = None) -> list[OrchestratorTool]:
    log = [] if ran is None else ran

    def read(path: str) -> dict[str, str]:
        log.append(path)
        return {"content": path.upper()}

    async def fetch(path: str) -> str:
        log.append(path)
        return f'"{path}"'

    def explode() -> None:
        log.append("boom")
        raise ValueError("no fuse")

    schema: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}}
    return [
        OrchestratorTool(name=each.__name__, description="d", parameters=schema, run=each)
        for each in (read, fetch, explode)
    ]


async def test_s4_8_a_decision_ends_the_loop_at_once_and_later_calls_are_not_run() -> None:
    ran: list[Any] = []
    script = Script(
        ("", [call("read", {"path": "a"}, "call_1"), decide(extra=1), call("read", {"path": "b"}, "call_2")])
    )
    decision = await run_orchestrator(script, make_tools(ran), "Review it.")
    assert decision == {"is_approved": True, "reason": "good", "extra": 1}
    assert ran == ["a"]


async def test_s4_3_first_turn_has_prompt_and_tools_later_ones_only_outputs() -> None:
    script = Script(("", [call("read", {"path": "a"}), call("fetch", {"path": "b"}, "call_2")]), ("", [decide()]))
    await run_orchestrator(script, make_tools(), "Review it.")
    started, continued = script.requests
    assert (started[0], started[1], started[3]) == (None, "Review it.", None)
    assert [tool["name"] for tool in started[2]] == ["read", "fetch", "explode", "submit_decision"]
    assert started[2][-1] == DECISION_TOOL
    assert continued == ("resp_1", None, None, {"call_1": '{"content": "A"}', "call_2": '"b"'})


@pytest.mark.parametrize(
    ("made", "output"),
    [
        (call("explode"), {"error": "ValueError: no fuse"}),
        (call("nobody"), {"error": "unknown tool requested"}),
        (call("read", "{"), {"error": "failed to parse arguments: "}),
        (call("read", {"wrong": 1}), {"error": "TypeError: "}),
        (call("read", "[1]"), {"error": "failed to parse arguments: they are not an object"}),
    ],
)
async def test_s4_9_tool_error_is_its_output(made: ToolCall, output: dict[str, str]) -> None:
    script = Script(("", [made]), ("", [decide()]))
    assert (await run_orchestrator(script, make_tools(), "x"))["is_approved"] is True
    (result,) = script.requests[1][3].values()
    assert json.loads(result)["error"].startswith(output["error"])


async def test_s4_10_outputs_are_sent_once() -> None:
    script = Script(
        ("", [call("read", {"path": "a"})]), ("", [call("fetch", {"path": "b"}, "call_2")]), ("", [decide()])
    )
    await run_orchestrator(script, make_tools(), "x")
    assert [set(requests[3]) for requests in script.requests[1:]] == [{"call_1"}, {"call_2"}]


async def test_s4_11_empty_turn_ends_the_loop() -> None:
    script = Script((" \n", []))
    assert await run_orchestrator(script, make_tools(), "x") == EXHAUSTED
    assert len(script.requests) == 1
    assert (await review(Script((" \n", [])), make_tools(), "x")).kind == "no_progress"


async def test_s4_12_c21_text_alone_continues_with_a_reminder() -> None:
    script = Script(("I am thinking.", []), ("", [decide()]))
    assert await run_orchestrator(script, make_tools(), "x") == {"is_approved": True, "reason": "good"}
    assert script.requests[1] == ("resp_1", REMINDER, None, {})


async def test_s4_13_s4_8_c20_turn_limit_returns_a_rejection() -> None:
    script = Script(("", [call("read", {"path": "a"})]))
    assert await run_orchestrator(script, make_tools(), "x") == EXHAUSTED
    assert len(script.requests) == 20
    outcome = await review(Script(("Hm.", [])), make_tools(), "x", max_turns=3)
    assert (outcome.kind, outcome.turns) == ("max_turns", 3)


@pytest.mark.parametrize("arguments", ["{", "[]", "7"])
async def test_malformed_decision_is_no_approval(arguments: str) -> None:
    script = Script(("", [call("submit_decision", arguments)]))
    assert await run_orchestrator(script, [], "x") == {"is_approved": False, "reason": "Failed to parse LLM decision."}


async def test_s4_8_a_tool_is_run_in_the_last_turn_too() -> None:
    ran: list[Any] = []
    script = Script(("", [call("read", {"path": "a"})]))
    assert await run_orchestrator(script, make_tools(ran), "x", 3) == EXHAUSTED
    assert ran == ["a", "a", "a"]


async def test_s4_13_zero_turns_return_a_rejection() -> None:
    script = Script(("", [decide()]))
    assert await run_orchestrator(script, [], "x", max_turns=0) == EXHAUSTED
    assert script.requests == []


async def test_typed_functions_can_be_tools() -> None:
    @tool
    def read(path: str) -> dict[str, str]:
        """Read a file."""
        return {"content": path.upper()}

    script = Script(("", [call("read", {"path": "a"})]), ("", [decide()]))
    assert (await run_orchestrator(script, [read], "x"))["is_approved"] is True
    assert script.requests[0][2] == [read.describe(), DECISION_TOOL]
    assert script.requests[1][3] == {"call_1": '{"content":"A"}'}


async def test_tool_that_needs_approval_is_rejected() -> None:
    @tool(needs_approval=True)
    def pay() -> None:
        """Pay."""

    with pytest.raises(ConfigError, match="The tool 'pay' needs approval"):
        await run_orchestrator(Script(("", [decide()])), [pay], "x")


async def test_provider_error_is_raised_unchanged() -> None:
    class Limited(Script):
        async def generate_responses_turn(self, *_: Any, **__: Any) -> Turn:
            raise RateLimited("Slow down.")

    with pytest.raises(RateLimited, match=r"Slow down\."):
        await run_orchestrator(Limited(), [], "x")
