"""Calls that need approval: the run pauses, and can be resumed once."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from antiphon import Agent, InvalidRequest, Limits, tool
from antiphon.agent.approvals import DENIED
from antiphon.agent.outcome import RunEnded, SubagentEvent, ToolFinished
from antiphon.ledger import Lease, Ledger, RunTaken
from antiphon.store.ledger import MemoryLedger
from antiphon.tools.base import PendingToolCall, Tool
from support.scripted_model import ScriptedModel, UpstreamModel, call, open_scripted, outputs_of


def make_pay(paid: list[int], **options: Any) -> Tool:
    @tool(**{"needs_approval": True} | options)
    async def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return f"paid {amount}"

    return pay


@tool
async def look_up(city: str) -> str:
    """Look up."""
    return city


PAY = call("pay", {"amount": 5}, "call_p")


async def test_run_pauses_at_pending_calls_and_runs_the_others(scripted: ScriptedModel) -> None:
    paid: list[int] = []
    scripted.set_answers([PAY, call("look_up", {"city": "Bern"}, "call_l")], "Done.")
    agent = scripted.agent(tools=[make_pay(paid), look_up])
    outcome = await agent.run("Go.")
    waiting = PendingToolCall("call_p", "pay", '{"amount":5}', "needs_approval", f"{outcome.run_id}:1:0")
    assert (outcome.kind, outcome.pending) == ("needs_approval", (waiting,))
    assert (paid, len(scripted.sent)) == ([], 1)
    assert outcome.state is not None
    resumed = await agent.resume(outcome.state, approvals={"call_p": True})
    assert (resumed.kind, resumed.text, resumed.run_id, paid) == ("final", "Done.", outcome.run_id, [5])
    # The outputs are in the order of the calls, although the second ran first.
    assert outputs_of(scripted.sent[1]) == [("call_p", "paid 5"), ("call_l", "Bern")]


@pytest.mark.parametrize(("verdict", "error"), [(False, DENIED), ("Too much.", "Too much.")])
async def test_denied_call_is_not_run_and_the_model_reads_the_reason(
    scripted: ScriptedModel, verdict: Any, error: str
) -> None:
    paid: list[int] = []
    scripted.set_answers([PAY], "I see.")
    agent = scripted.agent(tools=[make_pay(paid)])
    outcome = await agent.run("Go.")
    assert outcome.state is not None
    events = [event async for event in agent.resume_stream(outcome.state, approvals={"call_p": verdict})]
    assert paid == []
    assert json.loads(outputs_of(scripted.sent[1])[0][1]) == {"error": error}
    # Observers see it too.
    assert [event.is_error for event in events if isinstance(event, ToolFinished)] == [True]


async def test_lone_surrogates_in_the_reason_of_a_denial_are_replaced(
    in_process: ScriptedModel, ledger: Ledger
) -> None:
    in_process.set_answers([PAY], "I see.")
    agent = in_process.agent(tools=[make_pay([])])
    await agent.run("Go.", ledger=ledger, run_id="run_1")
    await agent.resume("run_1", approvals={"call_p": "caf\udce9"}, ledger=ledger)
    assert outputs_of(in_process.sent[1]) == [("call_p", '{"error":"caf?"}')]


async def test_approved_call_waits_for_its_tool(in_process: ScriptedModel, ledger: Ledger) -> None:
    paid: list[int] = []
    in_process.set_answers([PAY], "Done.")
    agent = in_process.agent(tools=[look_up])
    await agent.run("Go.", tools=[make_pay(paid)], ledger=ledger, run_id="run_1")
    without = await agent.resume("run_1", ledger=ledger, approvals={"call_p": True})
    assert without.error is not None
    assert (without.kind, without.error.code, paid) == ("failed", "missing_tool", [])
    assert without.error.message == (
        "The approved call 'call_p' needs the tool 'pay': resume the run with it in 'tools'."
    )
    resumed = await agent.resume("run_1", ledger=ledger, tools=[make_pay(paid)])
    assert (resumed.kind, resumed.text, paid) == ("final", "Done.", [5])


async def test_approved_call_of_a_subagent_waits_for_the_tool_of_the_parent(
    in_process: ScriptedModel, ledger: Ledger
) -> None:
    paid: list[int] = []
    in_process.set_answers([call("expert", {"input": "Pay."}, "call_e")], [PAY], "Paid.", "Done.")
    expert = in_process.agent(name="expert", tools=[make_pay(paid)]).as_tool("expert", "Pays.")
    agent = in_process.agent()
    await agent.run("Go.", tools=[expert], ledger=ledger, run_id="run_1")
    without = await agent.resume("run_1", ledger=ledger, approvals={"call_e/call_p": True})
    assert without.error is not None
    assert (without.error.code, without.error.message, paid) == (
        "missing_tool",
        "The paused call 'call_e' needs the tool 'expert': resume the run with it in 'tools'.",
        [],
    )
    resumed = await agent.resume("run_1", ledger=ledger, tools=[expert])
    assert (resumed.kind, resumed.text, paid) == ("final", "Done.", [5])


async def test_approved_call_of_a_subagent_waits_for_its_tool(in_process: ScriptedModel, ledger: Ledger) -> None:
    paid: list[int] = []
    in_process.set_answers([call("expert", {"input": "Pay."}, "call_e")], [PAY], "Paid.", "Done.")

    def make_agent(tools: list[Any]) -> Any:
        return in_process.agent(tools=[in_process.agent(name="expert", tools=tools).as_tool("expert", "Pays.")])

    await make_agent([make_pay(paid)]).run("Go.", ledger=ledger, run_id="run_1")
    without = await make_agent([look_up]).resume("run_1", ledger=ledger, approvals={"call_e/call_p": True})
    assert without.error is not None
    assert (without.kind, without.error.code, without.error.message, paid) == (
        "failed",
        "missing_tool",
        "The approved call 'call_p' needs the tool 'pay': resume the run with it in 'tools'.",
        [],
    )
    resumed = await make_agent([make_pay(paid)]).resume("run_1", ledger=ledger)
    assert (resumed.kind, resumed.text, paid) == ("final", "Done.", [5])


async def test_other_calls_end_before_a_run_fails_for_a_missing_tool(in_process: ScriptedModel, ledger: Ledger) -> None:
    has_failed = asyncio.Event()
    sent: list[str] = []

    @tool(needs_approval=True)
    async def send(text: str) -> str:
        """Send."""
        await has_failed.wait()
        for _ in range(100):  # let the failure of the other call arrive
            await asyncio.sleep(0)
        sent.append(text)
        return "sent"

    def make_agent(tools: list[Any]) -> Any:
        expert = in_process.agent(name="expert", tools=tools).as_tool("expert", "Pays.")
        return in_process.agent(tools=[expert, send])

    in_process.set_answers(
        [call("expert", {"input": "Pay."}, "call_e"), call("send", {"text": "Hi."}, "call_s")], [PAY]
    )
    await make_agent([make_pay([])]).run("Go.", ledger=ledger, run_id="run_1")
    approvals = {"call_e/call_p": True, "call_s": True}
    outcome = None
    async for event in make_agent([look_up]).resume_stream("run_1", ledger=ledger, approvals=approvals):
        if isinstance(event, SubagentEvent) and isinstance(event.event, RunEnded):
            has_failed.set()
        elif isinstance(event, RunEnded):
            outcome = event.outcome
    assert outcome is not None
    assert outcome.error is not None
    assert (outcome.error.code, sent) == ("missing_tool", ["Hi."])


async def test_state_of_a_run_whose_subagent_lacks_a_tool_has_the_approval(in_process: ScriptedModel) -> None:
    paid: list[int] = []
    in_process.set_answers([call("expert", {"input": "Pay."}, "call_e")], [PAY], "Paid.", "Done.")

    def make_agent(tools: list[Any]) -> Any:
        return in_process.agent(tools=[in_process.agent(name="expert", tools=tools).as_tool("expert", "Pays.")])

    paused = await make_agent([make_pay(paid)]).run("Go.")
    without = await make_agent([look_up]).resume(paused.state, approvals={"call_e/call_p": True})
    assert (without.kind, without.error.code, paid) == ("failed", "missing_tool", [])
    resumed = await make_agent([make_pay(paid)]).resume(without.state)
    assert (resumed.kind, resumed.text, paid) == ("final", "Done.", [5])


async def test_call_without_verdict_stays_pending(in_process: ScriptedModel, ledger: Ledger) -> None:
    paid: list[int] = []
    in_process.set_answers([PAY, call("pay", {"amount": 7}, "call_q")], "Done.")
    agent = in_process.agent(tools=[make_pay(paid)])
    await agent.run("Go.", ledger=ledger, run_id="run_1")
    again = await agent.resume("run_1", ledger=ledger)
    assert (again.kind, len(again.pending), paid) == ("needs_approval", 2, [])
    half = await agent.resume("run_1", ledger=ledger, approvals={"call_q": True})
    assert ([each.call_id for each in half.pending], paid) == (["call_p"], [7])
    done = await agent.resume("run_1", ledger=ledger, approvals={"call_p": True})
    assert (done.kind, paid) == ("final", [7, 5])


async def test_approval_can_depend_on_the_arguments(in_process: ScriptedModel) -> None:
    def is_much(arguments: Mapping[str, Any]) -> bool:
        return bool(arguments["amount"] > 10)

    paid: list[int] = []
    in_process.set_answers([PAY, call("pay", {"amount": 50}, "call_q")])
    outcome = await in_process.agent(tools=[make_pay(paid, needs_approval=is_much)]).run("Go.")
    assert ([each.call_id for each in outcome.pending], paid) == (["call_q"], [5])


@pytest.mark.parametrize(("arguments", "kind"), [('{"amount"', "final"), ({"sum": 1}, "needs_approval")])
async def test_failing_needs_approval_function_requires_approval(
    in_process: ScriptedModel, arguments: Any, kind: str
) -> None:
    """Arguments that are no JSON are refused by the tool anyway; others need somebody to look at them."""
    in_process.set_answers([call("pay", arguments)], "I see.")
    pay = make_pay([], needs_approval=lambda given: given["amount"] > 10)
    assert (await in_process.agent(tools=[pay]).run("Go.")).kind == kind


@pytest.mark.parametrize(
    ("approvals", "message"),
    [
        (["call_p"], "approvals: expected a mapping from call ids to approvals, got list."),
        (False, "approvals: expected a mapping from call ids to approvals, got bool."),
        ({"call_p": 1}, "The approval of the call 'call_p' must be True, False or a reason to decline it."),
    ],
)
async def test_approvals_of_other_types_are_refused(in_process: ScriptedModel, approvals: Any, message: str) -> None:
    in_process.set_answers([PAY], "Done.")
    agent = in_process.agent(tools=[make_pay([])])
    outcome = await agent.run("Go.")
    with pytest.raises(InvalidRequest) as raised:
        await agent.resume(outcome.state or b"", approvals=approvals)
    assert (raised.value.message, raised.value.param) == (message, "approvals")


async def test_second_approval_fails_and_the_call_runs_once(in_process: ScriptedModel, ledger: Ledger) -> None:
    paid: list[int] = []
    in_process.set_answers([PAY], "Done.")
    agent = in_process.agent(tools=[make_pay(paid)])
    outcome = await agent.run("Go.", ledger=ledger)
    state = outcome.state
    assert state is not None
    await agent.resume(state, approvals={"call_p": True}, ledger=ledger)
    with pytest.raises(InvalidRequest, match=r"No call 'call_p' waits for .*It has ended: final") as raised:
        await agent.resume(state, approvals={"call_p": True}, ledger=ledger)
    assert raised.value.param == "approvals"
    assert paid == [5]


async def test_approval_of_an_unknown_call_names_those_that_wait(in_process: ScriptedModel) -> None:
    in_process.set_answers([PAY], "Done.")
    agent = in_process.agent(tools=[make_pay([])])
    paused = await agent.run("Go.")
    assert paused.state is not None
    with pytest.raises(InvalidRequest, match=r"No call 'call_x' waits for .*Waiting calls: 'call_p'"):
        await agent.resume(paused.state, approvals={"call_x": True})


async def test_approval_without_the_prefix_of_a_subagent_names_the_call_that_waits(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("expert", {"input": "Pay."}, "call_e")], [PAY])
    expert = in_process.agent(name="expert", tools=[make_pay([])])
    agent = in_process.agent(tools=[expert.as_tool("expert", "Pays.")])
    paused = await agent.run("Go.")
    with pytest.raises(InvalidRequest, match=r"Waiting calls: 'call_e/call_p'\."):
        await agent.resume(paused.state or b"", approvals={"call_p": True})


class Together(MemoryLedger):
    """A ledger in which two processes look for the owner of a run at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._barrier: asyncio.Barrier | None = None

    def expect_two(self) -> None:
        self._barrier = asyncio.Barrier(2)

    async def find_lease(self, run_id: str) -> Lease | None:
        lease = await super().find_lease(run_id)
        if self._barrier is not None:
            await self._barrier.wait()
            self._barrier = None
        return lease


