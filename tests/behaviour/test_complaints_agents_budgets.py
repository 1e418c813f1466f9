"""What users of agent runtimes complain about, themes 9 and 10: budgets that are none, conversations that are too long.

Each test names the case that it is after. None of them is true here.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from antiphon import Agent, Limits, Outcome, Prices, tool
from antiphon.agent.loop import ESTIMATED
from antiphon.agent.outcome import Notice, RunEnded
from antiphon.agent.transports.engine import LocalTransport
from antiphon.backends.base import Model, Turn
from antiphon.backends.scripted.backend import ScriptedBackend
from antiphon.engine.engine import Engine
from antiphon.engine.sealing import Sealer
from antiphon.errors import ContextLengthExceeded
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.deltas import Deltas
from support.agent_stage import OurStage, Recorder, Stage, TheirStage, call, look_up, make_backend, outputs_of, usage

LOOK = call("look_up", {"city": "Bern"})


# 9 Budgets


@pytest.mark.parametrize("limits", [Limits(tokens=100), Limits(cost=0.001), Limits(tool_calls=1), Limits(turns=2)])
async def test_pain_agents_66_no_run_uses_up_more_than_it_may(stage: Stage, limits: Limits) -> None:
    """openai/openai-agents-python#3353: thousands of unexpected calls, and no guard on tokens, requests or cost."""
    endless = [[call("look_up", {"city": f"{turn}"}), usage(90, 30)] for turn in range(9)]
    stage.play(*endless)
    agent = stage.agent(tools=[look_up], limits=limits, prices=Prices(input=10.0, output=10.0))
    outcome = await agent.run("Go.")
    assert outcome.kind in ("budget", "max_turns")
    assert outcome.tool_calls == 1
    # The last word comes on top, and even there no tool is called.
    assert len(stage.sent) == outcome.turns <= 3


@pytest.mark.parametrize("counted", [None, {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}])
async def test_pain_agents_66_a_server_that_does_not_count_is_no_way_around_the_limit(
    upstream: TheirStage, counted: Any
) -> None:
    """The same, where the server says nothing of usage, or that there was none: it is estimated, and that is told."""
    upstream.play(*[[call("look_up", {"city": f"{turn}"}), {"usage": counted}] for turn in range(30)])
    agent = upstream.agent(tools=[look_up], limits=Limits(tokens=300, turns=None))
    told = [event async for event in agent.run_stream("Go.")]
    assert isinstance(told[-1], RunEnded)
    outcome = told[-1].outcome
    assert (outcome.kind, outcome.usage.estimated, outcome.turns < 6) == ("budget", True, True)
    assert next(event.message for event in told if isinstance(event, Notice)) == ESTIMATED


async def test_pain_agents_66_agents_that_work_for_it_are_no_way_around_the_limit(stage: OurStage) -> None:
    """The same, in a tree of agents: those below share what is left, and none of them takes a turn without it."""
    cities = ("Bern", "Rome")
    endless = [
        {"user": city, "answers": [[call("look_up", {"city": f"{city}{n}"}), usage(900, 100)] for n in range(30)]}
        for city in cities
    ]
    asked = [call("expert", {"input": city}, f"call_{city}") for city in cities]
    stage.play_by(endless, [*asked, usage(10, 5)], [{"text": "That was all."}, usage(10, 5)])
    expert = stage.agent(name="expert", tools=[look_up], limits=Limits(turns=None))
    outcome = await stage.agent(tools=[expert.as_tool("expert", "Knows.")], limits=Limits(tokens=4500)).run("Go.")
    assert (outcome.kind, outcome.text) == ("budget", "That was all.")
    # Both may have been in a turn when it was used up.
    assert 4500 <= outcome.usage.total_tokens <= 4500 + 2 * 1000 + 30
    assert {json.loads(output)["error"] for _, output in outputs_of(stage.sent[-1])} == {
        "The agent ended with budget: it gave no answer."
    }


async def test_pain_agents_66_attempts_that_fail_are_no_way_around_the_limit(upstream: TheirStage) -> None:
    """The same, where the server fails after it has taken its tokens, and is asked again each time."""
    failed = [usage(900, 100), {"failure": {"code": "server_error", "message": "Boom."}}]
    upstream.play(failed, failed, failed)
    agent = upstream.agent(limits=Limits(tokens=1500, wrap_up=False), turn_retries=30)
    outcome = await agent.run("Go.")
    assert (outcome.kind, outcome.usage.total_tokens, len(upstream.sent)) == ("budget", 2000, 2)


async def test_pain_agents_67_at_its_budget_a_run_is_wound_up_with_an_answer(stage: Stage) -> None:
    """microsoft/agent-framework#6397, #6934: at the limit of tokens the run just stops."""
    stage.play([LOOK, usage(90, 30)], "Bern is mild.")
    outcome = await stage.agent(tools=[look_up], limits=Limits(tokens=100)).run("Go.")
    assert (outcome.kind, outcome.text) == ("budget", "Bern is mild.")


