"""The tool calls of a turn: leaving a run during them, repeats, and malformed arguments."""

import json
import sys
from collections import Counter
from typing import Any

import pytest

from antiphon import tool
from antiphon.agent.journal import load
from antiphon.agent.loop_guard import STOPPED, WARNING
from antiphon.ledger import Ledger
from support.scripted_model import ScriptedModel, call, look_up, open_scripted, outputs_of

THREE = [call("act", {"number": number}, f"call_{number}") for number in (1, 2, 3)]


async def test_run_left_after_any_event_can_be_resumed(in_process: ScriptedModel, ledger: Ledger) -> None:
    count, left = 0, True
    while left:
        count += 1
        left = await leave_after(count, in_process, ledger)
    assert count > 10


async def leave_after(count: int, in_process: ScriptedModel, ledger: Ledger) -> bool:
    """Close the stream after `count` events and resume the run. Return True if there were as many."""
    effects: Counter[int] = Counter()

    @tool
    async def act(number: int) -> str:
        """Have an effect."""
        effects[number] += 1
        return "Done."

    in_process.set_answers([{"text": "Well"}, *THREE], "It is done.", "It is done.")
    agent, run_id = in_process.agent(tools=[act]), f"run_{count}"
    events = agent.run_stream("Go.", ledger=ledger, run_id=run_id)
    seen = 0
    async for _ in events:
        seen += 1
        if seen == count:
            break
    await events.aclose()
    before = effects.copy()
    outcome = await agent.resume(run_id, ledger=ledger)
    if outcome.kind == "needs_approval":
        # The calls that had begun. A person knows which of them have had their effect.
        numbers = {each.call_id: json.loads(each.arguments)["number"] for each in outcome.pending}
        approvals = {call_id: not before[number] for call_id, number in numbers.items()}
        outcome = await agent.resume(run_id, approvals=approvals, ledger=ledger)
    assert (outcome.kind, max(effects.values(), default=1)) == ("final", 1)
    calls, outputs = pairs((await load(run_id, ledger)).state.history)
    assert calls == outputs
    return seen == count


def pairs(history: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the ids of the calls in a history and of the outputs."""
    calls = [item["call_id"] for item in history if item.get("type") == "function_call"]
    return calls, [call_id for call_id, _ in outputs_of({"input": history})]


async def test_first_of_identical_calls_in_a_turn_has_no_warning(in_process: ScriptedModel) -> None:
    @tool
    async def act() -> str:
        """Do it."""
        return "Done."

    in_process.set_answers([call("act", call_id=f"call_{number}") for number in (1, 2, 3)], "Well.")
    outcome = await in_process.agent(tools=[act]).run("Go.")
    first, second, third = (output for _, output in outputs_of({"input": outcome.history}))
    assert (first, second) == ("Done.", f"Done.\n\n{WARNING}")
    assert STOPPED in third


async def test_malformed_arguments_need_no_approval(in_process: ScriptedModel, ledger: Ledger) -> None:
    checked = []

    def ask(arguments: Any) -> bool:
        checked.append(arguments)
        return True

    @tool(needs_approval=ask)
    async def pay(amount: int) -> str:
        """Pay."""
        return "paid"

    deep = [call("pay", "[" * 100_000, f"call_{number}") for number in (1, 2)]
    in_process.set_answers(deep, "I see.")
    agent = in_process.agent(tools=[pay])
    outcome = await agent.run("Pay.", ledger=ledger, run_id="run_1")
    reason = "The arguments are not valid JSON: JSON is nested too deeply"
    outputs = [json.loads(output.partition("\n")[0])["error"] for _, output in outputs_of({"input": outcome.history})]
    assert (outcome.kind, outputs, checked) == ("final", [reason, reason], [])
    again = await agent.resume("run_1", ledger=ledger)
    assert (again.kind, again.history) == ("final", outcome.history)


async def test_custom_tool_call_is_answered_with_an_error() -> None:
    async with open_scripted("upstream") as scripted:
        made = {"type": "custom_tool_call", "id": "ct_1", "call_id": "call_1", "name": "patch", "input": "diff"}
        scripted.set_answers([{"item": made}], "I see.")
        outcome = await scripted.agent().run("Go.")
        error = '{"error":"There is no tool \'patch\'. There are: none."}'
        assert (outcome.kind, scripted.sent[1]["input"][-1]) == (
            "final",
            {"type": "custom_tool_call_output", "call_id": "call_1", "output": error},
        )


@pytest.mark.parametrize(
    ("given", "sent"), [({"input": {"a": 1}}, '{"a":1}'), ({"input": {}}, "{}"), ({"input": None}, ""), ({}, "")]
)
async def test_input_of_a_custom_tool_call_is_sent_back_as_text(given: dict[str, Any], sent: str) -> None:
    async with open_scripted("upstream") as scripted:
        made = {"type": "custom_tool_call", "id": "ct_1", "call_id": "call_1", "name": "patch"}
        scripted.set_answers([{"item": made | given}], "I see.")
        outcome = await scripted.agent().run("Go.")
        expected = {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": sent}
        assert (outcome.kind, scripted.sent[1]["input"][-2]) == ("final", expected)


async def test_needs_approval_function_that_exits_requires_approval(in_process: ScriptedModel) -> None:
    @tool(needs_approval=lambda _: sys.exit(1))
    async def pay() -> str:
        """Pay."""
        return "paid"

    in_process.set_answers([call("pay")], "Paid.")
    outcome = await in_process.agent(tools=[pay]).run("Pay.")
    assert (outcome.kind, [each.name for each in outcome.pending]) == ("needs_approval", ["pay"])


async def test_repeated_call_with_a_new_result_is_no_loop(in_process: ScriptedModel) -> None:
    lines: list[int] = []

    @tool
    async def read() -> str:
        """Read."""
        return f"{len(lines)} lines"

    @tool
    async def edit() -> str:
        """Write a line."""
        lines.append(1)
        return "written"

    in_process.set_answers(*[[call("read")], [call("edit")]] * 4, "Done.")
    outcome = await in_process.agent(tools=[read, edit]).run("Go.")
    assert (outcome.kind, outcome.tool_calls) == ("final", 8)
    assert not any(WARNING in output for _, output in outputs_of(in_process.sent[-1]))


async def test_repeated_call_with_the_same_result_is_a_loop(in_process: ScriptedModel) -> None:
    @tool
    async def read() -> str:
        """Read."""
        return "nothing new"

    @tool
    async def fail() -> str:
        """Fail."""
        raise ValueError("no")

    # A call that fails is no progress.
    in_process.set_answers([call("read")], [call("fail")], [call("read")], [call("fail")], [call("read")], "Done.")
    outcome = await in_process.agent(tools=[read, fail]).run("Go.")
    assert (outcome.kind, outcome.tool_calls) == ("no_progress", 4)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "look_up"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look_up"}]},
    ],
)
async def test_forced_call_is_not_forced_again(in_process: ScriptedModel, choice: Any) -> None:
    in_process.set_answers([call("look_up", {"city": "Bern"})], "It is mild.")
    outcome = await in_process.agent(tools=[look_up], settings={"tool_choice": choice}).run("Go.")
    assert outcome.kind == "final"
    assert [request.get("tool_choice") for request in in_process.sent] == [choice, None]
