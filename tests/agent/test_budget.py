"""Budgets of subagents and the deadline of a run."""

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest

from antiphon import Agent, ConfigError, Limits, Outcome, Prices, RunContext, Tool, tool
from antiphon.agent.budget import Stop, StopTimer
from antiphon.agent.outcome import RunEnded, TextDelta
from antiphon.ledger import Ledger
from antiphon.protocol import codec
from antiphon.protocol.response import Usage
from support.scripted_model import AntiphonModel, ScriptedModel, call, open_scripted, outputs_of, usage


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


def look(city: str) -> list[dict[str, Any]]:
    return [call("look_up", {"city": city}), usage(1000, 10)]


ASK = [call("expert", {"input": "Bern?"}, "call_e"), usage(10, 5)]


def make_agents(scripted: ScriptedModel, limits: Limits, **options: Any) -> Agent:
    """Return an agent with these limits and a subagent without a token limit."""
    expert = scripted.agent(name="expert", tools=[look_up], limits=Limits(turns=30), **options)
    prices = Prices(input=1_000_000, output=1_000_000) if limits.cost is not None else None
    return scripted.agent(tools=[expert.as_tool("expert", "Knows.")], limits=limits, prices=prices)


def error_of(output: str) -> str:
    message: str = json.loads(output)["error"]
    return message


@pytest.mark.parametrize("limits", [Limits(tokens=1500), Limits(cost=1500.0)], ids=["tokens", "cost"])
async def test_subagent_uses_only_the_remaining_parent_budget(scripted: ScriptedModel, limits: Limits) -> None:
    scripted.set_answers(ASK, *[look(f"{turn}") for turn in range(2)], [{"text": "Enough."}, usage(20, 2)])
    outcome = await make_agents(scripted, limits).run("How is it?")
    # Two turns of the subagent; the last turn is the parent's.
    assert (outcome.kind, outcome.text) == ("budget", "Enough.")
    assert outcome.usage == Usage(2030, 27, 2057)
    assert len(scripted.sent) == 4
    assert error_of(outputs_of(scripted.sent[3])[0][1]) == "The agent ended with budget: it gave no answer."


async def test_calls_of_a_subagent_stop_at_the_limit_of_its_parent(scripted: ScriptedModel) -> None:
    scripted.set_answers(ASK, *[look(f"{turn}") for turn in range(3)], "Mild so far.", "Enough.")
    outcome = await make_agents(scripted, Limits(tool_calls=3)).run("How is it?")
    # The call of the subagent, and two of its own. Both agents can still answer.
    assert (outcome.kind, outcome.text, outcome.tool_calls) == ("final", "Enough.", 3)
    assert error_of(outputs_of(scripted.sent[5])[0][1]) == "The agent ended with budget: Mild so far."


async def test_calls_of_subagents_at_the_same_time_stay_within_the_limit(in_process: ScriptedModel) -> None:
    asks = [call("expert", {"input": each}, f"call_{each}") for each in ("Bern?", "Thun?")]
    looks = [call("look_up", {"city": f"{number}"}, f"look_{number}") for number in range(3)]
    in_process.set_answers(asks, looks, looks, "Mild.", "Mild.", "Enough.")
    outcome = await make_agents(in_process, Limits(tool_calls=4)).run("How is it?")
    assert (outcome.kind, outcome.text, outcome.tool_calls) == ("final", "Enough.", 4)


async def test_agents_that_call_each_other_stop_at_the_limit_of_the_first(scripted: ScriptedModel) -> None:
    def choose_tools(_: RunContext) -> list[Tool]:
        return [agent.as_tool("expert", "Knows.")]

    agent: Agent = scripted.agent(tools=choose_tools, limits=Limits(tool_calls=3))
    scripted.set_answers(*[ASK] * 4, *["Enough."] * 4)
    outcome = await agent.run("How is it?")
    assert (outcome.kind, outcome.tool_calls, len(scripted.sent)) == ("final", 3, 8)


