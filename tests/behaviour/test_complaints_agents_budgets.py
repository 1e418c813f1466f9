"""Complaints about agent runtimes, themes 9 and 10: budgets without effect, too long conversations.

Each test names its case and shows that it does not happen here.
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
from support.scripted_model import (
    AntiphonModel,
    Recorder,
    ScriptedModel,
    UpstreamModel,
    call,
    look_up,
    make_backend,
    outputs_of,
    usage,
)

LOOK = call("look_up", {"city": "Bern"})


# 9 Budgets


@pytest.mark.parametrize("limits", [Limits(tokens=100), Limits(cost=0.001), Limits(tool_calls=1), Limits(turns=1)])
async def test_pain_agents_66_run_stays_within_its_limits(scripted: ScriptedModel, limits: Limits) -> None:
    """openai/openai-agents-python#3353: thousands of unexpected calls, and no guard on tokens, requests or cost."""
    endless = [[call("look_up", {"city": f"{turn}"}), usage(90, 30)] for turn in range(9)]
    scripted.set_answers(*endless)
    agent = scripted.agent(tools=[look_up], limits=limits, prices=Prices(input=10.0, output=10.0))
    outcome = await agent.run("Go.")
    assert outcome.kind in ("budget", "max_turns")
    assert outcome.tool_calls == 1
    # The last turn comes on top, and it runs no tool.
    assert len(scripted.sent) == outcome.turns <= 3


@pytest.mark.parametrize("counted", [None, {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}])
async def test_pain_agents_66_limit_holds_for_a_server_without_usage(upstream: UpstreamModel, counted: Any) -> None:
    """The same for a server that reports no usage: it is estimated, with a notice."""
    upstream.set_answers(*[[call("look_up", {"city": f"{turn}"}), {"usage": counted}] for turn in range(30)])
    agent = upstream.agent(tools=[look_up], limits=Limits(tokens=300, turns=None))
    events = [event async for event in agent.run_stream("Go.")]
    assert isinstance(events[-1], RunEnded)
    outcome = events[-1].outcome
    assert (outcome.kind, outcome.usage.estimated, outcome.turns < 6) == ("budget", True, True)
    assert next(event.message for event in events if isinstance(event, Notice)) == ESTIMATED


async def test_pain_agents_66_limit_holds_for_subagents(scripted: AntiphonModel) -> None:
    """The same for subagents: they share the remaining budget, and none starts a turn without it."""
    cities = ("Bern", "Rome")
    endless = [
        {"user": city, "answers": [[call("look_up", {"city": f"{city}{n}"}), usage(900, 100)] for n in range(30)]}
        for city in cities
    ]
    calls = [call("expert", {"input": city}, f"call_{city}") for city in cities]
    scripted.set_answers_by_rule(endless, [*calls, usage(10, 5)], [{"text": "That was all."}, usage(10, 5)])
    expert = scripted.agent(name="expert", tools=[look_up], limits=Limits(turns=None))
    outcome = await scripted.agent(tools=[expert.as_tool("expert", "Knows.")], limits=Limits(tokens=4500)).run("Go.")
    assert (outcome.kind, outcome.text) == ("budget", "That was all.")
    # Both may have been in a turn when the budget was used up.
    assert 4500 <= outcome.usage.total_tokens <= 4500 + 2 * 1000 + 30
    assert {json.loads(output)["error"] for _, output in outputs_of(scripted.sent[-1])} == {
        "The agent ended with budget: it gave no answer."
    }


async def test_pain_agents_66_limit_holds_for_failed_attempts(upstream: UpstreamModel) -> None:
    """The same for failed attempts that used tokens."""
    failed = [usage(900, 100), {"failure": {"code": "server_error", "message": "Boom."}}]
    upstream.set_answers(failed, failed, failed)
    agent = upstream.agent(limits=Limits(tokens=1500, wrap_up=False), turn_retries=30)
    outcome = await agent.run("Go.")
    assert (outcome.kind, outcome.usage.total_tokens, len(upstream.sent)) == ("budget", 2000, 2)


async def test_pain_agents_67_used_up_budget_ends_with_an_answer(scripted: ScriptedModel) -> None:
    """microsoft/agent-framework#6397, #6934: at the token limit the run stops without an answer."""
    scripted.set_answers([LOOK, usage(90, 30)], "Bern is mild.")
    outcome = await scripted.agent(tools=[look_up], limits=Limits(tokens=100)).run("Go.")
    assert (outcome.kind, outcome.text) == ("budget", "Bern is mild.")


