"""Complaints about agent runtimes, themes 11 to 15 and 17: cancellation, concurrency, approval, schemas.

Each test names its case and shows that it does not happen here.
"""

import asyncio
import dataclasses
import gc
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated

import pytest

from antiphon import Agent, ConfigError, Limits, MemorySession, SessionFailed, tool
from antiphon.agent.outcome import TextDelta, ToolStarted, TurnRestarted
from antiphon.errors import Unavailable
from antiphon.ledger import RunTaken
from antiphon.protocol.json_text import JsonObject
from antiphon.store.ledger import SqliteLedger
from antiphon.testing.scripted import serve_script
from antiphon.tools.schema import is_strict
from support.scripted_model import (
    DROP,
    HOLD,
    AntiphonModel,
    ScriptedModel,
    UpstreamModel,
    call,
    look_up,
    make_reply,
    outputs_of,
    usage,
)
from support.upstream_server import serve


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    opened = SqliteLedger(tmp_path / "runs.db")
    yield opened
    await opened.close()


LOOK = call("look_up", {"city": "Bern"})


def error_of(output: str) -> str:
    message: str = json.loads(output)["error"]
    return message


# 11 Cancelling


async def test_pain_agents_76_stream_can_be_cancelled(scripted: ScriptedModel) -> None:
    """openai/openai-agents-python#2222: the stream cannot be cancelled with asyncio."""
    scripted.set_answers([{"text": "Well"}, HOLD])

    async def read() -> None:
        async for _ in scripted.agent().run_stream("Go."):
            pass

    reading = asyncio.ensure_future(read())
    await scripted.until_held()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_pain_agents_77_cancelled_call_has_an_output(scripted: ScriptedModel) -> None:
    """google/adk-python#2425: synchronous tools run on after a cancel, asynchronous ones leave a call open."""
    begun, let_go, cancel = asyncio.Semaphore(0), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @tool
    def hang() -> None:
        """Hang."""
        loop.call_soon_threadsafe(begun.release)
        let_go.wait(20)

    @tool
    async def wait() -> None:
        """Wait."""
        begun.release()
        await asyncio.Event().wait()

    scripted.set_answers([call("hang", None, "call_h"), call("wait", None, "call_w")], "I see.")
    agent = scripted.agent(tools=[hang, wait])
    running = asyncio.ensure_future(agent.run("Go.", cancel=cancel))
    await begun.acquire()
    await begun.acquire()
    cancel.set()
    outcome = await running
    let_go.set()
    assert outcome.kind == "cancelled"
    assert (await agent.run("And?", history=outcome.history)).text == "I see."
    assert [call_id for call_id, _ in outputs_of(scripted.sent[-1])] == ["call_h", "call_w"]


async def test_pain_agents_80_cancelling_stops_subagents(scripted: ScriptedModel, ledger: SqliteLedger) -> None:
    """langchain-ai/langgraph#8029: an abort does not reach subgraphs."""
    scripted.set_answers([call("expert", {"input": "Bern?"})], [{"text": "Well"}, HOLD], "I see.")
    agent = scripted.agent(tools=[scripted.agent(name="expert").as_tool("expert", "Knows.")])
    cancel = asyncio.Event()
    running = asyncio.ensure_future(agent.run("Go.", ledger=ledger, run_id="run_1", cancel=cancel))
    await scripted.until_held()
    cancel.set()
    assert (await running).kind == "cancelled"
    assert [summary.status for summary in await ledger.runs()] == ["cancelled", "cancelled"]


# 12 Concurrency


@pytest.mark.parametrize("state", ["client", "server"])
async def test_pain_agents_81_two_runs_can_continue_one_history(scripted: AntiphonModel, state: str) -> None:
    """google/adk-python#1733: a stale session after two messages in a row."""
    scripted.set_answers("Mild.")
    agent = scripted.agent(conversation_state=state)
    first = await agent.run("Go.")
    scripted.set_answers([HOLD, {"text": "You said: {input}"}])
    both = [asyncio.ensure_future(agent.run(text, history=first.history)) for text in ("And?", "Or?")]
    # The second starts while the first is running.
    for _ in both:
        await scripted.until_held()
    for _ in both:
        scripted.release()
    ended = [await running for running in both]
    assert [outcome.text for outcome in ended] == ["You said: And?", "You said: Or?"]
    for outcome, text in zip(ended, ("And?", "Or?"), strict=True):
        assert outcome.history[:3] == (*first.history, {"role": "user", "content": text})
        assert len(outcome.history) == 4


