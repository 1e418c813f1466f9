"""Agents that work for others: tools with limits, and runs, of their own."""

import asyncio

import pytest

from antiphon import Agent, Limits, Outcome, Prices, tool
from antiphon.agent.outcome import RunEnded, ToolProgress, TurnFinished
from antiphon.ledger import Ledger
from support.agent_stage import HOLD, Stage, call, outputs_of


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


LOOK = call("look_up", {"city": "Bern"})


async def test_an_agent_is_a_tool_of_another(stage: Stage) -> None:
    stage.play([call("expert", {"input": "Bern?"}, "call_e")], [LOOK], "Mild in Bern.", "It is mild.")
    expert = stage.agent(name="expert", tools=[look_up], limits=Limits(turns=5))
    agent = stage.agent(tools=[expert.as_tool("expert", "Knows the weather.")])
    events = [event async for event in agent.run_stream("How is it?")]
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].outcome.text, events[-1].outcome.turns) == ("It is mild.", 2)
    assert [event.message for event in events if isinstance(event, ToolProgress)] == ["calls look_up"]
    # It knows what it was asked, and not what its asker was.
    assert stage.sent[1]["input"] == [{"role": "user", "content": "Bern?"}]
    assert outputs_of(stage.sent[3]) == [("call_e", "Mild in Bern.")]


async def test_its_own_limits_end_it_and_the_asker_reads_how(stage: Stage) -> None:
    stage.play([call("expert", {"input": "Bern?"})], [LOOK], "I got stuck.", "No idea.")
    expert = stage.agent(name="expert", tools=[look_up], limits=Limits(turns=2))
    agent = stage.agent(tools=[expert.as_tool("expert", "Knows the weather.")])
    outcome = await agent.run("How is it?")
    assert (outcome.kind, outcome.text) == ("final", "No idea.")
    assert "The agent ended with max_turns: I got stuck." in outputs_of(stage.sent[3])[0][1]


async def test_its_run_is_in_the_same_ledger_under_a_name_of_its_call(here: Stage, ledger: Ledger) -> None:
    ask = [call("expert", {"input": "Bern?"})]
    here.play(ask, "Mild.", [call("expert", {"input": "Rome?"})], "Hot.", "Mild and hot.")
    agent = here.agent(tools=[here.agent(name="expert").as_tool("expert", "Knows the weather.")])
    outcome = await agent.run("Go.", durable=ledger, run_id="run_1")
    assert outcome.text == "Mild and hot."
    # The model has used the same id for both of its calls. They are two calls nevertheless.
    assert [output for _, output in outputs_of(here.sent[-1])] == ["Mild.", "Hot."]
    listed = {summary.run_id: (summary.status, summary.title) for summary in await ledger.runs()}
    assert listed == {
        "run_1": ("final", "Go."),
        "run_1:1:0": ("final", "Bern?"),
        "run_1:2:0": ("final", "Rome?"),
    }


async def test_cancelling_the_asker_cancels_it(here: Stage, ledger: Ledger) -> None:
    here.play([call("expert", {"input": "Bern?"})], [{"text": "Well"}, HOLD], "Never mind.")
    agent = here.agent(tools=[here.agent(name="expert").as_tool("expert", "Knows the weather.")])
    running = asyncio.ensure_future(agent.run("Go.", durable=ledger, run_id="run_1"))
    await here.until_held()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert {summary.run_id: summary.status for summary in await ledger.runs()} == {
        "run_1": "cancelled",
        "run_1:1:0": "cancelled",
    }
    assert (await agent.resume("run_1", durable=ledger)).text == "Never mind."


async def test_what_its_model_took_counts_against_the_limits_of_the_asker(stage: Stage) -> None:
    expert = stage.agent(name="expert").as_tool("expert", "Knows the weather.")
    ask = call("expert", {"input": "Bern?"})
    stage.play([ask], "Mild in Bern.", "It is mild.")
    first, _ = await _measure(stage.agent(tools=[expert]))
    stage.play([ask], "Mild in Bern.", "Enough.")
    outcome = await stage.agent(tools=[expert], limits=Limits(tokens=first[0] + 1)).run("How is it?")
    assert (outcome.kind, outcome.text) == ("budget", "Enough.")


@pytest.mark.parametrize(("own", "rate"), [(None, 1.0), (Prices(input=3_000_000, output=3_000_000), 3.0)])
async def test_its_tokens_cost_what_its_own_prices_say_or_else_those_of_the_asker(
    stage: Stage, own: Prices | None, rate: float
) -> None:
    stage.play([call("expert", {"input": "Bern?"})], "Mild in Bern.", "It is mild.")
    expert = stage.agent(name="expert", prices=own).as_tool("expert", "Knows the weather.")
    agent = stage.agent(tools=[expert], prices=Prices(input=1_000_000, output=1_000_000))
    turns, outcome = await _measure(agent)
    elsewhere = outcome.usage.total_tokens - sum(turns)
    assert elsewhere > 0
    assert outcome.cost == pytest.approx(sum(turns) + elsewhere * rate)


async def _measure(agent: Agent) -> tuple[list[int], Outcome]:
    """How many tokens each of the agent's own turns took, and what it came to."""
    events = [event async for event in agent.run_stream("How is it?")]
    assert isinstance(events[-1], RunEnded)
    return [event.usage.total_tokens for event in events if isinstance(event, TurnFinished)], events[-1].outcome
