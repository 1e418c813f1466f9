"""What users of agent runtimes complain about, themes 9 to 15 and 17: budgets, overflow, cancelling, approval, schemas.

Each test names the case that it is after. None of them is true here.
"""

import asyncio
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import pytest

from agent_stage import DROP, HOLD, OurStage, Stage, TheirStage, call, open_stage, outputs_of, usage
from antiphon import ConfigError, Limits, Prices, tool
from antiphon.agent.outcome import TextDelta, ToolStarted, TurnRestarted
from antiphon.ledger import EntryTaken
from antiphon.store.ledger import SqliteLedger
from antiphon.tools.schema import is_strict


@pytest.fixture
async def stage() -> AsyncIterator[OurStage]:
    async with open_stage("in process") as opened:
        assert isinstance(opened, OurStage)
        yield opened


@pytest.fixture
async def upstream() -> AsyncIterator[TheirStage]:
    async with open_stage("upstream") as opened:
        assert isinstance(opened, TheirStage)
        yield opened


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    opened = SqliteLedger(tmp_path / "runs.db")
    yield opened
    await opened.close()


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


LOOK = call("look_up", {"city": "Bern"})


def error_of(output: str) -> str:
    message: str = json.loads(output)["error"]
    return message


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
    assert outcome.turns <= 3


async def test_pain_agents_67_at_its_budget_a_run_is_wound_up_with_an_answer(stage: Stage) -> None:
    """microsoft/agent-framework#6397, #6934: at the limit of tokens the run just stops."""
    stage.play([LOOK, usage(90, 30)], "Bern is mild.")
    outcome = await stage.agent(tools=[look_up], limits=Limits(tokens=100)).run("Go.")
    assert (outcome.kind, outcome.text) == ("budget", "Bern is mild.")


# 10 Overflow


SUMMARY = "Goal: to know the weather."


async def test_pain_agents_72_a_huge_output_is_compacted_and_the_run_goes_on(stage: OurStage) -> None:
    """zed-industries/zed#64560, openai/codex#18720: a huge output makes compaction impossible, or the task is lost."""

    @tool
    async def read() -> str:
        """Read it all."""
        return "steel " * 20_000

    rules = [{"text": "You write the notes", "answers": [SUMMARY]}]
    stage.play_by(rules, [call("read")], [LOOK], "Mild.")
    settings = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}
    outcome = await stage.agent(tools=[read, look_up], settings=settings).run("How is the weather?")
    assert (outcome.kind, outcome.text) == ("final", "Mild.")
    # Nothing of it is lost to us, but what was compacted is not sent again.
    assert any(len(str(item.get("output"))) > 100_000 for item in outcome.history)
    assert [item["type"] for item in stage.sent[2]["input"]] == ["compaction", "function_call", "function_call_output"]


async def test_pain_agents_69_a_conversation_that_is_too_long_fails_with_its_reason_and_can_be_resumed(
    stage: Stage,
) -> None:
    """openai/codex#18572: at the end of the window nothing works any more."""
    error = {"message": "Too long.", "status": 400, "type": "invalid_request_error", "code": "context_length_exceeded"}
    stage.play([LOOK], [{"raise": error}], "Mild.")
    outcome = await stage.agent(tools=[look_up]).run("Go.")
    assert outcome.error is not None
    assert (outcome.kind, outcome.error.code) == ("failed", "context_length_exceeded")
    assert outcome.state is not None
    # With a model that has more room, say.
    assert (await stage.agent(tools=[look_up], model="scripted").resume(outcome.state)).text == "Mild."


# 11 Cancelling


async def test_pain_agents_76_a_stream_is_cancelled_as_anything_else_is(stage: Stage) -> None:
    """openai/openai-agents-python#2222: the stream cannot be cancelled with asyncio."""
    stage.play([{"text": "Well"}, HOLD])

    async def read() -> None:
        async for _ in stage.agent().run_stream("Go."):
            pass

    reading = asyncio.ensure_future(read())
    await stage.until_held()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_pain_agents_77_what_was_cancelled_has_an_output_in_a_thread_or_not(stage: Stage) -> None:
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

    stage.play([call("hang", None, "call_h"), call("wait", None, "call_w")], "I see.")
    agent = stage.agent(tools=[hang, wait])
    running = asyncio.ensure_future(agent.run("Go.", cancel=cancel))
    await begun.acquire()
    await begun.acquire()
    cancel.set()
    outcome = await running
    let_go.set()
    assert outcome.kind == "cancelled"
    assert (await agent.run("And?", history=outcome.history)).text == "I see."
    assert [call_id for call_id, _ in outputs_of(stage.sent[-1])] == ["call_h", "call_w"]