async def test_subagent_prices_apply_to_the_parent_budget(scripted: ScriptedModel) -> None:
    scripted.set_answers(ASK, *[look(f"{turn}") for turn in range(3)], "Enough.")
    agent = make_agents(scripted, Limits(cost=150.0), prices=Prices(input=100_000, output=100_000))
    assert (await agent.run("How is it?")).kind == "budget"
    assert len(scripted.sent) == 4


async def test_subagent_without_budget_takes_no_turn(scripted: ScriptedModel) -> None:
    scripted.set_answers(ASK, "Enough.")
    outcome = await make_agents(scripted, Limits(tokens=15)).run("How is it?")
    assert (outcome.kind, outcome.text, len(scripted.sent)) == ("budget", "Enough.", 2)
    assert error_of(outputs_of(scripted.sent[1])[0][1]) == "The agent ended with budget: it gave no answer."


async def test_concurrent_subagents_share_the_budget(in_process: ScriptedModel) -> None:
    assert isinstance(in_process, AntiphonModel)
    calls = [call("expert", {"input": city}, f"call_{city}") for city in ("A", "B", "C")]
    # Each of them would continue without end.
    rules = [{"user": city, "answers": [look(f"{city}{turn}") for turn in range(20)]} for city in ("A", "B", "C")]
    in_process.set_answers_by_rule(rules, [*calls, usage(10, 5)], "Enough.")
    outcome = await make_agents(in_process, Limits(tokens=5000)).run("How is it?")
    assert (outcome.kind, outcome.text) == ("budget", "Enough.")
    # Each may be in a turn when the budget is used up. None starts another.
    assert 5000 <= outcome.usage.total_tokens < 5000 + 3 * 1010 + 100


async def test_budget_applies_to_subagents_of_subagents(scripted: ScriptedModel) -> None:
    scripted.set_answers(
        ASK, [call("scout", {"input": "Bern?"}, "call_s"), usage(10, 5)], *[look(f"{i}") for i in range(2)], "So."
    )
    scout = scripted.agent(name="scout", tools=[look_up], limits=Limits(turns=30))
    expert = scripted.agent(name="expert", tools=[scout.as_tool("scout", "Looks.")])
    outcome = await scripted.agent(tools=[expert.as_tool("expert", "Knows.")], limits=Limits(tokens=1500)).run(
        "How is it?"
    )
    assert (outcome.kind, outcome.text, len(scripted.sent)) == ("budget", "So.", 5)


async def test_own_limit_of_a_subagent_still_wraps_up(scripted: ScriptedModel) -> None:
    scripted.set_answers(ASK, look("A"), [{"text": "Mild, I think."}, usage(20, 2)], [{"text": "Mild."}, usage(20, 2)])
    expert = scripted.agent(name="expert", tools=[look_up], limits=Limits(tokens=100))
    outcome = await scripted.agent(tools=[expert.as_tool("expert", "Knows.")], limits=Limits(tokens=5000)).run("Go.")
    assert (outcome.kind, outcome.text) == ("final", "Mild.")
    assert error_of(outputs_of(scripted.sent[3])[0][1]) == "The agent ended with budget: Mild, I think."


async def test_budget_spent_before_pause_counts_after_resume(in_process: ScriptedModel, ledger: Ledger) -> None:
    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    def make() -> Agent:
        expert = in_process.agent(name="expert", tools=[pay, look_up], limits=Limits(turns=30))
        return in_process.agent(tools=[expert.as_tool("expert", "Knows.")], limits=Limits(tokens=1500))

    in_process.set_answers(ASK, [call("pay", {"amount": 5}), usage(1000, 10)], look("A"), "Enough.")
    paused = await make().run("Go.", ledger=ledger, run_id="run_1")
    assert paused.kind == "needs_approval"
    approvals = {each.call_id: True for each in paused.pending}
    outcome: Outcome = await make().resume("run_1", approvals=approvals, ledger=ledger)
    assert (outcome.kind, outcome.text, len(in_process.sent)) == ("budget", "Enough.", 4)