# 10 Overflow


SUMMARY = "Goal: to know the weather."
WINDOW = 2000
COMPACT = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}


class Narrow:
    """A backend whose model reads no more than WINDOW words, and refuses more. `read` is how many it was to read."""

    def __init__(self, part: ScriptedBackend) -> None:
        self.capabilities = part.capabilities
        self.read: list[int] = []
        self._part = part

    async def start(self) -> None:
        """There is nothing to get ready."""

    async def close(self) -> None:
        """There is nothing to release."""

    def models(self) -> list[Model]:
        return [msgspec.structs.replace(model, context_window=WINDOW) for model in self._part.models()]

    async def stream(self, turn: Turn) -> Deltas:
        self.read.append(await self.count_tokens(turn))
        if self.read[-1] > WINDOW:
            raise ContextLengthExceeded("The context is too long.", param="input")
        return await self._part.stream(turn)

    async def count_tokens(self, turn: Turn) -> int:
        return await self._part.count_tokens(turn)


class NarrowStage(Stage):
    def __init__(self, narrow: Narrow, transport: LocalTransport) -> None:
        super().__init__()
        self.transport = Recorder(transport, self.sent)
        self.read = narrow.read


@asynccontextmanager
async def play_narrow(*answers: Any) -> AsyncIterator[NarrowStage]:
    """A model with these answers, which can write summaries too, as far as it can read what is to be summed up."""
    narrow = Narrow(make_backend(answers, [{"text": "You write the notes", "answers": [SUMMARY]}]))
    engine = Engine(backends={"test": narrow}, store=MemoryStore(), sealer=Sealer([bytes(32)]))
    await engine.start()
    try:
        yield NarrowStage(narrow, LocalTransport(engine))
    finally:
        await engine.close()


@tool
async def read_all() -> str:
    """Read it all."""
    return "steel " * 10 * WINDOW


async def test_pain_agents_72_a_huge_output_is_compacted_and_the_run_goes_on() -> None:
    """zed-industries/zed#64560, openai/codex#18720: a huge output makes compaction impossible, or the task is lost."""
    async with play_narrow([call("read_all")], [LOOK], "{input}") as stage:
        agent = stage.agent(tools=[read_all, look_up], settings=COMPACT)
        outcome = await agent.run("How is the weather?")
        # The task was not lost: it is still the last thing that the user has said.
        assert (outcome.kind, outcome.text) == ("final", "How is the weather?")
        # The output alone was ten times as long as the window. Neither the summary nor a turn was asked for with it.
        assert max(stage.read) <= WINDOW
        # Nothing of it is lost to us, but what was compacted is not sent again.
        assert any(len(str(item.get("output"))) > 10 * WINDOW for item in outcome.history)
        kinds = [item["type"] for item in stage.sent[2]["input"]]
        assert kinds == ["compaction", "function_call", "function_call_output"]
        # And once is enough (openai/codex#40213).
        assert sum(item.get("type") == "compaction" for item in outcome.history) == 1
        again = await agent.run("And now?", history=outcome.history)
        assert (again.kind, again.text, max(stage.read) <= WINDOW) == ("final", "And now?", True)


def make_long() -> list[dict[str, Any]]:
    """A conversation of five windows."""
    said = ({"role": role, "content": "word " * (WINDOW // 4)} for role in ["user", "assistant"] * 10)
    return [{"role": "user", "content": "I am looking for a city with mild weather."}, *said]


async def test_pain_agents_69_a_conversation_of_several_windows_is_compacted_within_one() -> None:
    """openai/codex#18572, #24014, #29319: the compaction itself is too long for the window."""
    async with play_narrow([LOOK], "Mild.") as stage:
        outcome = await stage.agent(tools=[look_up], settings=COMPACT).run("How is it in Bern?", history=make_long())
        assert (outcome.kind, outcome.text) == ("final", "Mild.")
        # One summary and two turns.
        assert (len(stage.read), max(stage.read) <= WINDOW) == (3, True)


async def test_pain_agents_69_a_conversation_that_is_too_long_fails_with_its_reason_and_can_be_resumed() -> None:
    """openai/codex#18572, #11071: at the end of the window nothing works any more."""
    async with play_narrow([call("read_all")], [LOOK], "Mild.", "Still mild.") as stage:
        plain = stage.agent(tools=[read_all, look_up])
        failed = await plain.run("How is the weather?")
        assert failed.error is not None
        assert (failed.kind, failed.error.code) == ("failed", "context_length_exceeded")
        # The same model goes on with the same run, once it may compact it; and with the conversation, too.
        assert failed.state is not None
        careful: Agent = stage.agent(tools=[read_all, look_up], settings=COMPACT)
        resumed: Outcome = await careful.resume(failed.state)
        assert (resumed.kind, resumed.text, resumed.run_id) == ("final", "Mild.", failed.run_id)
        assert (await careful.run("And now?", history=failed.history)).text == "Still mild."