async def test_pain_agents_81_threads_can_share_one_agent() -> None:
    """google/adk-python#1049: sessions of several workers in one process interfere with each other."""
    gates = [asyncio.Event() for _ in range(3)]
    replies = [make_reply([{"text": f"{turn}"}, HOLD], turn, gate) for turn, gate in enumerate(gates)]
    async with serve(replies) as server:
        agent = Agent(model="scripted", base_url=server.url)
        running = []
        for turn in range(3):
            running.append(asyncio.ensure_future(asyncio.to_thread(agent.run_sync, f"Go {turn}.")))
            await server.until_requests(turn + 1)
        # Each ends while others are running: the last, the first, and the one between.
        for turn in (2, 0, 1):
            gates[turn].set()
            outcome = await asyncio.wait_for(running[turn], 20)
            assert (outcome.kind, outcome.text) == ("final", f"{turn}")
    # An unclosed connection warns when it is collected.
    gc.collect()


async def test_pain_agents_82_second_to_resume_a_run_gets_an_error(
    scripted: ScriptedModel, ledger: SqliteLedger, tmp_path: Path
) -> None:
    """google/adk-python#4751: reloading and continuing corrupts the history permanently."""
    scripted.set_answers([{"text": "Well"}, HOLD], "Mild.", "Mild.")
    agent, other = scripted.agent(), SqliteLedger(tmp_path / "runs.db")
    running = asyncio.ensure_future(agent.run("Go.", ledger=ledger, run_id="run_1"))
    await scripted.until_held()
    with pytest.raises(RunTaken, match="Another process is executing the run 'run_1'"):
        await agent.resume("run_1", ledger=other)
    assert (await agent.resume("run_1", ledger=other, force=True)).text == "Mild."
    scripted.release()
    with pytest.raises(RunTaken, match="Another process has continued the run 'run_1'"):
        await running
    assert len((await agent.resume("run_1", ledger=ledger)).history) == 2
    await other.close()


CITIES = ("Bern", "Rome", "Oslo")
# Every run starts three concurrent subagents, each of which makes a call.
EVERYBODY = {
    "rules": [
        {"user": "Go", "last_item": "message", "answers": [[call("expert", {"input": c}, c) for c in CITIES]]},
        {"last_item": "message", "answers": [[LOOK]]},
    ],
    "default": "Mild.",
}


def make_team(url: str) -> Agent:
    expert = Agent(model="scripted", base_url=url, name="expert", tools=[look_up])
    return Agent(model="scripted", base_url=url, tools=[expert.as_tool("expert", "Knows.")])


async def test_pain_agents_86_concurrent_runs_do_not_block_each_other(tmp_path: Path) -> None:
    """anthropics/claude-code#14124, langchain-ai/langgraph#8136: database is locked, and parallel agents freeze."""

    async def work(agent: Agent) -> set[str]:
        # Each run has its own ledger object, as in separate processes, on one file.
        ledgers = [SqliteLedger(tmp_path / "runs.db") for _ in range(2)]
        runs = await asyncio.gather(*(agent.run("Go.", ledger=ledger) for ledger in ledgers * 3))
        for ledger in ledgers:
            await ledger.close()
        await agent.close()
        return {outcome.kind for outcome in runs}

    with serve_script(EVERYBODY) as server:
        team = make_team(server.base_url)
        working = [asyncio.to_thread(asyncio.run, work(team)) for _ in range(3)]
        assert await asyncio.wait_for(asyncio.gather(*working), 60) == [{"final"}] * 3
    ledger = SqliteLedger(tmp_path / "runs.db")
    # Eighteen runs with three subagents each. All have ended, and no entry was written twice.
    assert Counter(run.status for run in await ledger.runs(limit=1000)) == {"final": 72}
    await ledger.close()


# 13 Approval


