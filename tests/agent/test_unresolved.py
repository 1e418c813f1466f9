"""Calls of a subagent that were running when it ended: a repetition has the key of the first call."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from antiphon import Agent, Limits, Tool, ToolContext, tool
from antiphon.agent.guardrails import ResultCheck
from antiphon.ledger import Ledger
from antiphon.tools.base import OnInterrupt
from support.idle_clock import pass_time
from support.scripted_model import ScriptedModel, Step, call, look_up, outputs_of, usage

ASK = call("expert", {"input": "Pay."}, "call_e")
PAY = call("pay", {"amount": 5}, "call_p")
FIRST_KEY = "run_1:1:0:1:0"
LIMIT_SECONDS = 60.0
"""The time limit of subagents. It passes when a call of `Payments` hangs."""


class Payments:
    """A tool whose first calls never end."""

    def __init__(self, hanging: int = 1) -> None:
        self.keys: list[str] = []
        self.started = asyncio.Event()
        self._hanging = hanging

    def make_tool(self, policy: OnInterrupt = "retry", **options: Any) -> Tool:
        @tool(on_interrupt=policy, **options)
        async def pay(amount: int, context: ToolContext) -> str:
            """Pay."""
            self.keys.append(context.idempotency_key)
            self.started.set()
            if len(self.keys) <= self._hanging:
                pass_time(LIMIT_SECONDS)
                await asyncio.Event().wait()
            return f"paid {amount}"

        return pay


MakeAgent = Callable[[Tool], Agent]


@pytest.fixture(params=["deadline", "timeout"])
def make_agent(request: pytest.FixtureRequest, in_process: ScriptedModel) -> MakeAgent:
    """Return a function that makes an agent whose subagent is stopped by its deadline or by a timeout."""

    def make(pay: Tool) -> Agent:
        expert = in_process.agent(name="expert", tools=[pay])
        deadline = {"limits": Limits(seconds=LIMIT_SECONDS)}
        options: dict[str, Any] = deadline if request.param == "deadline" else {"timeout": LIMIT_SECONDS}
        return in_process.agent(tools=[expert.as_tool("expert", "Pays.", **options)])

    return make


async def test_repeated_call_has_the_key_of_the_first(
    in_process: ScriptedModel, make_agent: MakeAgent, ledger: Ledger
) -> None:
    payments = Payments()
    in_process.set_answers([ASK], [PAY], [ASK], [PAY], [call("pay", {"amount": 5}, "call_2")], "Paid.", "Done.")
    outcome = await make_agent(payments.make_tool()).run("Go.", ledger=ledger, run_id="run_1")
    # The second run has resolved the first call, so the last one is another call.
    assert (outcome.kind, payments.keys) == ("final", [FIRST_KEY, FIRST_KEY, "run_1:2:0:2:0"])


async def test_other_arguments_have_another_key(in_process: ScriptedModel, make_agent: MakeAgent) -> None:
    payments = Payments()
    other = call("pay", {"amount": 6}, "call_p")
    in_process.set_answers([ASK], [PAY], [ASK], [other], [PAY], "Paid.", "Done.")
    outcome = await make_agent(payments.make_tool()).run("Go.", run_id="run_1")
    assert (outcome.kind, payments.keys) == ("final", [FIRST_KEY, "run_1:2:0:1:0", FIRST_KEY])


@pytest.mark.parametrize(("verdict", "count"), [(True, 2), (False, 1)])
async def test_repetition_waits_for_a_person(
    in_process: ScriptedModel, make_agent: MakeAgent, ledger: Ledger, verdict: bool, count: int
) -> None:
    payments = Payments()
    in_process.set_answers([ASK], [PAY], [ASK], [PAY], "Well.", "Done.")
    agent = make_agent(payments.make_tool("ask"))
    paused = await agent.run("Go.", ledger=ledger, run_id="run_1")
    (pending,) = paused.pending
    assert (pending.call_id, pending.reason, pending.idempotency_key) == (
        "call_e/call_p",
        "may_have_happened",
        FIRST_KEY,
    )
    outcome = await agent.resume("run_1", approvals={"call_e/call_p": verdict}, ledger=ledger)
    assert (outcome.kind, payments.keys) == ("final", [FIRST_KEY] * count)


async def test_key_survives_several_stopped_runs(in_process: ScriptedModel, make_agent: MakeAgent) -> None:
    payments = Payments(hanging=2)
    second, third, fourth = ([call("expert", {"input": f"Pay {n}."}, "call_e")] for n in (2, 3, 4))
    in_process.set_answers([ASK], [PAY], second, [PAY], third, "I do nothing.", fourth, [PAY], "Paid.", "Done.")
    outcome = await make_agent(payments.make_tool()).run("Go.", run_id="run_1")
    assert (outcome.kind, payments.keys) == ("final", [FIRST_KEY] * 3)


async def test_two_runs_at_once_do_not_use_the_same_key(in_process: ScriptedModel, make_agent: MakeAgent) -> None:
    payments = Payments()
    both = [ASK, call("expert", {"input": "Pay too."}, "call_f")]
    in_process.set_answers([ASK], [PAY], both, [PAY], [PAY], "Paid.", "Paid.", "Done.")
    outcome = await make_agent(payments.make_tool()).run("Go.", run_id="run_1")
    assert outcome.kind == "final"
    assert (payments.keys[0], sorted(payments.keys[1:])) == (FIRST_KEY, [FIRST_KEY, "run_1:2:1:1:0"])


async def test_timed_out_attempt_is_resumed_without_a_ledger(in_process: ScriptedModel) -> None:
    payments = Payments()
    in_process.set_answers([ASK], [PAY], "Paid.", "Done.")
    expert = in_process.agent(name="expert", tools=[payments.make_tool()])
    pays = expert.as_tool("expert", "Pays.", timeout=LIMIT_SECONDS)
    agent = in_process.agent(tools=[structs.replace(pays, retries=1)])
    outcome = await agent.run("Go.", run_id="run_1")
    assert (outcome.kind, payments.keys) == ("final", [FIRST_KEY] * 2)
    assert outputs_of(in_process.sent[-1]) == [("call_e", "Paid.")]


ASK_MIDDLE, ASK_INNER = call("middle", {"input": "Pay."}), call("inner", {"input": "Pay."}, "call_i")
STOPPED_TURN = [ASK_INNER, call("look_up", {"city": "Bern"}, "call_l")]
INNER_KEY = "run_1:1:0:1:0:1:0"


def make_nested(
    in_process: ScriptedModel, payments: Payments, policy: OnInterrupt, *, is_paused: bool, asks_again: bool = False
) -> Agent:
    """Return an agent with a subagent, whose own subagent pays. The first payment stops the subagent."""

    async def fail(given: ResultCheck) -> None:
        if given.call.name == "look_up":
            await payments.started.wait()
            raise ZeroDivisionError("oops")

    inner = in_process.agent(name="inner", tools=[payments.make_tool(policy)])
    ask_inner = inner.as_tool("inner", "Pays.", needs_approval=lambda _: asks_again and bool(payments.keys))
    middle = in_process.agent(name="middle", tools=[ask_inner, look_up], result_guardrails=[fail])
    return in_process.agent(tools=[middle.as_tool("middle", "Asks.", needs_approval=is_paused)])


@pytest.mark.parametrize("is_paused", [False, True])
async def test_repeated_subagent_goes_on_with_the_run_of_its_own_subagent(
    in_process: ScriptedModel, is_paused: bool
) -> None:
    """Two different calls must not have one key, also if the run was resumed from its state in between."""
    payments = Payments()
    agent = make_nested(in_process, payments, "ask", is_paused=is_paused)
    in_process.set_answers([ASK_MIDDLE], STOPPED_TURN, [PAY], [ASK_MIDDLE], [ASK_INNER], [PAY], "Done.")
    outcome = await agent.run("Go.", run_id="run_1")
    while is_paused and outcome.pending[0].reason == "needs_approval":
        outcome = await agent.resume(outcome.state or b"", approvals={"call_1": True})
    waiting = [(each.call_id, each.reason, each.idempotency_key) for each in outcome.pending]
    assert waiting == [("call_1/call_i/call_p", "may_have_happened", INNER_KEY)]
    assert payments.keys == [INNER_KEY]


async def test_denied_repetition_of_a_subagent_keeps_its_run(in_process: ScriptedModel) -> None:
    """A repetition that is allowed later goes on with the run, so that another payment has another key."""
    payments = Payments()
    agent = make_nested(in_process, payments, "retry", is_paused=True, asks_again=True)
    pay_more = call("pay", {"amount": 7}, "call_p")
    repeated = ([ASK_MIDDLE], [ASK_INNER], [ASK_INNER], [pay_more], "Paid.", "Paid.", "OK.")
    in_process.set_answers([ASK_MIDDLE], STOPPED_TURN, [PAY], *repeated)
    outcome = await agent.run("Go.", run_id="run_1")
    waiting = []
    for approved in (True, True, False, True):
        (pending,) = outcome.pending
        waiting.append(pending.call_id)
        outcome = await agent.resume(outcome.state or b"", approvals={pending.call_id: approved})
    assert waiting == ["call_1", "call_1", "call_1/call_i", "call_1/call_i"]
    assert (outcome.kind, payments.keys) == ("final", [INNER_KEY, INNER_KEY, "run_1:1:0:1:0:2:0"])


def with_usage(*answers: list[Step]) -> list[list[Step]]:
    return [[*answer, usage(10, 10)] for answer in answers]


WELL: list[Step] = [{"text": "Well."}]


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("is_paused", [False, True])
async def test_usage_of_a_run_that_goes_on_counts_once(
    in_process: ScriptedModel, ledger: Ledger, is_paused: bool, is_stored: bool
) -> None:
    payments = Payments()
    agent = make_nested(in_process, payments, "retry", is_paused=is_paused)
    first = ([ASK_MIDDLE], STOPPED_TURN, [PAY])
    in_process.set_answers(*with_usage(*first, [ASK_MIDDLE], [ASK_INNER], WELL, WELL, WELL))
    stored = {"ledger": ledger} if is_stored else {}
    outcome = await agent.run("Go.", run_id="run_1", **stored)
    while outcome.pending:
        outcome = await agent.resume(outcome.state or b"", approvals={"call_1": True}, **stored)
    # The calls: two of `middle`, two of `inner`, one of `look_up` and one of `pay`.
    assert (outcome.kind, outcome.usage.total_tokens, outcome.tool_calls) == ("final", 8 * 20, 6)


async def test_usage_of_a_repetition_that_fails_counts_once(in_process: ScriptedModel) -> None:
    payments = Payments()
    inner = in_process.agent(name="inner", tools=[payments.make_tool(), look_up], limits=Limits(turns=1, tokens=50))
    middle = in_process.agent(name="middle", tools=[inner.as_tool("inner", "Pays.")])
    agent = in_process.agent(tools=[middle.as_tool("middle", "Asks.", limits=Limits(seconds=LIMIT_SECONDS))])
    first = ([ASK_MIDDLE], [ASK_INNER], [PAY])
    in_process.set_answers(*with_usage(*first, [ASK_MIDDLE], [ASK_INNER], WELL, [ASK_INNER], WELL, WELL))
    outcome = await agent.run("Go.", run_id="run_1")
    assert (outcome.kind, outcome.usage.total_tokens) == ("final", len(in_process.sent) * 20)


async def test_usage_of_a_stopped_subagent_counts(in_process: ScriptedModel, make_agent: MakeAgent) -> None:
    in_process.set_answers(*with_usage([ASK], [PAY], WELL))
    outcome = await make_agent(Payments().make_tool()).run("Go.", run_id="run_1")
    assert (outcome.kind, outcome.usage.total_tokens, outcome.tool_calls) == ("final", 3 * 20, 2)
