"""Calls whose effect is not known: if the model repeats one, the repetition has the key of the first call."""

import asyncio
from typing import Any

import pytest

from antiphon import Agent, Limits, RunEnded, ToolFinished, ToolResult, tool
from antiphon.agent.tool_calls import EARLIER_ATTEMPT
from antiphon.ledger import Ledger
from antiphon.tools.base import OnInterrupt, Tool, ToolContext
from antiphon.tools.executor import make_error_result
from support.scripted_model import ScriptedModel, call

PAY = call("pay", {"amount": 5}, "call_p")
AGAIN = call("pay", '{ "amount" : 5 }', "call_q")
FIRST_KEY = "run_1:1:0"


class Payments:
    """A tool whose first calls end without a known effect: after a timeout, or by its own report."""

    def __init__(self, way: str, unknown: int = 1) -> None:
        self.keys: list[str] = []
        self._way = way
        self._unknown = unknown

    def make_tool(self, policy: OnInterrupt = "retry", **options: Any) -> Tool:
        @tool(on_interrupt=policy, timeout=0.05 if self._way != "report" else None, **options)
        async def pay(amount: int, context: ToolContext) -> ToolResult:
            """Pay."""
            self.keys.append(context.idempotency_key)
            if len(self.keys) > self._unknown:
                return ToolResult(f"paid {amount}")
            return await self._fail()

        return pay

    async def _fail(self) -> ToolResult:
        if self._way == "report":
            lost = make_error_result("The bank did not answer.")
            return ToolResult(lost.output, is_error=True, may_have_happened=True)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self._way == "timeout":
                raise
            await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture(params=["timeout", "does not stop", "report"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_repeated_call_has_the_key_of_the_first(in_process: ScriptedModel, way: str, ledger: Ledger) -> None:
    payments = Payments(way)
    in_process.set_answers([PAY], [AGAIN], [call("pay", {"amount": 5}, "call_3")], "Done.")
    agent = in_process.agent(tools=[payments.make_tool()])
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    # The second call was successful, so the third is another payment.
    assert (outcome.kind, payments.keys) == ("final", [FIRST_KEY, FIRST_KEY, "run_1:3:0"])


async def test_other_arguments_have_another_key(in_process: ScriptedModel) -> None:
    payments = Payments("report")
    in_process.set_answers([PAY], [call("pay", {"amount": 6})], [AGAIN], "Done.")
    await in_process.agent(tools=[payments.make_tool()]).run("Go.", run_id="run_1")
    assert payments.keys == [FIRST_KEY, "run_1:2:0", FIRST_KEY]


async def test_two_calls_of_a_turn_do_not_share_a_key(in_process: ScriptedModel) -> None:
    payments = Payments("report", unknown=9)
    both = [AGAIN, call("pay", {"amount": 5}, "call_3")]
    in_process.set_answers([PAY], both, both, "Done.")
    await in_process.agent(tools=[payments.make_tool(repeatable=True)]).run("Go.", run_id="run_1")
    # The second turn has made the first payment again, and another one. The third turn repeats both.
    assert payments.keys == [FIRST_KEY, *[FIRST_KEY, "run_1:2:1"] * 2]


async def test_key_survives_several_unknown_effects(in_process: ScriptedModel) -> None:
    payments = Payments("report", unknown=2)
    in_process.set_answers([PAY], [AGAIN], [call("look", {})], [PAY], "Done.")
    look = tool(name="look", description="Look.")(lambda: "done")
    await in_process.agent(tools=[payments.make_tool(), look]).run("Go.", run_id="run_1")
    assert payments.keys == [FIRST_KEY] * 3


@pytest.mark.parametrize(("verdict", "count"), [(True, 2), (False, 1)])
async def test_repetition_waits_for_a_person(
    in_process: ScriptedModel, ledger: Ledger, verdict: bool, count: int
) -> None:
    payments = Payments("timeout")
    in_process.set_answers([PAY], [AGAIN], "Done.")
    agent = in_process.agent(tools=[payments.make_tool("ask")])
    paused = await agent.run("Go.", ledger=ledger, run_id="run_1")
    (pending,) = paused.pending
    assert (paused.kind, pending.call_id) == ("needs_approval", "call_q")
    assert (pending.reason, pending.idempotency_key) == ("may_have_happened", FIRST_KEY)
    outcome = await agent.resume("run_1", approvals={"call_q": verdict}, ledger=ledger)
    assert (outcome.kind, payments.keys) == ("final", [FIRST_KEY] * count)


async def test_denied_repetition_waits_again(in_process: ScriptedModel, ledger: Ledger) -> None:
    payments = Payments("timeout")
    in_process.set_answers([PAY], [AGAIN], [PAY], "Done.")
    agent = in_process.agent(tools=[payments.make_tool("ask")])
    await agent.run("Go.", ledger=ledger, run_id="run_1")
    paused = await agent.resume("run_1", approvals={"call_q": "Not now."}, ledger=ledger)
    assert [(each.call_id, each.idempotency_key) for each in paused.pending] == [("call_p", FIRST_KEY)]
    outcome = await agent.resume("run_1", approvals={"call_p": True}, ledger=ledger)
    assert (outcome.kind, payments.keys) == ("final", [FIRST_KEY] * 2)


async def test_repeatable_tool_runs_again_with_the_same_key(in_process: ScriptedModel) -> None:
    payments = Payments("timeout")
    in_process.set_answers([PAY], [AGAIN], "Done.")
    agent = in_process.agent(tools=[payments.make_tool("ask", repeatable=True)])
    outcome = await agent.run("Go.", run_id="run_1")
    assert (outcome.kind, payments.keys) == ("final", [FIRST_KEY] * 2)


async def test_retry_of_the_tool_resolves_a_timeout(in_process: ScriptedModel) -> None:
    payments = Payments("timeout")
    in_process.set_answers([PAY], [AGAIN], "Done.")
    events = [
        event
        async for event in in_process.agent(tools=[payments.make_tool("ask", retries=1)]).run_stream(
            "Go.", run_id="run_1"
        )
    ]
    assert payments.keys == [FIRST_KEY, FIRST_KEY, "run_1:2:0"]
    assert [each.may_have_happened for each in events if isinstance(each, ToolFinished)] == [False, False]


async def test_event_states_that_the_call_may_have_happened(in_process: ScriptedModel, way: str) -> None:
    in_process.set_answers([PAY], "Done.")
    agent = in_process.agent(tools=[Payments(way).make_tool()])
    events = [event async for event in agent.run_stream("Go.")]
    assert [each.may_have_happened for each in events if isinstance(each, ToolFinished)] == [True]


async def test_error_after_a_timeout_leaves_the_effect_unknown(in_process: ScriptedModel) -> None:
    keys: list[str] = []

    @tool(timeout=0.05, retries=1, on_interrupt="retry")
    async def pay(amount: int, context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        if len(keys) == 1:
            await asyncio.Event().wait()
        if len(keys) == 2:
            raise ConnectionError("refused")
        return f"paid {amount}"

    in_process.set_answers([PAY], [AGAIN], "Done.")
    await in_process.agent(tools=[pay]).run("Go.", run_id="run_1")
    assert keys == [FIRST_KEY] * 3


async def test_failed_repetition_leaves_the_effect_unknown(in_process: ScriptedModel, ledger: Ledger) -> None:
    keys: list[str] = []

    @tool(timeout=0.05, on_interrupt="retry")
    async def pay(amount: int, context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        if len(keys) == 1:
            await asyncio.Event().wait()
        if len(keys) == 2:
            raise ConnectionError("refused")
        return f"paid {amount}"

    third, fourth = (call("pay", {"amount": 5}, name) for name in ("call_3", "call_4"))
    in_process.set_answers([PAY], [AGAIN], [third], [fourth], "Done.")
    await in_process.agent(tools=[pay]).run("Go.", ledger=ledger, run_id="run_1")
    assert keys == [FIRST_KEY, FIRST_KEY, FIRST_KEY, "run_1:4:0"]


STRUCTURES = ("direct", "subagent", "handoff")
POLICIES = ("approval", "retry", "ask", "tell")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("structure", STRUCTURES)
async def test_timed_out_call_has_one_key_in_every_structure(
    in_process: ScriptedModel, ledger: Ledger, structure: str, policy: str
) -> None:
    """A person who is asked permits a call if it has not had its effect."""
    payments = Payments("timeout")
    asks = policy in ("approval", "ask")
    options: dict[str, Any] = {"policy": "ask" if asks else policy, "needs_approval": policy == "approval"}
    worker = in_process.agent(name="worker", tools=[payments.make_tool(**options)])
    if structure == "direct":
        agent, first = worker, []
    elif structure == "subagent":
        agent = in_process.agent(tools=[worker.as_tool("worker", "Pays.")])
        first = [[call("worker", {"input": "Pay."}, "call_w")]]
    else:
        agent, first = in_process.agent(handoffs=[worker]), [[call("transfer_to_worker", {}, "call_t")]]
    in_process.set_answers(*first, [PAY], [AGAIN], "Done.", "Done.")
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    while outcome.kind == "needs_approval":
        approvals = {each.call_id: not payments.keys for each in outcome.pending}
        outcome = await agent.resume("run_1", approvals=approvals, ledger=ledger)
    assert (outcome.kind, len(set(payments.keys)), len(payments.keys)) == ("final", 1, 1 if asks else 2)


async def test_call_reported_as_interrupted_has_the_same_key_again(in_process: ScriptedModel, ledger: Ledger) -> None:
    keys: list[str] = []
    running = asyncio.Event()

    @tool(on_interrupt="tell")
    async def pay(amount: int, context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        if len(keys) == 1:
            running.set()
            await asyncio.Event().wait()
        return f"paid {amount}"

    in_process.set_answers([PAY], [AGAIN], "Done.")
    agent = in_process.agent(tools=[pay])
    run = asyncio.create_task(agent.run("Go.", ledger=ledger, run_id="run_1"))
    await running.wait()
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    outcome = await agent.resume("run_1", ledger=ledger)
    assert (outcome.kind, keys) == ("final", [FIRST_KEY] * 2)


class Interrupted:
    """A tool whose first call is interrupted, and whose next calls fail."""

    def __init__(self, policy: OnInterrupt, failures: int = 1) -> None:
        self.keys: list[str] = []
        self.tool = tool(name="pay", description="Pay.", on_interrupt=policy)(self._pay)
        self._failures = failures
        self._running = asyncio.Event()

    async def _pay(self, amount: int, context: ToolContext) -> str:
        self.keys.append(context.idempotency_key)
        if len(self.keys) == 1:
            self._running.set()
            await asyncio.Event().wait()
        if len(self.keys) <= 1 + self._failures:
            raise ConnectionError("refused")
        return f"paid {amount}"

    async def interrupt(self, agent: Agent, ledger: Ledger) -> None:
        """Run the agent and stop it within the first call."""
        run = asyncio.create_task(agent.run("Go.", ledger=ledger, run_id="run_1"))
        await self._running.wait()
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


@pytest.mark.parametrize("policy", ["retry", "ask"])
async def test_failed_repetition_of_an_interrupted_call_leaves_its_effect_unknown(
    in_process: ScriptedModel, ledger: Ledger, policy: OnInterrupt
) -> None:
    payments = Interrupted(policy)
    in_process.set_answers([PAY], [AGAIN], [call("pay", {"amount": 5}, "call_3")], "Done.")
    agent = in_process.agent(tools=[payments.tool])
    await payments.interrupt(agent, ledger)
    finished: list[ToolFinished] = []
    outcome, approvals = None, {}
    while outcome is None or outcome.kind == "needs_approval":
        async for event in agent.resume_stream("run_1", approvals=approvals, ledger=ledger):
            if isinstance(event, ToolFinished):
                finished.append(event)
            elif isinstance(event, RunEnded):
                outcome = event.outcome
        assert outcome is not None
        assert {(each.reason, each.idempotency_key) for each in outcome.pending} <= {("may_have_happened", FIRST_KEY)}
        approvals = {each.call_id: True for each in outcome.pending}
    assert (outcome.kind, payments.keys) == ("final", [*[FIRST_KEY] * 3, "run_1:3:0"])
    unknown = make_error_result(f"ConnectionError: refused. {EARLIER_ATTEMPT}").output
    shown = [(each.output, each.is_error, each.may_have_happened) for each in finished]
    assert shown[:2] == [(unknown, True, True), ("paid 5", False, False)]


async def test_interrupted_call_whose_tool_is_gone_may_have_happened(in_process: ScriptedModel, ledger: Ledger) -> None:
    payments = Interrupted("retry", failures=0)
    in_process.set_answers([PAY], "Wait.")
    await payments.interrupt(in_process.agent(tools=[payments.tool]), ledger)
    without = [event async for event in in_process.agent().resume_stream("run_1", ledger=ledger)]
    (finished,) = [event for event in without if isinstance(event, ToolFinished)]
    message = f"There is no tool 'pay'. There are: none. {EARLIER_ATTEMPT}"
    assert finished.output == make_error_result(message).output
    assert (finished.is_error, finished.may_have_happened) == (True, True)


async def test_call_whose_tool_was_gone_has_the_same_key_again(in_process: ScriptedModel, ledger: Ledger) -> None:
    payments = Interrupted("retry", failures=0)
    # The tool is gone when the run is resumed.
    offered: list[list[Tool]] = [[payments.tool], [], [payments.tool], []]
    in_process.set_answers([PAY], [AGAIN], "Done.")
    agent = in_process.agent(tools=lambda context: offered.pop(0))
    await payments.interrupt(agent, ledger)
    outcome = await agent.resume("run_1", ledger=ledger)
    assert (outcome.kind, payments.keys) == ("final", [FIRST_KEY] * 2)


async def test_error_of_a_resumed_subagent_says_nothing_of_an_earlier_attempt(
    in_process: ScriptedModel, ledger: Ledger
) -> None:
    payments = Interrupted("tell")
    expert = in_process.agent(name="expert", tools=[payments.tool], limits=Limits(turns=1))
    agent = in_process.agent(tools=[expert.as_tool("expert", "Pays.")])
    in_process.set_answers([call("expert", {"input": "Pay."}, "call_e")], [PAY], "Done.")
    await payments.interrupt(agent, ledger)
    events = [event async for event in agent.resume_stream("run_1", ledger=ledger)]
    finished = [event for event in events if isinstance(event, ToolFinished)]
    assert [(each.call.name, each.is_error, each.may_have_happened) for each in finished] == [("expert", True, False)]
    assert EARLIER_ATTEMPT not in str(finished[0].output)