async def test_reused_call_id_is_another_call() -> None:
    async with open_scripted("in process") as scripted:
        scripted.set_answers(
            ASK, [{"text": "Mild."}, usage(1000, 10)], ASK, [{"text": "Hot."}, usage(1000, 10)], "Both."
        )
        outcome = await make_agents(scripted, Limits(tokens=2100)).run("Go.")
    assert (outcome.kind, outcome.text) == ("final", "Both.")


# The stop timer


def make(seconds: float | None = None, cancel: asyncio.Event | None = None) -> StopTimer:
    return StopTimer(None if seconds is None else time.time() + seconds, cancel, time.time)


async def give(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def test_work_within_the_deadline_returns_its_result() -> None:
    for watch in (make(), make(60), make(cancel=asyncio.Event()), make(60, asyncio.Event())):
        assert [await watch.wait(lambda: give(7)) for _ in range(3)] == [7, 7, 7]
        watch.close()


async def test_deadline_cancels_the_work() -> None:
    now, cancelled = 9.99, False
    watch = StopTimer(10.0, None, lambda: now)

    async def work() -> None:
        nonlocal now, cancelled
        try:
            await wait_for_ever()
        except asyncio.CancelledError:
            now, cancelled = 10.0, True
            raise

    with pytest.raises(Stop, match="deadline"):
        await watch.wait(work)
    assert cancelled
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    # It stays expired.
    with pytest.raises(Stop, match="deadline"):
        await watch.wait(lambda: give(7))
    watch.close()


async def test_cancel_event_stops_current_and_later_work() -> None:
    cancel = asyncio.Event()
    watch = make(60, cancel)
    asyncio.get_running_loop().call_soon(cancel.set)
    with pytest.raises(Stop, match="cancelled"):
        await watch.wait(wait_for_ever)
    with pytest.raises(Stop, match="cancelled"):
        watch.check()
    watch.close()


async def test_work_that_ignores_cancellation_is_awaited() -> None:
    cancel = asyncio.Event()
    watch = make(cancel=cancel)

    async def work() -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await wait_for_ever()
        return 7

    asyncio.get_running_loop().call_soon(cancel.set)
    with pytest.raises(Stop, match="cancelled"):
        await watch.wait(work)
    await asyncio.sleep(0)
    watch.close()


async def test_external_cancellation_is_not_swallowed() -> None:
    begun, cancel = asyncio.Event(), asyncio.Event()
    watch = make(60, cancel)

    async def work() -> None:
        begun.set()
        await wait_for_ever()

    waiting = asyncio.ensure_future(watch.wait(work))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    # Both at once count as an external cancellation.
    begun.clear()
    waiting = asyncio.ensure_future(watch.wait(work))
    await begun.wait()
    cancel.set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    watch.close()


async def test_cancel_event_stops_between_deltas_of_one_read() -> None:
    answer = {"id": "r", "status": "completed", "output": [], "usage": None}
    received = [{"type": "response.output_text.delta", "delta": text} for text in "abc"]
    received.append({"type": "response.completed", "response": answer})

    class OneRead:
        async def stream(self, request: dict[str, Any]) -> Any:
            async def read() -> Any:
                yield [codec.decode_event(json.dumps(event).encode()) for event in received]

            return read()

        async def close(self) -> None:
            pass

    cancel, texts = asyncio.Event(), list[str]()
    async for event in Agent(model="m", transport=OneRead()).run_stream("Go.", cancel=cancel):
        if isinstance(event, TextDelta):
            texts.append(event.text)
            if event.text == "b":
                cancel.set()
    assert texts == ["a", "b"]
    assert isinstance(event, RunEnded)
    assert event.outcome.kind == "cancelled"


@pytest.mark.parametrize("name", ["cost", "seconds"])
def test_limit_must_be_a_number(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: float("nan")})


async def test_deadline_that_passes_between_two_waits_stops_the_run() -> None:
    """The clock of the timer may be ahead of the clock of the run."""
    watch = StopTimer(10.0, None, lambda: 9.99)
    await watch.wait(_do_nothing)
    fired = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, fired.set)
    await fired.wait()
    async with asyncio.timeout(5):
        with pytest.raises(Stop):
            await watch.wait(asyncio.Event().wait)
    watch.close()


async def _do_nothing() -> None:
    """Return at once."""
