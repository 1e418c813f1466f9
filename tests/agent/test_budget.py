"""What those who work for a run may use up: no more than it has left."""

import json
from typing import Any

import pytest

from antiphon import Agent, Limits, Outcome, Prices, tool
from antiphon.ledger import Ledger
from antiphon.protocol.response import Usage
from support.agent_stage import OurStage, Stage, call, open_stage, outputs_of, usage


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


def look(city: str) -> list[dict[str, Any]]:
    return [call("look_up", {"city": city}), usage(1000, 10)]


ASK = [call("expert", {"input": "Bern?"}, "call_e"), usage(10, 5)]


def make_agents(stage: Stage, limits: Limits, **options: Any) -> Agent:
    """One that may use up so much, and an expert for it that has no limits of its own but turns."""
    expert = stage.agent(name="expert", tools=[look_up], limits=Limits(turns=30), **options)
    prices = Prices(input=1_000_000, output=1_000_000) if limits.cost is not None else None
    return stage.agent(tools=[expert.as_tool("expert", "Knows.")], limits=limits, prices=prices)


def error_of(output: str) -> str:
    message: str = json.loads(output)["error"]
    return message


@pytest.mark.parametrize("limits", [Limits(tokens=1500), Limits(cost=1500.0)], ids=["tokens", "cost"])
async def test_what_is_left_of_the_askers_budget_is_all_there_is(stage: Stage, limits: Limits) -> None:
    stage.play(ASK, *[look(f"{turn}") for turn in range(2)], [{"text": "Enough."}, usage(20, 2)])
    outcome = await make_agents(stage, limits).run("How is it?")
    # Two turns of the expert, and the last word is the asker's alone.
    assert (outcome.kind, outcome.text) == ("budget", "Enough.")
    assert outcome.usage == Usage(2030, 27, 2057)
    assert len(stage.sent) == 4
    assert error_of(outputs_of(stage.sent[3])[0][1]) == "The agent ended with budget: it gave no answer."


async def test_its_own_prices_hold_for_what_is_left(stage: Stage) -> None:
    stage.play(ASK, *[look(f"{turn}") for turn in range(3)], "Enough.")
    agent = make_agents(stage, Limits(cost=150.0), prices=Prices(input=100_000, output=100_000))
    assert (await agent.run("How is it?")).kind == "budget"
    assert len(stage.sent) == 4


async def test_where_nothing_is_left_no_turn_is_taken(stage: Stage) -> None:
    stage.play(ASK, "Enough.")
    outcome = await make_agents(stage, Limits(tokens=15)).run("How is it?")
    assert (outcome.kind, outcome.text, len(stage.sent)) == ("budget", "Enough.", 2)
    assert error_of(outputs_of(stage.sent[1])[0][1]) == "The agent ended with budget: it gave no answer."


async def test_those_who_work_side_by_side_share_what_is_left(here: Stage) -> None:
    assert isinstance(here, OurStage)
    asked = [call("expert", {"input": city}, f"call_{city}") for city in ("A", "B", "C")]
    # Each of them would go on for ever.
    rules = [{"user": city, "answers": [look(f"{city}{turn}") for turn in range(20)]} for city in ("A", "B", "C")]
    here.play_by(rules, [*asked, usage(10, 5)], "Enough.")
    outcome = await make_agents(here, Limits(tokens=5000)).run("How is it?")
    assert (outcome.kind, outcome.text) == ("budget", "Enough.")
    # Each may be in a turn when it is used up, and takes no other.
    assert 5000 <= outcome.usage.total_tokens < 5000 + 3 * 1010 + 100


async def test_it_holds_for_those_who_work_for_those_who_work_for_it(stage: Stage) -> None:
    stage.play(
        ASK, [call("scout", {"input": "Bern?"}, "call_s"), usage(10, 5)], *[look(f"{i}") for i in range(2)], "So."
    )
    scout = stage.agent(name="scout", tools=[look_up], limits=Limits(turns=30))
    expert = stage.agent(name="expert", tools=[scout.as_tool("scout", "Looks.")])
    outcome = await stage.agent(tools=[expert.as_tool("expert", "Knows.")], limits=Limits(tokens=1500)).run(
        "How is it?"
    )
    assert (outcome.kind, outcome.text, len(stage.sent)) == ("budget", "So.", 5)


async def test_its_own_limits_end_it_as_before_with_a_word_of_its_own(stage: Stage) -> None:
    stage.play(ASK, look("A"), [{"text": "Mild, I think."}, usage(20, 2)], [{"text": "Mild."}, usage(20, 2)])
    expert = stage.agent(name="expert", tools=[look_up], limits=Limits(tokens=100))
    outcome = await stage.agent(tools=[expert.as_tool("expert", "Knows.")], limits=Limits(tokens=5000)).run("Go.")
    assert (outcome.kind, outcome.text) == ("final", "Mild.")
    assert error_of(outputs_of(stage.sent[3])[0][1]) == "The agent ended with budget: Mild, I think."


async def test_what_was_used_up_before_a_pause_counts_after_it(here: Stage, ledger: Ledger) -> None:
    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    def make() -> Agent:
        expert = here.agent(name="expert", tools=[pay, look_up], limits=Limits(turns=30))
        return here.agent(tools=[expert.as_tool("expert", "Knows.")], limits=Limits(tokens=1500))

    here.play(ASK, [call("pay", {"amount": 5}), usage(1000, 10)], look("A"), "Enough.")
    paused = await make().run("Go.", durable=ledger, run_id="run_1")
    assert paused.kind == "needs_approval"
    approvals = {each.call_id: True for each in paused.pending}
    outcome: Outcome = await make().resume("run_1", approvals=approvals, durable=ledger)
    assert (outcome.kind, outcome.text, len(here.sent)) == ("budget", "Enough.", 4)


async def test_an_id_that_a_model_uses_again_is_another_call() -> None:
    async with open_stage("in process") as stage:
        stage.play(ASK, [{"text": "Mild."}, usage(1000, 10)], ASK, [{"text": "Hot."}, usage(1000, 10)], "Both.")
        outcome = await make_agents(stage, Limits(tokens=2100)).run("Go.")
    assert (outcome.kind, outcome.text) == ("final", "Both.")
