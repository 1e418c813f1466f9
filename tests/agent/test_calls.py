"""The calls of a turn: whoever leaves a run in the midst of them can go on with it."""

from collections import Counter
from typing import Any

from agent_stage import Stage, call, outputs_of
from antiphon import tool
from antiphon.agent.guard import STOPPED, WARNING
from antiphon.agent.journal import load
from antiphon.ledger import Ledger

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
