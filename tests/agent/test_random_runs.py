"""Runs with random answers that are stopped and resumed: histories stay valid, and no effect happens twice unasked.

The model uses the ids of its calls again in later turns, as some servers do. The engine rejects a history in which a
call has no output, so that the run would fail.
"""

import asyncio
import random
from typing import Any

import pytest

from antiphon import Agent, Limits, MemoryLedger, Outcome, RunStream, Tool, ToolContext, tool
from antiphon.agent.history import complete_history
from antiphon.tools.base import OnInterrupt
from support.scripted_model import ScriptedModel, call

CALL_IDS = ("call_1", "call_2", "call_3")
TOOLS = ("pay", "save", "helper", "helper", "unknown")


def make_answer(chance: random.Random) -> Any:
    if chance.random() < 0.2:
        return "Done."
    call_ids = chance.sample(CALL_IDS, chance.randint(1, 3))
    return [call(chance.choice(TOOLS), {"input": chance.choice("abc")}, each) for each in call_ids]


class Effects:
    """Tools with effects, and the calls that have had one, by key."""

    def __init__(self, chance: random.Random) -> None:
        self.calls: dict[str, list[str]] = {}
        self._chance = chance

    def make_tools(self) -> list[Tool]:
        return [self._make_tool("pay", "ask"), self._make_tool("save", self._chance.choice(("ask", "retry", "tell")))]

    def _make_tool(self, name: str, on_interrupt: OnInterrupt) -> Tool:
        @tool(name=name, on_interrupt=on_interrupt, needs_approval=self._chance.random() < 0.2)
        async def act(input: str, context: ToolContext) -> str:
            """Have an effect."""
            made = self.calls.setdefault(context.idempotency_key, [])
            made.append(f"{name} {on_interrupt} {input}")
            for _ in range(self._chance.randint(0, 5)):
                await asyncio.sleep(0)
            if self._chance.random() < 0.2:
                raise ValueError("no luck")
            return f"{input} {self._chance.random()}"

        return act


def make_agent(scripted: ScriptedModel, effects: Effects, depth: int) -> Agent:
    tools = effects.make_tools()
    if depth:
        tools.append(make_agent(scripted, effects, depth - 1).as_tool("helper", "Ask a helper."))
    return scripted.agent(name=f"agent_{depth}", tools=tools, limits=Limits(turns=6))


async def read_until(stream: RunStream[Any], cancel: asyncio.Event, limit: int) -> Outcome[Any]:
    """Return the outcome of a run that is cancelled after a number of events."""
    count = 0
    async for _ in stream:
        count += 1
        if count == limit:
            cancel.set()
    return stream.outcome


@pytest.mark.parametrize("seed", range(20))
async def test_random_run_stays_valid_and_repeats_no_effect(in_process: ScriptedModel, seed: int) -> None:
    chance = random.Random(seed)
    effects = Effects(chance)
    agent = make_agent(in_process, effects, depth=2)
    ledger = MemoryLedger() if seed % 2 else None
    in_process.set_answers(*[make_answer(chance) for _ in range(60)], "Done.")
    cancel = asyncio.Event()
    stream = agent.run_stream("Go.", ledger=ledger, run_id="run_1", cancel=cancel)
    for _ in range(15):
        outcome = await read_until(stream, cancel, chance.randint(1, 40))
        assert outcome.kind != "failed", outcome.error
        if not outcome.pending:
            assert complete_history(outcome.history) == list(outcome.history)
        if outcome.state is None:
            break
        # A person permits only calls that were not made yet.
        approvals = {each.call_id: each.reason == "needs_approval" for each in outcome.pending}
        cancel = asyncio.Event()
        run: Any = outcome.state if ledger is None else "run_1"
        stream = agent.resume_stream(run, ledger=ledger, approvals=approvals, cancel=cancel)
    for key, made in effects.calls.items():
        assert len(set(made)) == 1, f"{key} is the key of {made}"
        assert len(made) == 1 or " ask " not in made[0], f"{key} was repeated: {made}"