async def test_pain_agents_80_cancelling_stops_the_agents_below_too(stage: Stage, ledger: SqliteLedger) -> None:
    """langchain-ai/langgraph#8029: an abort does not reach subgraphs."""
    stage.play([call("expert", {"input": "Bern?"})], [{"text": "Well"}, HOLD], "I see.")
    agent = stage.agent(tools=[stage.agent(name="expert").as_tool("expert", "Knows.")])
    cancel = asyncio.Event()
    running = asyncio.ensure_future(agent.run("Go.", durable=ledger, run_id="run_1", cancel=cancel))
    await stage.until_held()
    cancel.set()
    assert (await running).kind == "cancelled"
    assert [summary.status for summary in await ledger.runs()] == ["cancelled", "cancelled"]


# 12 Several at once


async def test_pain_agents_81_two_runs_may_go_on_from_one_conversation(stage: Stage) -> None:
    """google/adk-python#1733: a stale session, when somebody sends two messages in a row."""
    stage.play("Mild.")
    first = await stage.agent().run("Go.")
    both = await asyncio.gather(*(stage.agent().run(text, history=first.history) for text in ("And?", "Or?")))
    assert [outcome.kind for outcome in both] == ["final", "final"]
    assert [len(outcome.history) for outcome in both] == [4, 4]


async def test_pain_agents_82_of_two_who_resume_a_run_one_is_told_and_the_history_stays_whole(
    stage: Stage, ledger: SqliteLedger, tmp_path: Path
) -> None:
    """google/adk-python#4751: who reloads and continues corrupts the history for good."""
    stage.play([{"text": "Well"}, HOLD], "Mild.", "Mild.")
    agent, other = stage.agent(), SqliteLedger(tmp_path / "runs.db")
    running = asyncio.ensure_future(agent.run("Go.", durable=ledger, run_id="run_1"))
    await stage.until_held()
    assert (await agent.resume("run_1", durable=other)).text == "Mild."
    stage.go_on()
    with pytest.raises(EntryTaken, match="Another process has gone on with the run 'run_1'"):
        await running
    assert len((await agent.resume("run_1", durable=ledger)).history) == 2
    await other.close()


async def test_pain_agents_86_runs_side_by_side_do_not_lock_each_other_out(stage: Stage, tmp_path: Path) -> None:
    """anthropics/claude-code#14124, langchain-ai/langgraph#8136: database is locked."""
    stage.play("Mild.")
    ledgers = [SqliteLedger(tmp_path / "runs.db") for _ in range(3)]
    runs = (stage.agent().run("Go.", durable=ledger) for ledger in ledgers * 8)
    assert {outcome.kind for outcome in await asyncio.gather(*runs)} == {"final"}
    assert len(await ledgers[0].runs()) == 24
    for ledger in ledgers:
        await ledger.close()


# 13 Approval


async def test_pain_agents_87_what_was_approved_is_done_and_what_was_done_is_told(stage: Stage) -> None:
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

    stage.play([call("note", {"text": "noted"}, "call_n"), call("pay", {"amount": 5}, "call_p")], "Done.")
    agent = stage.agent(tools=[pay, note])
    outcome = await agent.run("Go.")
    assert outcome.state is not None
    await agent.resume(outcome.state, approvals={"call_p": True})
    assert done == ["noted", "paid 5"]
    assert outputs_of(stage.sent[1]) == [("call_n", "noted"), ("call_p", "paid 5")]


async def test_pain_agents_88_after_approval_the_run_is_the_same_run(stage: Stage) -> None:
    """agno-agi/agno#9288, #9198, #8901: who asked, the settings and the limits are lost."""

    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    stage.play([call("pay", {"amount": 5}), usage(10, 1)], [LOOK, usage(10, 1)], [{"text": "Done."}, usage(10, 1)])
    settings = {"metadata": {"user": "ada"}}
    agent = stage.agent(tools=[pay, look_up], instructions="Be kind.", settings=settings, limits=Limits(turns=3))
    outcome = await agent.run("Go.", run_id="run_1")
    assert outcome.state is not None
    resumed = await agent.resume(outcome.state, approvals={"call_1": True})
    assert (resumed.run_id, resumed.kind, resumed.turns, resumed.usage.total_tokens) == ("run_1", "max_turns", 3, 33)
    assert {(request["instructions"], request["metadata"]["user"]) for request in stage.sent} == {("Be kind.", "ada")}


# 14 Schemas


