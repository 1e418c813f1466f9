"""Subagents: tools with their own limits and runs."""

import asyncio
from typing import Any

import pytest

from antiphon import Agent, ConfigError, Limits, Outcome, Prices, tool
from antiphon.agent.outcome import RunEnded, ToolProgress, TurnFinished
from antiphon.agent.transports.base import Events, Transport
from antiphon.ledger import Ledger
from antiphon.tools.executor import STOP_SECONDS
from support.idle_clock import pass_time
from support.scripted_model import HOLD, ScriptedModel, call, outputs_of


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


LOOK = call("look_up", {"city": "Bern"})


async def test_agent_runs_as_a_tool_of_another(scripted: ScriptedModel) -> None:
    scripted.set_answers([call("expert", {"input": "Bern?"}, "call_e")], [LOOK], "Mild in Bern.", "It is mild.")
    expert = scripted.agent(name="expert", tools=[look_up], limits=Limits(turns=5))
    agent = scripted.agent(tools=[expert.as_tool("expert", "Knows the weather.")])
    events = [event async for event in agent.run_stream("How is it?")]
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].outcome.text, events[-1].outcome.turns) == ("It is mild.", 2)
    assert [event.message for event in events if isinstance(event, ToolProgress)] == ["calls look_up"]
    # The subagent gets its own input and not the parent's.
    assert scripted.sent[1]["input"] == [{"role": "user", "content": "Bern?"}]
    assert outputs_of(scripted.sent[3]) == [("call_e", "Mild in Bern.")]


async def test_parent_reads_that_a_limit_ended_the_subagent(scripted: ScriptedModel) -> None:
    scripted.set_answers([call("expert", {"input": "Bern?"})], [LOOK], "I got stuck.", "No idea.")
    expert = scripted.agent(name="expert", tools=[look_up], limits=Limits(turns=1))
    agent = scripted.agent(tools=[expert.as_tool("expert", "Knows the weather.")])
    outcome = await agent.run("How is it?")
    assert (outcome.kind, outcome.text) == ("final", "No idea.")
    assert "The agent ended with max_turns: I got stuck." in outputs_of(scripted.sent[3])[0][1]


async def test_subagent_run_is_in_the_ledger_under_the_call_key(in_process: ScriptedModel, ledger: Ledger) -> None:
    ask = [call("expert", {"input": "Bern?"})]
    in_process.set_answers(ask, "Mild.", [call("expert", {"input": "Rome?"})], "Hot.", "Mild and hot.")
    agent = in_process.agent(tools=[in_process.agent(name="expert").as_tool("expert", "Knows the weather.")])
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert outcome.text == "Mild and hot."
    # The model has used one id for two calls. They are two runs.
    assert [output for _, output in outputs_of(in_process.sent[-1])] == ["Mild.", "Hot."]
    listed = {summary.run_id: (summary.status, summary.title) for summary in await ledger.runs()}
    assert listed == {
        "run_1": ("final", "Go."),
        "run_1:1:0": ("final", "Bern?"),
        "run_1:2:0": ("final", "Rome?"),
    }


async def test_cancelling_the_parent_cancels_the_subagent(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([call("expert", {"input": "Bern?"})], [{"text": "Well"}, HOLD], "Never mind.")
    agent = in_process.agent(tools=[in_process.agent(name="expert").as_tool("expert", "Knows the weather.")])
    running = asyncio.ensure_future(agent.run("Go.", ledger=ledger, run_id="run_1"))
    await in_process.until_held()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert {summary.run_id: summary.status for summary in await ledger.runs()} == {
        "run_1": "cancelled",
        "run_1:1:0": "cancelled",
    }
    assert (await agent.resume("run_1", ledger=ledger)).text == "Never mind."


async def test_subagent_usage_counts_against_the_parent_limits(scripted: ScriptedModel) -> None:
    expert = scripted.agent(name="expert").as_tool("expert", "Knows the weather.")
    ask = call("expert", {"input": "Bern?"})
    scripted.set_answers([ask], "Mild in Bern.", "It is mild.")
    first, _ = await _measure(scripted.agent(tools=[expert]))
    scripted.set_answers([ask], "Mild in Bern.", "Enough.")
    outcome = await scripted.agent(tools=[expert], limits=Limits(tokens=first[0] + 1)).run("How is it?")
    assert (outcome.kind, outcome.text) == ("budget", "Enough.")


@pytest.mark.parametrize(("own", "rate"), [(None, 1.0), (Prices(input=3_000_000, output=3_000_000), 3.0)])
async def test_subagent_cost_uses_its_prices_or_the_parents(
    scripted: ScriptedModel, own: Prices | None, rate: float
) -> None:
    scripted.set_answers([call("expert", {"input": "Bern?"})], "Mild in Bern.", "It is mild.")
    expert = scripted.agent(name="expert", prices=own).as_tool("expert", "Knows the weather.")
    agent = scripted.agent(tools=[expert], prices=Prices(input=1_000_000, output=1_000_000))
    turns, outcome = await _measure(agent)
    elsewhere = outcome.usage.total_tokens - sum(turns)
    assert elsewhere > 0
    assert outcome.cost == pytest.approx(sum(turns) + elsewhere * rate)


async def _measure(agent: Agent) -> tuple[list[int], Outcome]:
    """Return the tokens of each of the agent's own turns, and the outcome."""
    events = [event async for event in agent.run_stream("How is it?")]
    assert isinstance(events[-1], RunEnded)
    return [event.usage.total_tokens for event in events if isinstance(event, TurnFinished)], events[-1].outcome


async def test_subagent_tool_can_need_approval(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("expert", {"input": "Bern?"}, "call_e")], "Mild.", "It is mild.")
    expert = in_process.agent(name="expert").as_tool(
        "expert", "Knows.", needs_approval=lambda arguments: "Bern" in arguments["input"]
    )
    agent = in_process.agent(tools=[expert])
    paused = await agent.run("Go.")
    assert ([each.call_id for each in paused.pending], len(in_process.sent)) == (["call_e"], 1)
    assert paused.state is not None
    assert (await agent.resume(paused.state, approvals={"call_e": True})).text == "It is mild."