async def test_pain_agents_87_approved_call_runs_and_is_reported(scripted: ScriptedModel) -> None:
    """agno-agi/agno#8029, #7697: an approved tool is silently not run, or work is done twice."""
    done: list[str] = []

    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        """Pay."""
        done.append(f"paid {amount}")
        return done[-1]

    @tool
    async def note(text: str) -> str:
        """Note."""
        done.append(text)
        return text

    scripted.set_answers([call("note", {"text": "noted"}, "call_n"), call("pay", {"amount": 5}, "call_p")], "Done.")
    agent = scripted.agent(tools=[pay, note])
    outcome = await agent.run("Go.")
    assert outcome.state is not None
    await agent.resume(outcome.state, approvals={"call_p": True})
    assert done == ["noted", "paid 5"]
    assert outputs_of(scripted.sent[1]) == [("call_n", "noted"), ("call_p", "paid 5")]


async def test_pain_agents_88_run_id_is_the_same_after_approval(scripted: ScriptedModel) -> None:
    """agno-agi/agno#9288, #9198, #8901: the user, the settings and the limits are lost."""

    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    scripted.set_answers(
        [call("pay", {"amount": 5}), usage(10, 1)], [LOOK, usage(10, 1)], [{"text": "Done."}, usage(10, 1)]
    )
    settings = {"metadata": {"user": "ada"}}
    agent = scripted.agent(tools=[pay, look_up], instructions="Be kind.", settings=settings, limits=Limits(turns=2))
    outcome = await agent.run("Go.", run_id="run_1")
    assert outcome.state is not None
    resumed = await agent.resume(outcome.state, approvals={"call_1": True})
    assert (resumed.run_id, resumed.kind, resumed.turns, resumed.usage.total_tokens) == ("run_1", "max_turns", 3, 33)
    assert {(request["instructions"], request["metadata"]["user"]) for request in scripted.sent} == {
        ("Be kind.", "ada")
    }


async def test_pain_agents_89_final_tool_ends_the_run_after_approval(scripted: ScriptedModel) -> None:
    """agno-agi/agno#9198: after an approval the model is called once more."""

    @tool(needs_approval=True, final=True)
    async def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    scripted.set_answers([call("pay", {"amount": 5})], "Shall I pay again?")
    agent = scripted.agent(tools=[pay])
    outcome = await agent.run("Go.")
    assert outcome.state is not None
    resumed = await agent.resume(outcome.state, approvals={"call_1": True})
    assert (resumed.kind, resumed.output, len(scripted.sent)) == ("final", "paid 5", 1)


class FailingSession(MemorySession):
    """A session that stores no runs while `is_full`."""

    is_full = False

    async def save_run(self, run_id: str, items: Sequence[JsonObject]) -> None:
        if self.is_full:
            raise Unavailable("The disk is full.")
        await super().save_run(run_id, items)


async def test_pain_agents_22_failed_session_write_leaves_no_half_of_a_run(scripted: ScriptedModel) -> None:
    """openai/openai-agents-python#4615: an approved tool ran, and a retry finds its output without its call."""

    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    scripted.set_answers([call("pay", {"amount": 5})], "Paid.")
    agent = scripted.agent(tools=[pay])
    session = FailingSession("chat_1")
    outcome = await agent.run("Go.", session=session)
    assert outcome.state is not None
    stored = await session.list_items()
    session.is_full = True
    with pytest.raises(SessionFailed) as failed:
        await agent.resume(outcome.state, approvals={"call_1": True}, session=session)
    assert (failed.value.outcome.text, await session.list_items()) == ("Paid.", stored)
    session.is_full = False
    assert (await agent.run("And now?", session=session)).kind == "final"
    assert [call_id for call_id, _ in outputs_of(scripted.sent[-1])] == ["call_1"]


# 14 Schemas


@dataclasses.dataclass
class Options:
    fast: bool
    note: str | None = None


async def test_pain_agents_92_tool_schemas_are_strict_at_every_level(scripted: ScriptedModel) -> None:
    """openai/openai-agents-python#992, #4114, strands-agents/harness-sdk#2210: a 400 about additionalProperties."""

    @tool
    async def plan(options: Options, more: list[Options] | None = None, limit: Annotated[int, "How many."] = 3) -> str:
        """Plan."""
        return f"{options.fast} {more} {limit}"

    scripted.set_answers(
        [call("plan", {"options": {"fast": True, "note": None}, "more": None, "limit": None})], "Done."
    )
    await scripted.agent(tools=[plan]).run("Go.")
    (offered,) = scripted.sent[0]["tools"]
    assert offered["strict"] is True
    assert is_strict(offered["parameters"])
    # Optional fields may be null (langchain-ai/langchain#34599), which means their default.
    assert outputs_of(scripted.sent[1]) == [("call_1", "True None 3")]