# 10 Overflow


SUMMARY = "Goal: to know the weather."
WINDOW = 2000
COMPACT = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}


class Narrow:
    """A backend whose model rejects more than WINDOW words. `read` has the length of each request."""

    def __init__(self, part: ScriptedBackend) -> None:
        self.capabilities = part.capabilities
        self.read: list[int] = []
        self._part = part

    async def start(self) -> None:
        """There is nothing to start."""

    async def close(self) -> None:
        """There is nothing to close."""

    def models(self) -> list[Model]:
        return [msgspec.structs.replace(model, context_window=WINDOW) for model in self._part.models()]

    async def stream(self, turn: Turn) -> Deltas:
        self.read.append(await self.count_tokens(turn))
        if self.read[-1] > WINDOW:
            raise ContextLengthExceeded("The context is too long.", param="input")
        return await self._part.stream(turn)

    async def count_tokens(self, turn: Turn) -> int:
        return await self._part.count_tokens(turn)


class NarrowStage(ScriptedModel):
    def __init__(self, narrow: Narrow, transport: LocalTransport) -> None:
        super().__init__()
        self.transport = Recorder(transport, self.sent)
        self.read = narrow.read


@asynccontextmanager
async def play_narrow(*answers: Any) -> AsyncIterator[NarrowStage]:
    """Return a model with these answers that can also write summaries within its window."""
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


async def test_pain_agents_72_huge_output_is_compacted_and_the_run_continues() -> None:
    """zed-industries/zed#64560, openai/codex#18720: a huge output makes compaction impossible, or the task is lost."""
    async with play_narrow([call("read_all")], [LOOK], "{input}") as scripted:
        agent = scripted.agent(tools=[read_all, look_up], settings=COMPACT)
        outcome = await agent.run("How is the weather?")
        # The task is not lost: it is still the last user message.
        assert (outcome.kind, outcome.text) == ("final", "How is the weather?")
        # The output is ten times as long as the window. No request, also not that of the summary, contains it.
        assert max(scripted.read) <= WINDOW
        # The outcome has the whole history, but compacted items are not sent again.
        assert any(len(str(item.get("output"))) > 10 * WINDOW for item in outcome.history)
        kinds = [item["type"] for item in scripted.sent[2]["input"]]
        assert kinds == ["compaction", "function_call", "function_call_output"]
        # One compaction is enough (openai/codex#40213).
        assert sum(item.get("type") == "compaction" for item in outcome.history) == 1
        again = await agent.run("And now?", history=outcome.history)
        assert (again.kind, again.text, max(scripted.read) <= WINDOW) == ("final", "And now?", True)


def make_long() -> list[dict[str, Any]]:
    """Return a conversation of five windows."""
    messages = ({"role": role, "content": "word " * (WINDOW // 4)} for role in ["user", "assistant"] * 10)
    return [{"role": "user", "content": "I am looking for a city with mild weather."}, *messages]


async def test_pain_agents_69_long_conversation_is_compacted_into_one_window() -> None:
    """openai/codex#18572, #24014, #29319: the compaction itself is too long for the window."""
    async with play_narrow([LOOK], "Mild.") as scripted:
        outcome = await scripted.agent(tools=[look_up], settings=COMPACT).run("How is it in Bern?", history=make_long())
        assert (outcome.kind, outcome.text) == ("final", "Mild.")
        # One summary and two turns.
        assert (len(scripted.read), max(scripted.read) <= WINDOW) == (3, True)


async def test_pain_agents_69_too_long_conversation_fails_a_resumable_run() -> None:
    """openai/codex#18572, #11071: at the end of the window no request succeeds."""
    async with play_narrow([call("read_all")], [LOOK], "Mild.", "Still mild.") as scripted:
        plain = scripted.agent(tools=[read_all, look_up])
        failed = await plain.run("How is the weather?")
        assert failed.error is not None
        assert (failed.kind, failed.error.code) == ("failed", "context_length_exceeded")
        # The same model resumes the run and continues the conversation once it may compact them.
        assert failed.state is not None
        careful: Agent = scripted.agent(tools=[read_all, look_up], settings=COMPACT)
        resumed: Outcome = await careful.resume(failed.state)
        assert (resumed.kind, resumed.text, resumed.run_id) == ("final", "Mild.", failed.run_id)
        assert (await careful.run("And now?", history=failed.history)).text == "Still mild."
