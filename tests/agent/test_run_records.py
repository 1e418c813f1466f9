"""The runs in a ledger: their list, their records, and their deletion."""

import time
from pathlib import Path

import pytest

from antiphon import ConfigError, Handoff, InvalidRequest, Prices, SqliteLedger, drop_tool_calls, tool
from antiphon.agent.entries import CallIntentEntry
from antiphon.agent.journal import load
from antiphon.agent.outcome import RunError
from antiphon.agent.ownership import take_ownership
from antiphon.agent.run_records import delete_run, list_runs, prune_runs, read_run
from antiphon.ledger import Ledger, RunTaken
from antiphon.protocol.response import Usage
from antiphon.tools.base import PendingToolCall
from support.scripted_model import ScriptedModel, call, look_up, usage

HOUR, DAY = 3600.0, 86400.0


@tool(needs_approval=True)
async def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


PAY = call("pay", {"amount": 5})


async def test_record_of_a_finished_run_has_its_totals(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([{"text": "Hello."}, usage(1000, 500)])
    agent = in_process.agent(name="greeter", prices=Prices(input=2, output=8, currency="EUR"))
    outcome = await agent.run("Hello!", ledger=ledger, run_id="run_1")
    record = await read_run(ledger, "run_1")
    assert record.started_at <= time.time()
    assert (record.run_id, record.status, record.agent, record.model) == ("run_1", "final", "greeter", "scripted")
    assert (record.turns, record.tool_calls, record.usage) == (1, 0, Usage(1000, 500, 1500))
    assert (record.cost, record.currency) == (outcome.cost, outcome.currency) == (0.006, "EUR")
    assert (record.pending, record.history) == ((), outcome.history)


async def test_record_has_the_error_of_a_failed_run(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([{"raise": {"message": "Too long.", "code": "context_length_exceeded", "status": 400}}])
    outcome = await in_process.agent().run("Hello!", ledger=ledger, run_id="run_1")
    error = RunError("context_length_exceeded", "Too long.")
    assert (outcome.error, (await read_run(ledger, "run_1")).error) == (error, error)


async def test_record_says_why_calls_wait(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([PAY])
    outcome = await in_process.agent(tools=[pay]).run("Pay.", ledger=ledger, run_id="run_1")
    waiting = PendingToolCall("call_1", "pay", '{"amount":5}', "needs_approval", "run_1:1:0")
    assert (outcome.pending, (await read_run(ledger, "run_1")).pending) == ((waiting,), (waiting,))
    # As if a process had been killed during the call.
    journal = await load("run_1", ledger)
    await journal.write(CallIntentEntry("call_1"))
    record = await read_run(ledger, "run_1")
    assert record.pending == (PendingToolCall("call_1", "pay", '{"amount":5}', "may_have_happened", "run_1:1:0"),)


async def test_interrupted_call_waits_with_its_reason_and_key(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([PAY], "Paid.")
    agent = in_process.agent(tools=[pay])
    await agent.run("Pay.", ledger=ledger, run_id="run_1")
    journal = await load("run_1", ledger)
    await journal.write(CallIntentEntry("call_1"))
    outcome = await agent.resume("run_1", ledger=ledger)
    assert outcome.pending == (PendingToolCall("call_1", "pay", '{"amount":5}', "may_have_happened", "run_1:1:0"),)


async def test_record_says_why_a_call_of_a_subagent_waits(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([call("ask", {"input": "Pay."}, "call_a")], [PAY])
    helper = in_process.agent(name="helper", tools=[pay])
    agent = in_process.agent(tools=[helper.as_tool("ask", "Ask the helper.")])
    outcome = await agent.run("Pay.", ledger=ledger, run_id="run_1")
    record = await read_run(ledger, "run_1")
    waiting = PendingToolCall("call_a/call_1", "pay", '{"amount":5}', "needs_approval", "run_1:1:0:1:0")
    assert (outcome.pending, record.pending) == ((waiting,), (waiting,))
    assert [each.run_id for each in await list_runs(ledger)] == ["run_1"]


async def test_record_of_a_waiting_run_has_the_totals_of_its_outcome(in_process: ScriptedModel, ledger: Ledger) -> None:
    asks = call("ask", {"input": "Pay."}, "call_a")
    in_process.set_answers([asks, usage(10, 5)], [call("look_up", {"city": "Bern"}), usage(20, 5)], [PAY, usage(30, 5)])
    helper = in_process.agent(name="helper", tools=[look_up, pay])
    agent = in_process.agent(tools=[helper.as_tool("ask", "Ask the helper.")])
    outcome = await agent.run("Pay.", ledger=ledger, run_id="run_1")
    record = await read_run(ledger, "run_1")
    assert (record.usage, record.tool_calls) == (outcome.usage, outcome.tool_calls) == (Usage(60, 15, 75), 2)


async def test_record_has_the_items_that_a_handoff_has_filtered(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([call("transfer_to_helper", {})], "Done.")
    helper = in_process.agent(name="helper")
    agent = in_process.agent(handoffs=[Handoff(helper, input_filter=drop_tool_calls)])
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert len(outcome.history) == 4
    assert (await read_run(ledger, "run_1")).history == outcome.history


async def test_run_without_a_process_is_interrupted(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([PAY])
    agent = in_process.agent(tools=[pay], prices=Prices(input=2, output=8))
    events = agent.run_stream("Pay.", ledger=ledger, run_id="run_1")
    await anext(events)
    assert ((await read_run(ledger, "run_1")).status, (await list_runs(ledger))[0].status) == ("running", "running")
    await events.aclose()
    assert (await read_run(ledger, "run_1")).status == "cancelled"
    with pytest.raises(InvalidRequest, match="There is no run with id 'run_0'"):
        await read_run(ledger, "run_0")


async def test_run_that_is_executed_is_deleted_only_by_force(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([PAY])
    await in_process.agent(tools=[pay]).run("Pay.", ledger=ledger, run_id="run_1")
    owner = await take_ownership(ledger, "run_1")
    with pytest.raises(RunTaken, match="A process is executing the run 'run_1'"):
        await delete_run(ledger, "run_1")
    await delete_run(ledger, "run_1", force=True)
    await owner.release()
    with pytest.raises(InvalidRequest, match="There is no run with id 'run_1'"):
        await delete_run(ledger, "run_1")


async def test_run_of_a_subagent_is_deleted_with_its_parent(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([call("ask", {"input": "Hello!"}, "call_a")], "Hello.", "It said hello.")
    agent = in_process.agent(tools=[in_process.agent(name="helper").as_tool("ask", "Ask the helper.")])
    await agent.run("Hello!", ledger=ledger, run_id="run_1")
    assert await ledger.read("run_1:1:0")
    with pytest.raises(InvalidRequest, match="The run 'run_1:1:0' is of a subagent: delete the run 'run_1'"):
        await delete_run(ledger, "run_1:1:0")
    await delete_run(ledger, "run_1")
    assert list(await ledger.runs()) == []


async def test_old_finished_runs_are_pruned(tmp_path: Path) -> None:
    now = time.time()
    clock = now - 2 * DAY
    ledger = SqliteLedger(tmp_path / "runs.db", now=lambda: clock)
    statuses = {
        "done": "final",
        "stopped": "blocked",
        "failed": "failed",
        "waiting": "needs_approval",
        "died": "running",
    }
    for run_id, status in statuses.items():
        await ledger.append(run_id, 0, b"{}", status=status)
    clock = now - HOUR
    await ledger.append("new", 0, b"{}", status="final")
    assert await prune_runs(ledger, older_than=DAY, dry_run=True) == ["done", "stopped"]
    assert len(await ledger.runs()) == 6
    assert await prune_runs(ledger, older_than=DAY) == ["done", "stopped"]
    assert await prune_runs(ledger, older_than=DAY, statuses=["failed"]) == ["failed"]
    assert await prune_runs(ledger, older_than=DAY, statuses=None) == ["waiting", "died"]
    assert [run.run_id for run in await ledger.runs()] == ["new"]
    with pytest.raises(InvalidRequest, match="older_than must be at least 0"):
        await prune_runs(ledger, older_than=-1)
    with pytest.raises(InvalidRequest, match=r"statuses: expected a list of statuses, such as \['not final'\]\."):
        await prune_runs(ledger, older_than=0, statuses="not final")
    await ledger.close()


def test_agents_of_one_run_have_the_same_currency(in_process: ScriptedModel) -> None:
    dollars, euros = Prices(input=1, output=2), Prices(input=1, output=2, currency="EUR")
    helper = in_process.agent(name="helper", prices=euros)
    message = "'agent' has USD, and 'helper' has EUR"
    with pytest.raises(ConfigError, match=message):
        in_process.agent(prices=dollars, tools=[helper.as_tool("ask", "Ask the helper.")])
    with pytest.raises(ConfigError, match=message):
        in_process.agent(prices=dollars, handoffs=[helper])
    agent = in_process.agent(prices=dollars)
    with pytest.raises(ConfigError, match=message):
        agent.add_handoffs(helper)
    in_process.agent(handoffs=[helper], tools=[helper.as_tool("ask", "Ask the helper.")])
