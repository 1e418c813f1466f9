"""Runs that are stopped or die in the middle of a call: no effect happens twice, and nothing that was spent is lost."""

import asyncio
import contextlib
import copy
import json
import threading
import time

import msgspec
import pytest

from antiphon import InvalidRequest, Limits, Outcome, Tool, ToolContext, tool
from antiphon.agent.entries import StartEntry
from antiphon.agent.outcome import RunEnded, TurnFinished
from antiphon.agent.resume import INTERRUPTED
from antiphon.agent.tool_calls import RUN_STOPPED
from antiphon.ledger import Ledger
from antiphon.store.ledger import MemoryLedger
from antiphon.tools.base import OnInterrupt
from antiphon.tools.executor import make_error_result
from support.idle_clock import pass_time
from support.scripted_model import ScriptedModel, call, look_up, outputs_of, usage

PAY = call("pay", {"amount": 5}, "call_p")


class Payments:
    """A tool that pays, and the ledger as it is after each payment: as a crash would leave it."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self.keys: list[str] = []
        self.crashed: list[MemoryLedger] = []
        self._ledger = ledger

    def make_tool(self) -> Tool:
        @tool(needs_approval=True)
        async def pay(amount: int, context: ToolContext) -> str:
            """Pay."""
            self.keys.append(context.idempotency_key)
            self.crashed.append(copy.deepcopy(self._ledger))
            return f"paid {amount}"

        return pay


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_approved_call_that_a_crash_interrupted_asks_again(in_process: ScriptedModel, depth: int) -> None:
    """An approval applies to one attempt, also if the call is one of a subagent."""
    ledger = MemoryLedger()
    payments = Payments(ledger)
    asks = [[call("expert", {"input": "Pay."}, f"call_{level}")] for level in range(depth)]
    in_process.set_answers(*asks, [PAY], *["Done."] * 9)
    agent = in_process.agent(tools=[payments.make_tool()])
    for _ in range(depth):
        agent = in_process.agent(tools=[agent.as_tool("expert", "Pays.")])
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    (pending,) = outcome.pending
    assert (await agent.resume("run_1", approvals={pending.call_id: True}, ledger=ledger)).kind == "final"
    (crashed,) = payments.crashed
    for _ in range(3):
        outcome = await agent.resume("run_1", ledger=crashed)
        assert (outcome.kind, [each.call_id for each in outcome.pending]) == ("needs_approval", [pending.call_id])
    assert len(payments.keys) == 1
    outcome = await agent.resume("run_1", approvals={pending.call_id: True}, ledger=crashed)
    assert (outcome.kind, set(payments.keys), len(payments.keys)) == ("final", {payments.keys[0]}, 2)


async def test_approval_is_not_lost_before_the_subagent_uses_it(in_process: ScriptedModel) -> None:
    ledger = MemoryLedger()
    payments = Payments(ledger)
    in_process.set_answers([call("expert", {"input": "Pay."}, "call_e")], [PAY], *["Done."] * 4)
    expert = in_process.agent(tools=[payments.make_tool()])
    agent = in_process.agent(tools=[expert.as_tool("expert", "Pays.")])
    (pending,) = (await agent.run("Go.", ledger=ledger, run_id="run_1")).pending
    crashed: list[MemoryLedger] = []

    class Watched(MemoryLedger):
        async def append(self, *arguments: object, **options: object) -> None:
            await super().append(*arguments, **options)  # type: ignore[arg-type]
            if not payments.keys:
                crashed.append(copy.deepcopy(self))

    watched = Watched()
    watched.__dict__.update(copy.deepcopy(ledger.__dict__))
    await agent.resume("run_1", approvals={pending.call_id: True}, ledger=watched)
    assert len(crashed) >= 3
    # The entry before the call uses the approval up: after it, whether the payment was made is not known.
    kinds = [(await agent.resume("run_1", ledger=each)).kind for each in crashed]
    assert kinds == ["final"] * (len(crashed) - 1) + ["needs_approval"]


# A cancelled task has no outcome from which a run without a ledger could be resumed.
@pytest.mark.parametrize(("way", "stored"), [("event", False), ("event", True), ("task", True)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("policy", "effects"), [("retry", 2), ("ask", 1), ("tell", 1)])
async def test_stopped_call_is_treated_as_after_a_crash(
    in_process: ScriptedModel, nested: bool, stored: bool, way: str, policy: OnInterrupt, effects: int
) -> None:
    keys: list[str] = []
    begun = asyncio.Event()

    @tool(on_interrupt=policy)
    async def act(context: ToolContext) -> str:
        """Have an effect."""
        keys.append(context.idempotency_key)
        begun.set()
        if len(keys) == 1:
            await asyncio.Event().wait()
        return "Done."

    ask = [[call("expert", {"input": "Act."}, "call_e")]] if nested else []
    in_process.set_answers(*ask, [call("act")], *["Done."] * 3)
    agent = in_process.agent(tools=[act])
    if nested:
        agent = in_process.agent(tools=[agent.as_tool("expert", "Acts.")])
    ledger = MemoryLedger() if stored else None
    cancel = asyncio.Event()
    running = asyncio.ensure_future(agent.run("Go.", ledger=ledger, run_id="run_1", cancel=cancel))
    await begun.wait()
    run: str | bytes = "run_1"
    if way == "event":
        cancel.set()
        outcome = await running
        assert outcome.state is not None
        run = run if stored else outcome.state
    else:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    outcome = await agent.resume(run, ledger=ledger)
    if policy == "ask":
        (pending,) = outcome.pending
        assert len(keys) == 1
        again: str | bytes = "run_1" if stored else outcome.state or b""
        outcome = await agent.resume(again, approvals={pending.call_id: False}, ledger=ledger)
    assert (outcome.kind, len(keys), len(set(keys))) == ("final", effects, 1)


async def test_call_with_the_id_of_an_earlier_subagent_call_asks_again(in_process: ScriptedModel) -> None:
    """A model may use a call id twice. The state of the earlier subagent does not belong to the later call."""
    keys: list[str] = []
    cancel = asyncio.Event()

    @tool
    async def pay(amount: int, context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        if not cancel.is_set():
            cancel.set()
            await asyncio.Event().wait()
        return f"paid {amount}"

    in_process.set_answers([call("expert", {"input": "Help."}, "call_p")], "Pay.", [PAY], "Done.")
    agent = in_process.agent(tools=[in_process.agent(name="expert").as_tool("expert", "Helps."), pay])
    stopped = await agent.run("Go.", run_id="run_1", cancel=cancel)
    assert (stopped.kind, stopped.state is None) == ("cancelled", False)
    outcome = await agent.resume(stopped.state or b"")
    assert [(each.call_id, each.reason) for each in outcome.pending] == [("call_p", "may_have_happened")]
    assert keys == ["run_1:2:0"]


@pytest.mark.parametrize("has_ledger", [False, True])
async def test_stopped_subagent_that_is_denied_may_have_had_an_effect(
    in_process: ScriptedModel, ledger: Ledger, has_ledger: bool
) -> None:
    """The model reads that the effect is not known, and a repetition goes on with the run of the subagent."""
    keys: list[str] = []
    cancel = asyncio.Event()

    @tool(on_interrupt="retry")
    async def pay(amount: int, context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        if not cancel.is_set():
            cancel.set()
            await asyncio.Event().wait()
        return f"paid {amount}"

    ask = call("expert", {"input": "Pay."}, "call_e")
    in_process.set_answers([ask], [PAY], [ask], "Paid.", "Done.")
    agent = in_process.agent(tools=[in_process.agent(name="expert", tools=[pay]).as_tool("expert", "Pays.")])
    used = ledger if has_ledger else None
    stopped = await agent.run("Go.", run_id="run_1", cancel=cancel, ledger=used)
    outcome = await agent.resume(stopped.state or b"", approvals={"call_e": False}, ledger=used)
    assert (outcome.kind, keys) == ("final", ["run_1:1:0:1:0"] * 2)
    outputs = [str(item["output"]) for item in outcome.history if "output" in item]
    assert outputs == [make_error_result(INTERRUPTED).output, "Paid."]


async def test_time_without_a_process_does_not_count(in_process: ScriptedModel) -> None:
    started = time.time() - 500
    clock = [started]
    ledger = MemoryLedger(now=lambda: clock[0])
    entry = StartEntry("agent", [{"role": "user", "content": "Go."}], started)
    await ledger.append("run_1", 0, msgspec.json.encode(entry))
    clock[0] = time.time()
    in_process.set_answers("Done.")
    outcome = await in_process.agent(limits=Limits(seconds=60)).resume("run_1", ledger=ledger)
    assert outcome.kind == "final"


async def run_stubborn(in_process: ScriptedModel, *, tool_seconds: float | None, limits: Limits) -> Outcome:
    """Run an agent whose tool does not stop before the end of the run."""
    let_go, gone = asyncio.Event(), asyncio.Event()

    @tool(timeout=tool_seconds)
    async def stay() -> str:
        """Ignore every cancellation."""
        pass_time(limits.seconds or 0)
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()
        gone.set()
        return "too late"

    in_process.set_answers([call("stay")], "Well.")
    async with asyncio.timeout(75):
        outcome = await in_process.agent(tools=[stay], limits=limits).run("Go.")
        let_go.set()
        await gone.wait()
    return outcome


async def test_tool_that_does_not_stop_at_its_time_limit_is_abandoned(in_process: ScriptedModel) -> None:
    outcome = await run_stubborn(in_process, tool_seconds=0.05, limits=Limits())
    assert (outcome.kind, [each.name for each in outcome.abandoned]) == ("final", ["stay"])
    assert "did not stop. It may still be running." in outcome.history[-2]["output"]


async def test_run_ends_at_its_deadline_although_a_tool_does_not_stop(in_process: ScriptedModel) -> None:
    outcome = await run_stubborn(in_process, tool_seconds=None, limits=Limits(seconds=60))
    assert (outcome.kind, [each.name for each in outcome.abandoned]) == ("deadline", ["stay"])


@pytest.mark.parametrize("way", ["cancelled", "deadline"])
async def test_usage_of_an_unfinished_subagent_is_in_the_outcome(in_process: ScriptedModel, way: str) -> None:
    begun = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        begun.set()
        await asyncio.Event().wait()
        return ""

    ask = [call("expert", {"input": "Wait."}, "call_e"), usage(10, 1)]
    in_process.set_answers(ask, [call("wait"), usage(100, 20)])
    expert = in_process.agent(tools=[wait])
    limits = Limits(seconds=60) if way == "deadline" else Limits()
    agent = in_process.agent(tools=[expert.as_tool("expert", "Waits.")], limits=limits)
    cancel = asyncio.Event()
    running = asyncio.ensure_future(agent.run("Go.", cancel=cancel))
    await begun.wait()
    if way == "cancelled":
        cancel.set()
    else:
        pass_time(60)
    outcome = await running
    assert (outcome.kind, outcome.usage.total_tokens, outcome.tool_calls) == (way, 131, 2)


async def test_calls_and_usage_of_subagents_count_once(in_process: ScriptedModel, ledger: Ledger) -> None:
    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    ask = [call("expert", {"input": "Pay."}, "call_e"), usage(10, 1)]
    in_process.set_answers(ask, [PAY, usage(100, 20)], [{"text": "Paid."}, usage(7, 3)], [{"text": "Ok."}, usage(1, 1)])
    expert = in_process.agent(tools=[pay])
    agent = in_process.agent(tools=[expert.as_tool("expert", "Pays.")])
    paused = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert (paused.kind, paused.usage.total_tokens, paused.tool_calls) == ("needs_approval", 131, 1)
    outcome = await agent.resume("run_1", approvals={"call_e/call_p": True}, ledger=ledger)
    assert (outcome.kind, outcome.usage.total_tokens, outcome.tool_calls) == ("final", 143, 2)


async def test_output_of_a_call_that_did_not_start_states_it(scripted: ScriptedModel) -> None:
    cancel = asyncio.Event()
    scripted.set_answers([call("look_up", {"city": "Bern"})], "Well.")
    outcome: Outcome | None = None
    async for event in scripted.agent(tools=[look_up]).run_stream("Go.", cancel=cancel):
        if isinstance(event, TurnFinished):
            cancel.set()
        elif isinstance(event, RunEnded):
            outcome = event.outcome
    assert outcome is not None
    assert (outcome.kind, json.loads(outcome.history[-1]["output"])["error"]) == ("cancelled", RUN_STOPPED)


async def test_stored_run_cannot_be_resumed_without_its_ledger(in_process: ScriptedModel, ledger: Ledger) -> None:
    payments: list[int] = []

    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        """Pay."""
        payments.append(amount)
        return f"paid {amount}"

    in_process.set_answers([PAY], "Done.")
    agent = in_process.agent(tools=[pay])
    paused = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert paused.state is not None
    with pytest.raises(InvalidRequest, match="The run 'run_1' is in a ledger") as raised:
        await agent.resume(paused.state, approvals={"call_p": True})
    assert (raised.value.param, payments) == ("ledger", [])
    assert (await agent.resume(paused.state, approvals={"call_p": True}, ledger=ledger)).kind == "final"


async def test_run_of_another_agent_is_not_resumed(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([PAY], "Done.")

    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    await in_process.agent(name="payer", tools=[pay]).run("Go.", ledger=ledger, run_id="run_1")
    other = in_process.agent(name="reader", tools=[pay])
    with pytest.raises(InvalidRequest, match="is of the agent 'payer', not of 'reader'") as raised:
        await other.resume("run_1", approvals={"call_p": True}, ledger=ledger)
    assert (raised.value.param, raised.value.code) == ("run", "other_agent")
    assert (await other.resume("run_1", approvals={"call_p": True}, ledger=ledger, force=True)).kind == "final"


async def test_run_at_its_limit_goes_on_with_a_higher_one(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([call("look_up", {"city": "A"})], [call("look_up", {"city": "B"})], "It is mild in both.")
    limits = Limits(turns=1, wrap_up=False)
    outcome = await in_process.agent(tools=[look_up], limits=limits).run("Go.", ledger=ledger, run_id="run_1")
    assert (outcome.kind, outcome.turns) == ("max_turns", 1)
    more = in_process.agent(tools=[look_up], limits=Limits(turns=3))
    outcome = await more.resume("run_1", ledger=ledger)
    assert (outcome.kind, outcome.text, outcome.turns) == ("final", "It is mild in both.", 3)


async def test_long_output_is_shortened_for_the_model_only(in_process: ScriptedModel, ledger: Ledger) -> None:
    @tool
    async def dump() -> str:
        """Return a long text."""
        return "a" * 300_000 + "b" * 10_000_000 + "c" * 100_000

    in_process.set_answers([call("dump")], "Done.")
    assert (await in_process.agent(tools=[dump]).run("Go.", ledger=ledger, run_id="run_1")).kind == "final"
    ((_, seen),) = outputs_of(in_process.sent[-1])
    middle = "\n[10,000,000 of 10,400,000 characters were left out here.]\n"
    assert seen == "a" * 300_000 + middle + "c" * 100_000
    stored = [json.loads(entry) for entry in await ledger.read("run_1")]
    assert [len(entry["output"]) for entry in stored if entry["entry"] == "Resulted"] == [10_400_000]


async def test_run_cancelled_before_its_start_does_nothing(scripted: ScriptedModel) -> None:
    cancel = asyncio.Event()
    cancel.set()
    outcome = await scripted.agent().run("Go.", cancel=cancel)
    assert (outcome.kind, scripted.sent) == ("cancelled", [])


async def test_sync_tool_at_its_time_limit_is_not_repeated_while_it_runs(in_process: ScriptedModel) -> None:
    started: list[int] = []
    go = threading.Event()

    @tool(timeout=0.05, retries=2)
    def pay(amount: int) -> str:
        """Pay."""
        started.append(amount)
        go.wait(20)
        return "paid"

    in_process.set_answers([PAY], "Done.")
    outcome = await in_process.agent(tools=[pay]).run("Go.")
    go.set()
    assert (started, [each.name for each in outcome.abandoned]) == ([5], ["pay"])
    assert "It may still be running." in outcome.history[-2]["output"]


@pytest.mark.parametrize(
    ("low", "kind"),
    [
        (Limits(turns=1), "max_turns"),
        (Limits(tokens=10), "budget"),
        (Limits(tool_calls=1), "budget"),
        (Limits(tool_calls=1, wrap_up=False), "budget"),
        (Limits(tokens=10, wrap_up=False), "budget"),
    ],
)
@pytest.mark.parametrize("stored", [True, False])
async def test_run_goes_on_with_a_higher_limit_after_its_last_answer(
    in_process: ScriptedModel, low: Limits, kind: str, stored: bool
) -> None:
    ledger = MemoryLedger() if stored else None
    in_process.set_answers(
        [call("look_up", {"city": "A"}), usage(10, 1)],
        *([] if low.tool_calls is None else [[call("look_up", {"city": "B"}), usage(10, 1)]]),
        *(["So far."] if low.wrap_up else []),
        [call("look_up", {"city": "C"}), usage(10, 1)],
        "It is mild.",
    )
    outcome = await in_process.agent(tools=[look_up], limits=low).run("Go.", ledger=ledger, run_id="run_1")
    assert outcome.kind == kind
    again = outcome.state if ledger is None else "run_1"
    assert again is not None
    more = in_process.agent(tools=[look_up])
    outcome = await more.resume(again, ledger=ledger)
    assert (outcome.kind, outcome.text) == ("final", "It is mild.")
