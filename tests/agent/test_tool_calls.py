"""The calls of a turn: whoever leaves a run in the midst of them can go on with it."""

import json
import sys
from collections import Counter
from typing import Any

from antiphon import tool
from antiphon.agent.journal import load
from antiphon.agent.loop_guard import STOPPED, WARNING
from antiphon.ledger import Ledger
from support.agent_stage import Stage, call, open_stage, outputs_of

THREE = [call("act", {"number": number}, f"call_{number}") for number in (1, 2, 3)]


async def test_a_run_that_is_left_after_any_event_can_be_gone_on_with(here: Stage, ledger: Ledger) -> None:
    count, left = 0, True
    while left:
        count += 1
        left = await leave_after(count, here, ledger)
    assert count > 10


async def leave_after(count: int, here: Stage, ledger: Ledger) -> bool:
    """Close the run's stream after so many events, and resume it. Returns whether there were as many."""
    effects: Counter[int] = Counter()

    @tool
    async def act(number: int) -> str:
        """Have an effect."""
        effects[number] += 1
        return "Done."

    here.play([{"text": "Well"}, *THREE], "It is done.", "It is done.")
    agent, run_id = here.agent(tools=[act]), f"run_{count}"
    events = agent.run_stream("Go.", durable=ledger, run_id=run_id)
    told = 0
    async for _ in events:
        told += 1
        if told == count:
            break
    await events.aclose()
    calls, outputs = pairs((await load(run_id, ledger)).state.history)
    assert calls == outputs
    outcome = await agent.resume(run_id, durable=ledger)
    assert (outcome.kind, max(effects.values(), default=1)) == ("final", 1)
    return told == count


def pairs(history: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The ids of the calls in a history, and those of the outputs."""
    calls = [item["call_id"] for item in history if item.get("type") == "function_call"]
    return calls, [call_id for call_id, _ in outputs_of({"input": history})]


async def test_of_calls_alike_in_one_turn_the_first_has_no_warning(here: Stage) -> None:
    @tool
    async def act() -> str:
        """Do it."""
        return "Done."

    here.play([call("act", call_id=f"call_{number}") for number in (1, 2, 3)], "Well.")
    outcome = await here.agent(tools=[act]).run("Go.")
    first, second, third = (output for _, output in outputs_of({"input": outcome.history}))
    assert (first, second) == ("Done.", f"Done.\n\n{WARNING}")
    assert STOPPED in third


async def test_arguments_that_cannot_be_read_wait_for_nobody_and_leave_a_run_that_can_be_resumed(
    here: Stage, ledger: Ledger
) -> None:
    asked = []

    def ask(arguments: Any) -> bool:
        asked.append(arguments)
        return True

    @tool(needs_approval=ask)
    async def pay(amount: int) -> str:
        """Pay."""
        return "paid"

    deep = [call("pay", "[" * 100_000, f"call_{number}") for number in (1, 2)]
    here.play(deep, "I see.")
    agent = here.agent(tools=[pay])
    outcome = await agent.run("Pay.", durable=ledger, run_id="run_1")
    reason = "The arguments are not valid JSON: JSON is nested too deeply"
    outputs = [json.loads(output.partition("\n")[0])["error"] for _, output in outputs_of({"input": outcome.history})]
    assert (outcome.kind, outputs, asked) == ("final", [reason, reason], [])
    again = await agent.resume("run_1", durable=ledger)
    assert (again.kind, again.history) == ("final", outcome.history)


async def test_a_tool_of_another_kind_is_none_here_and_its_call_is_answered_all_the_same() -> None:
    async with open_stage("upstream") as stage:
        made = {"type": "custom_tool_call", "id": "ct_1", "call_id": "call_1", "name": "patch", "input": "diff"}
        stage.play([{"item": made}], "I see.")
        outcome = await stage.agent().run("Go.")
        error = '{"error":"There is no tool \'patch\'. There are: none."}'
        assert (outcome.kind, stage.sent[1]["input"][-1]) == (
            "final",
            {"type": "custom_tool_call_output", "call_id": "call_1", "output": error},
        )


async def test_a_tool_that_cannot_say_whether_it_needs_approval_needs_it(here: Stage) -> None:
    @tool(needs_approval=lambda _: sys.exit(1))
    async def pay() -> str:
        """Pay."""
        return "paid"

    here.play([call("pay")], "Paid.")
    outcome = await here.agent(tools=[pay]).run("Pay.")
    assert (outcome.kind, [each.name for each in outcome.pending]) == ("needs_approval", ["pay"])