@dataclasses.dataclass
class Options:
    fast: bool
    note: str | None = None


async def test_pain_agents_92_every_object_of_a_tool_is_closed_and_every_field_required(stage: Stage) -> None:
    """openai/openai-agents-python#992, #4114, strands-agents/harness-sdk#2210: a 400 about additionalProperties."""

    @tool
    async def plan(options: Options, more: list[Options] | None = None, limit: Annotated[int, "How many."] = 3) -> str:
        """Plan."""
        return f"{options.fast} {more} {limit}"

    stage.play([call("plan", {"options": {"fast": True, "note": None}, "more": None, "limit": None})], "Done.")
    await stage.agent(tools=[plan]).run("Go.")
    (offered,) = stage.sent[0]["tools"]
    assert offered["strict"] is True
    assert is_strict(offered["parameters"])
    # What may be left out may be null (langchain-ai/langchain#34599), and is then what it is by default.
    assert outputs_of(stage.sent[1]) == [("call_1", "True None 3")]


def take_any(filters: dict[str, str]) -> str:
    """Look up."""
    return str(filters)


def test_pain_agents_94_a_schema_that_cannot_be_strict_is_refused_when_the_tool_is_made() -> None:
    """langchain-ai/langchain#32879, nerdai/llm-agents-from-scratch#861: strict is claimed, and not kept to."""
    with pytest.raises(ConfigError, match=r"take_any\.filters: strict mode cannot express .* use strict=False"):
        tool(take_any)
    assert tool(strict=False)(take_any).describe()["strict"] is False


# 15 Tools that hang


async def test_pain_agents_98_a_tool_that_hangs_is_stopped_and_the_run_goes_on(stage: Stage) -> None:
    """earendil-works/pi#2579: it hung all night."""

    @tool(timeout=0.05)
    async def hang() -> str:
        """Hang."""
        await asyncio.Event().wait()
        return ""

    stage.play([call("hang")], "I see.")
    assert (await stage.agent(tools=[hang]).run("Go.")).text == "I see."
    assert error_of(outputs_of(stage.sent[1])[0][1]) == "The tool took longer than 0.05 seconds and was stopped."


def test_pain_agents_100_a_thread_that_hangs_holds_up_neither_other_tools_nor_the_end() -> None:
    """amd/gaia#1591, pydantic/pydantic-ai#3594: the thread of a tool that was given up leaks, and the program hangs."""
    code = """
import asyncio, os, threading
from antiphon.tools.base import Call, ToolContext
from antiphon.tools.execute import Executor
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
    await asyncio.gather(*(executor.execute(Call("c", "hang", ""), context) for _ in range(40)))
    print((await executor.execute(Call("c", "work", ""), context)).output)

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "done\n"


# 17 Servers that do not keep what they promise


async def test_pain_agents_107_calls_are_not_lost_where_our_server_keeps_the_conversation(stage: Stage) -> None:
    """vllm-project/vllm#43244: previous_response_id drops calls and outputs from what was stored."""
    stage.play([LOOK], [call("look_up", {"city": "Rome"})], "{history}")
    outcome = await stage.agent(tools=[look_up], state="server").run("Go.")
    # The question, two calls and two outputs: that is what the model has read.
    assert outcome.text == "5"


async def test_pain_agents_108_a_server_that_ignores_what_it_should_continue_is_found_out(upstream: TheirStage) -> None:
    """Blaizzy/mlx-vlm#1046: previous_response_id is accepted, answered with 200, and ignored."""
    upstream.play([LOOK])
    restarts = []
    async for event in upstream.agent(tools=[look_up], state="server").run_stream("Go."):
        if isinstance(event, ToolStarted):
            # From here on it begins anew: its answers continue nothing.
            upstream.play("What?", "Mild.")
        elif isinstance(event, TurnRestarted):
            restarts.append(event.reason)
    assert restarts == ["The server has not continued the conversation. It is sent whole from now on."]
    assert "previous_response_id" not in upstream.sent[2]
    assert outputs_of(upstream.sent[2]) == [("call_1", "Bern: mild")]


async def test_pain_agents_110_an_exception_after_the_stream_has_begun_is_a_turn_taken_again(stage: Stage) -> None:
    """waybarrios/vllm-mlx#214: an exception after the stream has begun, and a store that forgets."""
    stage.play([{"text": "It"}, DROP], "It is mild.")
    told = [event async for event in stage.agent(state="server").run_stream("Go.")]
    assert sum(isinstance(event, TurnRestarted) for event in told) == 1
    assert "".join(event.text for event in told if isinstance(event, TextDelta)).endswith("It is mild.")