async def test_one_of_two_simultaneous_approvals_fails(in_process: ScriptedModel) -> None:
    paid: list[int] = []
    in_process.set_answers([PAY], "Done.")
    agent, ledger = in_process.agent(tools=[make_pay(paid)]), Together()
    outcome = await agent.run("Go.", ledger=ledger)
    ledger.expect_two()
    resumed = (agent.resume(outcome.run_id, approvals={"call_p": True}, ledger=ledger) for _ in range(2))
    ends = await asyncio.gather(*resumed, return_exceptions=True)
    (error,) = (end for end in ends if isinstance(end, BaseException))
    assert isinstance(error, RunTaken)
    assert str(error) == f"Another process has continued the run '{outcome.run_id}'."
    assert paid == [5]


async def test_unknown_call_cannot_be_approved(in_process: ScriptedModel) -> None:
    in_process.set_answers([PAY])
    agent = in_process.agent(tools=[make_pay([])])
    outcome = await agent.run("Go.")
    assert outcome.state is not None
    with pytest.raises(InvalidRequest, match="No call 'call_x' waits for approval"):
        await agent.resume(outcome.state, approvals={"call_x": True})


async def test_waiting_for_approval_does_not_count_as_time(in_process: ScriptedModel) -> None:
    paid: list[int] = []
    in_process.set_answers([PAY], "Done.")
    agent = in_process.agent(tools=[make_pay(paid)], limits=Limits(seconds=60))
    outcome = await agent.run("Go.")
    assert outcome.state is not None
    hours_later = json.loads(outcome.state)
    hours_later[1][0]["at"] -= 7200
    hours_later[1][-1]["at"] -= 7190
    resumed = await agent.resume(json.dumps(hours_later).encode(), approvals={"call_p": True})
    assert (resumed.kind, paid) == ("final", [5])


