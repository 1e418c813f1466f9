"""Complaints about agent runtimes: sessions, runs and streams after an interruption.

Each test names its case and shows that it does not happen here. Cases that depend on the transport are in
`test_complaints_agents.py`.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from antiphon import ArgumentsDelta, HttpTransport, ReasoningDelta, RunEvent, SqliteLedger, SqliteSession, tool
from antiphon.agent.outcome import ToolFinished, ToolStarted
from antiphon.errors import InvalidRequest
from antiphon.tools.base import ToolContext
from support.scripted_model import (
    HOLD,
    AntiphonModel,
    UpstreamModel,
    call,
    look_up,
    outputs_of,
)

LOOK = call("look_up", {"city": "Bern"})
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "sealed"}


def kinds_of(request: dict[str, Any]) -> list[str]:
    return [item.get("type", "message") for item in request["input"]]


# 1 Reasoning and continuations


async def test_pain_agents_5_continued_response_gets_no_reasoning_again(upstream: UpstreamModel) -> None:
    """openai/openai-agents-python#1611: with previous_response_id, reasoning is sent that the server has already."""
    upstream.set_answers([{"item": REASONING}, LOOK], "Mild.")
    await upstream.agent(tools=[look_up], conversation_state="server").run("Go.")
    assert upstream.sent[1]["previous_response_id"] == "resp_1"
    assert kinds_of(upstream.sent[1]) == ["function_call_output"]


async def test_pain_agents_9_message_is_sent_back_after_its_reasoning(upstream: UpstreamModel) -> None:
    """continuedev/continue#12620: a 400 about a message without its required reasoning."""
    upstream.set_answers([{"item": REASONING}, {"text": "Mild."}], "As I wrote.")
    agent = upstream.agent()
    first = await agent.run("Go.")
    await agent.run("What?", history=first.history)
    _, reasoning, message, _ = upstream.sent[1]["input"]
    assert reasoning == REASONING
    # A message without an id does not require the reasoning that is stored with the id.
    assert (message["role"], "id" in message) == ("assistant", False)


# 2 Sessions


async def test_pain_agents_20_session_is_usable_after_a_cancelled_call(scripted: AntiphonModel, tmp_path: Path) -> None:
    """github/app#2249: cancelling a call in flight makes every later message of the session fail."""
    started = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        started.set()
        await asyncio.Event().wait()
        return "never"

    scripted.set_answers([call("look_up", {"city": "Bern"}, "call_l"), call("wait", {}, "call_w")], "Hello again.")
    agent = scripted.agent(tools=[look_up, wait])
    session = SqliteSession(tmp_path / "chats.db", "chat_1")
    run = asyncio.create_task(agent.run("Go.", session=session))
    await started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (await agent.run("Hello?", session=session)).text == "Hello again."
    assert Counter(call_id for call_id, _ in outputs_of(scripted.sent[-1])) == {"call_l": 1, "call_w": 1}
    await session.close()


# 3 Runs


async def test_pain_agents_27_failed_resumption_loses_nothing(scripted: AntiphonModel, tmp_path: Path) -> None:
    """QuintinShaw/pi-dynamic-workflows#206: a resumption deletes the stored steps before it has read them again."""
    ledger = SqliteLedger(tmp_path / "runs.db")
    made: list[str] = []

    @tool
    async def pay() -> str:
        """Pay."""
        made.append("paid")
        return "paid"

    scripted.set_answers([call("pay")], "Done.")
    agent = scripted.agent(tools=[pay])
    refused = InvalidRequest("The account is closed.")
    async with agent.run_stream("Go.", ledger=ledger, run_id="run_1") as stream:
        async for event in stream:
            if isinstance(event, ToolFinished):
                break
    scripted.transport.refusals = [refused]
    failed = await agent.resume("run_1", ledger=ledger)
    assert (failed.kind, failed.error and failed.error.message) == ("failed", "The account is closed.")
    outcome = await agent.resume("run_1", ledger=ledger)
    assert (outcome.kind, outcome.text, outcome.tool_calls, made) == ("final", "Done.", 1, ["paid"])
    await ledger.close()


async def test_pain_agents_30_resumed_run_has_the_events_of_its_new_steps(
    scripted: AntiphonModel, tmp_path: Path
) -> None:
    """pydantic/pydantic-ai#6092, #2804: a durable run has no events, or repeats those of earlier steps."""
    ledger = SqliteLedger(tmp_path / "runs.db")
    scripted.set_answers([LOOK], [call("look_up", {"city": "Rome"}, "call_2")], "Mild.")
    seen: list[RunEvent] = []
    agent = scripted.agent(tools=[look_up], hooks=[seen.append])
    async with agent.run_stream("Go.", ledger=ledger, run_id="run_1") as stream:
        async for event in stream:
            if isinstance(event, ToolFinished):
                break
    streamed = [event async for event in agent.resume_stream("run_1", ledger=ledger)]
    assert [event.call.call_id for event in streamed if isinstance(event, ToolFinished)] == ["call_2"]
    assert [event.call.call_id for event in seen if isinstance(event, ToolFinished)] == ["call_1", "call_2"]
    assert seen[-len(streamed) :] == streamed
    await ledger.close()


