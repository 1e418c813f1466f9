"""Calls that somebody has to approve: the run pauses, and goes on where it is resumed, once."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from antiphon import Agent, InvalidRequest, Limits, tool
from antiphon.agent.approvals import DENIED
from antiphon.agent.outcome import ToolFinished
from antiphon.ledger import EntryTaken, Ledger
from antiphon.store.ledger import MemoryLedger
from antiphon.tools.base import Tool, ToolInvocation
from support.agent_stage import Stage, TheirStage, call, open_stage, outputs_of


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


async def test_the_run_pauses_with_the_calls_that_wait_and_the_others_are_made(stage: Stage) -> None:
    paid: list[int] = []
    stage.play([PAY, call("look_up", {"city": "Bern"}, "call_l")], "Done.")
    agent = stage.agent(tools=[make_pay(paid), look_up])
    outcome = await agent.run("Go.")
    assert (outcome.kind, outcome.pending) == ("needs_approval", (ToolInvocation("call_p", "pay", '{"amount":5}'),))
    assert (paid, len(stage.sent)) == ([], 1)
    assert outcome.state is not None
    resumed = await agent.resume(outcome.state, approvals={"call_p": True})
    assert (resumed.kind, resumed.text, resumed.run_id, paid) == ("final", "Done.", outcome.run_id, [5])
    # In the order of the calls, though the second was made before the first.
    assert outputs_of(stage.sent[1]) == [("call_p", "paid 5"), ("call_l", "Bern")]


@pytest.mark.parametrize(("verdict", "told"), [(False, DENIED), ("Too much.", "Too much.")])
async def test_a_denied_call_is_not_made_and_the_model_reads_why(stage: Stage, verdict: Any, told: str) -> None:
    paid: list[int] = []
    stage.play([PAY], "I see.")
    agent = stage.agent(tools=[make_pay(paid)])
    outcome = await agent.run("Go.")
    assert outcome.state is not None
    events = [event async for event in agent.resume_stream(outcome.state, approvals={"call_p": verdict})]
    assert paid == []
    assert json.loads(outputs_of(stage.sent[1])[0][1]) == {"error": told}
    # Observers see it too.
    assert [event.is_error for event in events if isinstance(event, ToolFinished)] == [True]


async def test_without_a_word_the_call_waits_on(here: Stage, ledger: Ledger) -> None:
    paid: list[int] = []
    here.play([PAY, call("pay", {"amount": 7}, "call_q")], "Done.")
    agent = here.agent(tools=[make_pay(paid)])
    await agent.run("Go.", durable=ledger, run_id="run_1")
    again = await agent.resume("run_1", durable=ledger)
    assert (again.kind, len(again.pending), paid) == ("needs_approval", 2, [])
    half = await agent.resume("run_1", durable=ledger, approvals={"call_q": True})
    assert ([each.call_id for each in half.pending], paid) == (["call_p"], [7])
    done = await agent.resume("run_1", durable=ledger, approvals={"call_p": True})
    assert (done.kind, paid) == ("final", [7, 5])


async def test_approval_may_depend_on_the_arguments(here: Stage) -> None:
    def is_much(arguments: Mapping[str, Any]) -> bool:
        return bool(arguments["amount"] > 10)

    paid: list[int] = []
    here.play([PAY, call("pay", {"amount": 50}, "call_q")])
    outcome = await here.agent(tools=[make_pay(paid, needs_approval=is_much)]).run("Go.")
    assert ([each.call_id for each in outcome.pending], paid) == (["call_q"], [5])


@pytest.mark.parametrize(("arguments", "kind"), [('{"amount"', "final"), ({"sum": 1}, "needs_approval")])
async def test_a_question_that_cannot_be_answered_is_not_taken_for_a_yes(
    here: Stage, arguments: Any, kind: str
) -> None:
    """Arguments that are no JSON are refused by the tool anyway; others need somebody to look at them."""
    here.play([call("pay", arguments)], "I see.")
    pay = make_pay([], needs_approval=lambda given: given["amount"] > 10)
    assert (await here.agent(tools=[pay]).run("Go.")).kind == kind


async def test_the_second_to_approve_gets_an_error_and_the_call_is_made_once(here: Stage, ledger: Ledger) -> None:
    paid: list[int] = []
    here.play([PAY], "Done.")
    agent = here.agent(tools=[make_pay(paid)])
    outcome = await agent.run("Go.", durable=ledger)
    state = outcome.state
    assert state is not None
    await agent.resume(state, approvals={"call_p": True}, durable=ledger)
    with pytest.raises(InvalidRequest, match="No call 'call_p' waits for approval in this run") as raised:
        await agent.resume(state, approvals={"call_p": True}, durable=ledger)
    assert raised.value.param == "approvals"
    assert paid == [5]


class Together(MemoryLedger):
    """Who reads waits for the other who reads."""

    def __init__(self) -> None:
        super().__init__()
        self._barrier = asyncio.Barrier(2)

    async def read(self, run_id: str) -> Sequence[bytes]:
        entries = await super().read(run_id)
        await self._barrier.wait()
        return entries


async def test_of_two_at_the_same_time_one_gets_an_error(here: Stage) -> None:
    paid: list[int] = []
    here.play([PAY], "Done.")
    agent, ledger = here.agent(tools=[make_pay(paid)]), Together()
    outcome = await agent.run("Go.", durable=ledger)
    resumed = (agent.resume(outcome.run_id, approvals={"call_p": True}, durable=ledger) for _ in range(2))
    ends = await asyncio.gather(*resumed, return_exceptions=True)
    (error,) = (end for end in ends if isinstance(end, BaseException))
    assert isinstance(error, EntryTaken)
    assert str(error) == f"Another process has continued the run '{outcome.run_id}'."
    assert paid == [5]


async def test_an_unknown_call_cannot_be_approved(here: Stage) -> None:
    here.play([PAY])
    agent = here.agent(tools=[make_pay([])])
    outcome = await agent.run("Go.")
    assert outcome.state is not None
    with pytest.raises(InvalidRequest, match="No call 'call_x' waits for approval"):
        await agent.resume(outcome.state, approvals={"call_x": True})


async def test_the_time_that_a_person_takes_does_not_count(here: Stage) -> None:
    paid: list[int] = []
    here.play([PAY], "Done.")
    agent = here.agent(tools=[make_pay(paid)], limits=Limits(seconds=60))
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


async def test_another_process_goes_on_with_the_state(tmp_path: Path) -> None:
    async with open_stage("upstream") as stage:
        assert isinstance(stage, TheirStage)
        stage.play([PAY], "Done.")
        outcome = await stage.agent(tools=[make_pay([])]).run("Go.")
        assert outcome.state is not None
        (tmp_path / "state").write_bytes(outcome.state)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, stage.upstream.url, cwd=tmp_path, stdout=subprocess.PIPE
        )
        said, _ = await asyncio.wait_for(child.communicate(), 60)
    assert (said.decode().split(), (tmp_path / "paid").read_text()) == (["final", "Done.", "2", "1"], "5\n")


async def test_a_call_of_an_agent_that_works_for_another_waits_in_the_run_above(stage: Stage) -> None:
    paid: list[int] = []
    stage.play([call("assistant", {"input": "Pay 5."}, "call_a")], [PAY], "I have paid.", "It is paid.")
    assistant = stage.agent(name="assistant", tools=[make_pay(paid)])
    agent = stage.agent(tools=[assistant.as_tool("assistant", "Pays.")])
    outcome = await agent.run("Go.")
    assert (outcome.kind, outcome.pending) == (
        "needs_approval",
        (ToolInvocation("call_a/call_p", "pay", '{"amount":5}'),),
    )
    assert outcome.state is not None
    resumed = await agent.resume(outcome.state, approvals={"call_a/call_p": True})
    assert (resumed.kind, resumed.text, paid) == ("final", "It is paid.", [5])
    assert outputs_of(stage.sent[-1]) == [("call_a", "I have paid.")]


async def test_it_is_denied_there_too(here: Stage, ledger: Ledger) -> None:
    paid: list[int] = []
    here.play([call("assistant", {"input": "Pay 5."}, "call_a")], [PAY], "I may not.", "It is not paid.")
    assistant = here.agent(name="assistant", tools=[make_pay(paid)])
    agent = here.agent(tools=[assistant.as_tool("assistant", "Pays.")])
    outcome = await agent.run("Go.", durable=ledger, run_id="run_1")
    assert [each.call_id for each in outcome.pending] == ["call_a/call_p"]
    waiting = await agent.resume("run_1", durable=ledger)
    assert waiting.pending == outcome.pending
    resumed = await agent.resume("run_1", approvals={"call_a/call_p": "No money."}, durable=ledger)
    assert (resumed.kind, resumed.text, paid) == ("final", "It is not paid.", [])
    assert json.loads(outputs_of(here.sent[-2])[0][1]) == {"error": "No money."}


def test_a_run_cannot_be_resumed_within_a_loop_that_is_not_awaited() -> None:
    async def resume() -> None:
        Agent(model="m", base_url="http://127.0.0.1:1/v1").resume_sync("run_1")

    with pytest.raises(RuntimeError, match="await the run instead"):
        asyncio.run(resume())