async def test_limits_of_a_subagent_tool_replace_those_of_the_agent(in_process: ScriptedModel, ledger: Ledger) -> None:
    @tool(needs_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    in_process.set_answers([call("expert", {"input": "Pay."}, "call_e")], [call("pay", {}, "call_p")], "Paid.", "Done.")
    expert = in_process.agent(name="expert", tools=[pay], limits=Limits(turns=9))
    agent = in_process.agent(tools=[expert.as_tool("expert", "Pays.", limits=Limits(turns=1))])
    await agent.run("Go.", ledger=ledger, run_id="run_1")
    outcome = await agent.resume("run_1", approvals={"call_e/call_p": True}, ledger=ledger)
    assert outcome.kind == "final"
    assert "The agent ended with max_turns: Paid." in outputs_of(in_process.sent[-1])[0][1]
    with pytest.raises(ConfigError, match="The limit 'cost' requires 'prices'"):
        expert.as_tool("expert", "Pays.", limits=Limits(cost=1))


async def test_timed_out_subagent_is_an_error_for_the_model(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("expert", {"input": "Bern?"})], [HOLD], "No idea.")
    expert = in_process.agent(name="expert").as_tool("expert", "Knows.", timeout=60)
    running = asyncio.ensure_future(in_process.agent(tools=[expert]).run("Go."))
    await in_process.until_held()
    pass_time(60)
    outcome = await running
    assert (outcome.kind, outcome.text) == ("final", "No idea.")
    assert "took longer than 60 seconds" in outputs_of(in_process.sent[-1])[0][1]


async def test_output_of_a_subagent_is_read_by_a_function(in_process: ScriptedModel) -> None:
    async def count(outcome: Outcome[list[int]]) -> dict[str, int]:
        return {"count": len(outcome.output or ()), "turns": outcome.turns}

    def fail(_: Outcome[list[int]]) -> None:
        raise ValueError("no")

    expert = in_process.agent(name="expert", output_type=list[int])
    for read, output in (
        (count, '{"count":3,"turns":1}'),
        (fail, '{"error":"The answer of the agent cannot be read: ValueError: no"}'),
    ):
        in_process.set_answers([call("expert", {"input": "Count."}, "call_e")], '{"value": [1, 2, 3]}', "Done.")
        agent = in_process.agent(tools=[expert.as_tool("expert", "Counts.", read_output=read)])
        assert (await agent.run("Go.")).kind == "final"
        assert outputs_of(in_process.sent[-1]) == [("call_e", output)]


class CountingTransport:
    """A transport that counts how often it is closed."""

    def __init__(self, inner: Transport) -> None:
        self.closed = 0
        self._inner = inner

    async def stream(self, request: dict[str, Any]) -> Events:
        return await self._inner.stream(request)

    async def close(self) -> None:
        self.closed += 1


async def test_agents_that_refer_to_each_other_are_closed_once(in_process: ScriptedModel) -> None:
    """A tool of the first agent runs the second one, which can hand its run over to the first."""
    in_process.set_answers([call("ask", {"input": "Help."})], "Help.", "Done.")
    transports = [CountingTransport(in_process.transport) for _ in range(2)]
    helper = in_process.agent(name="helper", transport=transports[0])
    agent = in_process.agent(name="first", transport=transports[1], tools=[helper.as_tool("ask", "Ask.")])
    helper.add_handoffs(agent)
    assert (await agent.run("Go.")).text == "Done."
    await agent.close()
    assert [transport.closed for transport in transports] == [1, 1]
    assert (agent.stop_seconds, helper.stop_seconds) == (2 * STOP_SECONDS, STOP_SECONDS)


def test_time_to_stop_is_found_with_many_paths_between_agents(in_process: ScriptedModel) -> None:
    """Each of 40 layers has two agents that use both agents of the layer below: there are 2 ** 40 paths."""
    layer: list[Agent] = []
    for number in range(40):
        tools = [agent.as_tool(f"ask_{index}", "Ask.") for index, agent in enumerate(layer)]
        layer = [in_process.agent(name=f"agent_{number}_{index}", tools=tools) for index in range(2)]
    assert layer[0].stop_seconds == 39 * STOP_SECONDS


async def test_call_ids_with_a_slash_are_replaced(in_process: ScriptedModel) -> None:
    """In the ids of pending calls, a slash separates the call of a subagent from the call in the parent run."""

    @tool(needs_approval=True)
    async def pay(number: int) -> str:
        """Pay."""
        return f"paid {number}"

    in_process.set_answers(
        [call("expert", {"input": "Pay."}, "a"), call("pay", {"number": 1}, "a/b")],
        [call("pay", {"number": 2}, "b")],
        "Paid.",
        "Done.",
    )
    expert = in_process.agent(name="expert", tools=[pay])
    agent = in_process.agent(tools=[expert.as_tool("expert", "Pays."), pay])
    paused = await agent.run("Go.")
    pending = {each.call_id: each.arguments for each in paused.pending}
    assert pending == {"a/b": '{"number":2}', "a_b_2": '{"number":1}'}
    assert paused.state is not None
    outcome = await agent.resume(paused.state, approvals={"a/b": False, "a_b_2": True})
    assert outcome.kind == "final"
    assert outputs_of(in_process.sent[-1]) == [("a", "Paid."), ("a_b_2", "paid 1")]