CHILD = """
import sys
from pathlib import Path

from antiphon import Agent, tool


@tool(needs_approval=True)
def pay(amount: int) -> str:
    '''Pay.'''
    with Path("paid").open("a") as file:
        file.write(f"{amount}\\n")
    return f"paid {amount}"


agent = Agent(model="scripted", base_url=sys.argv[1], tools=[pay])
outcome = agent.resume_sync(Path("state").read_bytes(), approvals={"call_p": True})
print(outcome.kind, outcome.text, outcome.turns, outcome.tool_calls)
"""


async def test_another_process_resumes_from_the_state(tmp_path: Path) -> None:
    async with open_scripted("upstream") as scripted:
        assert isinstance(scripted, UpstreamModel)
        scripted.set_answers([PAY], "Done.")
        outcome = await scripted.agent(tools=[make_pay([])]).run("Go.")
        assert outcome.state is not None
        (tmp_path / "state").write_bytes(outcome.state)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, scripted.upstream.url, cwd=tmp_path, stdout=subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(child.communicate(), 60)
    assert (output.decode().split(), (tmp_path / "paid").read_text()) == (["final", "Done.", "2", "1"], "5\n")


async def test_subagent_call_waits_for_approval_in_the_parent_run(scripted: ScriptedModel) -> None:
    paid: list[int] = []
    scripted.set_answers([call("assistant", {"input": "Pay 5."}, "call_a")], [PAY], "I have paid.", "It is paid.")
    assistant = scripted.agent(name="assistant", tools=[make_pay(paid)])
    agent = scripted.agent(tools=[assistant.as_tool("assistant", "Pays.")])
    outcome = await agent.run("Go.")
    assert (outcome.kind, outcome.pending) == (
        "needs_approval",
        (PendingToolCall("call_a/call_p", "pay", '{"amount":5}', "needs_approval", f"{outcome.run_id}:1:0:1:0"),),
    )
    assert outcome.state is not None
    resumed = await agent.resume(outcome.state, approvals={"call_a/call_p": True})
    assert (resumed.kind, resumed.text, paid) == ("final", "It is paid.", [5])
    assert outputs_of(scripted.sent[-1]) == [("call_a", "I have paid.")]


async def test_subagent_call_is_denied_in_the_parent_run(in_process: ScriptedModel, ledger: Ledger) -> None:
    paid: list[int] = []
    in_process.set_answers([call("assistant", {"input": "Pay 5."}, "call_a")], [PAY], "I may not.", "It is not paid.")
    assistant = in_process.agent(name="assistant", tools=[make_pay(paid)])
    agent = in_process.agent(tools=[assistant.as_tool("assistant", "Pays.")])
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert [each.call_id for each in outcome.pending] == ["call_a/call_p"]
    waiting = await agent.resume("run_1", ledger=ledger)
    assert waiting.pending == outcome.pending
    resumed = await agent.resume("run_1", approvals={"call_a/call_p": "No money."}, ledger=ledger)
    assert (resumed.kind, resumed.text, paid) == ("final", "It is not paid.", [])
    assert json.loads(outputs_of(in_process.sent[-2])[0][1]) == {"error": "No money."}


def test_resume_sync_within_an_event_loop_raises() -> None:
    async def resume() -> None:
        Agent(model="m", base_url="http://127.0.0.1:1/v1").resume_sync("run_1")

    with pytest.raises(RuntimeError, match="await the run instead"):
        asyncio.run(resume())