async def test_pain_agents_31_finished_calls_of_a_turn_are_not_repeated(
    scripted: AntiphonModel, tmp_path: Path
) -> None:
    """GEMISIS/leviath#96: after a crash all calls of the turn are run again, also those that had finished."""
    ledger = SqliteLedger(tmp_path / "runs.db")
    made: list[tuple[str, str]] = []
    gate = asyncio.Event()

    @tool(on_interrupt="retry")
    async def send(name: str, context: ToolContext) -> str:
        """Send."""
        made.append((name, context.idempotency_key))
        if name == "c":
            await gate.wait()
        return f"sent {name}"

    scripted.set_answers([call("send", {"name": name}, f"call_{name}") for name in "abc"], "Sent.")
    agent = scripted.agent(tools=[send])
    finished = 0
    async with agent.run_stream("Go.", ledger=ledger, run_id="run_1") as stream:
        async for event in stream:
            finished += isinstance(event, ToolFinished)
            if finished == 2:
                break
    gate.set()
    outcome = await agent.resume("run_1", ledger=ledger)
    assert outcome.kind == "final"
    assert outputs_of(scripted.sent[-1]) == [(f"call_{name}", f"sent {name}") for name in "abc"]
    keys = {f"run_1:1:{index}" for index in range(3)}
    assert Counter(name for name, _ in made) == {"a": 1, "b": 1, "c": 2}
    assert {key for _, key in made} == keys
    await ledger.close()


# 6 Events


async def test_pain_agents_43_call_is_streamed_while_the_model_writes(scripted: AntiphonModel) -> None:
    """openai/openai-agents-python#1282: a tool call is reported only after the whole answer."""
    scripted.set_answers([LOOK, HOLD, call("look_up", {"city": "Rome"}, "call_2")], "Mild.")
    first: list[str] = []
    async for event in scripted.agent(tools=[look_up]).run_stream("Go."):
        if isinstance(event, ArgumentsDelta) and not first:
            first.append(event.call_id)
            scripted.release()
    assert first == ["call_1"]


async def test_pain_agents_44_reasoning_is_streamed_and_stored_before_its_call(scripted: AntiphonModel) -> None:
    """openai/openai-agents-python#1767: the reasoning comes after the call that it led to."""
    scripted.set_answers([{"reasoning": "Look."}, LOOK], "Mild.")
    stream = scripted.agent(tools=[look_up]).run_stream("Go.")
    events = [event async for event in stream]
    order = [type(event) for event in events if isinstance(event, ReasoningDelta | ArgumentsDelta | ToolStarted)]
    assert order == [ReasoningDelta, ArgumentsDelta, ToolStarted]
    assert [item["type"] for item in stream.outcome.history[1:3]] == ["reasoning", "function_call"]


async def test_pain_agents_50_interleaved_arguments_belong_to_their_calls(scripted: AntiphonModel) -> None:
    """vllm-project/vllm#52418: arguments of two calls that arrive in turns break the stream."""

    def write(call_id: str, part: str) -> dict[str, Any]:
        named = {"name": "look_up", "call_id": call_id, "key": call_id}
        return {"tool_call": named | {"arguments": [part]}}

    pieces = [("call_1", '{"city":'), ("call_2", '{"ci'), ("call_1", '"Bern"}'), ("call_2", 'ty":"Chur"}')]
    scripted.set_answers([write(*piece) for piece in pieces], "Mild.")
    stream = scripted.agent(tools=[look_up]).run_stream("Go.")
    parts = [(event.call_id, event.text) async for event in stream if isinstance(event, ArgumentsDelta)]
    for call_id, arguments in (("call_1", '{"city":"Bern"}'), ("call_2", '{"city":"Chur"}')):
        assert "".join(text for each, text in parts if each == call_id) == arguments
    assert outputs_of(scripted.sent[1]) == [("call_1", "Bern: mild"), ("call_2", "Chur: mild")]


# 7 Broken streams


async def test_pain_agents_55_stalled_server_is_given_up_after_a_few_turns(upstream: UpstreamModel) -> None:
    """openai/codex#3229: a stream that stalls every time is repeated without end."""
    upstream.set_answers([{"text": "It is"}, HOLD])
    transport = HttpTransport(upstream.upstream.url, idle_timeout=0.05)
    outcome = await upstream.agent(transport=transport, turn_retries=2).run("Go.")
    upstream.release()
    assert (outcome.kind, outcome.error and outcome.error.code) == ("failed", "upstream_timeout")
    assert len(upstream.upstream.requests) == 3
    await transport.close()


# 12 Concurrency


async def test_pain_agents_84_sessions_and_runs_share_one_file(scripted: AntiphonModel, tmp_path: Path) -> None:
    """openai/openai-agents-python#2854, #2843, #4987: sessions of one SQLite file lock each other out."""
    scripted.set_answers([LOOK], *["Mild."] * 40)
    agent = scripted.agent(tools=[look_up])
    path = tmp_path / "agent.db"

    async def chat(number: int) -> int:
        session, ledger = SqliteSession(path, f"chat_{number}"), SqliteLedger(path)
        for text in ("One.", "Two."):
            outcome = await agent.run(text, session=session, ledger=ledger)
            assert outcome.kind == "final"
        items = await session.list_items()
        await session.close()
        await ledger.close()
        return len([item for item in items if item.get("role") == "user"])

    assert await asyncio.gather(*(chat(number) for number in range(8))) == [2] * 8