def take_any(filters: dict[str, str]) -> str:
    """Look up."""
    return str(filters)


def test_pain_agents_94_tool_without_strict_schema_is_rejected() -> None:
    """langchain-ai/langchain#32879, nerdai/llm-agents-from-scratch#861: strict is set but not enforced."""
    with pytest.raises(ConfigError, match=r"take_any\.filters: strict mode cannot express .* use strict=False"):
        tool(take_any)
    assert tool(strict=False)(take_any).describe()["strict"] is False


# 15 Tools that hang


async def test_pain_agents_98_hanging_tool_is_stopped_and_the_run_continues(scripted: ScriptedModel) -> None:
    """earendil-works/pi#2579: it hung all night."""

    @tool(timeout=0.05)
    async def hang() -> str:
        """Hang."""
        await asyncio.Event().wait()
        return ""

    scripted.set_answers([call("hang")], "I see.")
    assert (await scripted.agent(tools=[hang]).run("Go.")).text == "I see."
    assert error_of(outputs_of(scripted.sent[1])[0][1]) == "The tool took longer than 0.05 seconds and was stopped."


def test_pain_agents_100_hanging_thread_blocks_neither_tools_nor_the_end() -> None:
    """amd/gaia#1591, pydantic/pydantic-ai#3594: the thread of a cancelled tool leaks, and the program hangs."""
    code = """
import asyncio, os, threading
from antiphon.tools.base import ToolInvocation, ToolContext
from antiphon.tools.executor import Executor
from antiphon.tools.function import tool

@tool(timeout=0.01)
def hang() -> None:
    "Hang."
    threading.Event().wait()

@tool
def work() -> str:
    "Work."
    return "done"

async def main() -> None:
    executor = Executor([hang, work])
    context = ToolContext(run_id="r", call_id="c", idempotency_key="k")
    # More than a pool has threads.
    await asyncio.gather(*(executor.execute(ToolInvocation("c", "hang", ""), context) for _ in range(40)))
    print((await executor.execute(ToolInvocation("c", "work", ""), context)).output)

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "done\n"


# 17 Servers that lose state


async def test_pain_agents_107_server_state_loses_no_calls(scripted: ScriptedModel) -> None:
    """vllm-project/vllm#43244: previous_response_id drops stored calls and outputs."""
    scripted.set_answers([LOOK], [call("look_up", {"city": "Rome"})], "{history}")
    outcome = await scripted.agent(tools=[look_up], conversation_state="server").run("Go.")
    # The model has read the question, two calls and two outputs.
    assert outcome.text == "5"


async def test_pain_agents_108_ignored_previous_response_is_detected(upstream: UpstreamModel) -> None:
    """Blaizzy/mlx-vlm#1046: previous_response_id is accepted, answered with 200, and ignored."""
    upstream.set_answers([LOOK])
    restarts = []
    async for event in upstream.agent(tools=[look_up], conversation_state="server").run_stream("Go."):
        if isinstance(event, ToolStarted):
            # The scripted server starts again: its responses continue no other.
            upstream.set_answers("What?", "Mild.")
        elif isinstance(event, TurnRestarted):
            restarts.append(event.reason)
    assert restarts == ["The server did not continue the conversation. Later requests send the whole history."]
    assert "previous_response_id" not in upstream.sent[2]
    assert outputs_of(upstream.sent[2]) == [("call_1", "Bern: mild")]


async def test_pain_agents_110_exception_in_a_stream_repeats_the_turn(scripted: ScriptedModel) -> None:
    """waybarrios/vllm-mlx#214: an exception in a stream, and a store that loses responses."""
    scripted.set_answers([{"text": "It"}, DROP], "It is mild.")
    events = [event async for event in scripted.agent(conversation_state="server").run_stream("Go.")]
    assert sum(isinstance(event, TurnRestarted) for event in events) == 1
    assert "".join(event.text for event in events if isinstance(event, TextDelta)).endswith("It is mild.")
