"""Runs that version 0.1.0 has stored: their entries keep their encoding, and the runs can be read and resumed.

`ledger_0_1_0.json` was recorded with commit 5fb13f3. It has the encoded entries of several runs, by run id, and the
packed state of a paused run without a ledger. All kinds of entries are among them.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon import Agent, Prices, Tool, tool
from antiphon.agent.entries import Entry
from antiphon.agent.journal import load, unpack
from antiphon.agent.transports.base import Events
from antiphon.ledger import Ledger
from antiphon.protocol import codec

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("ledger_0_1_0.json").read_text())
RUNS: dict[str, list[str]] = RECORDED["ledger"]


class Answers:
    """A transport that gives one text in every turn and records the requests."""

    def __init__(self, text: str) -> None:
        self.requests: list[dict[str, Any]] = []
        self._text = text

    async def stream(self, request: dict[str, Any]) -> Events:
        self.requests.append(request)
        message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": self._text}]}
        usage = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
        response = {"id": "resp_new", "status": "completed", "output": [message], "usage": usage}

        async def events() -> Events:
            yield [codec.decode_event(json.dumps({"type": "response.completed", "response": response}).encode())]

        return events()

    async def close(self) -> None:
        """There is nothing to close."""


@tool(on_interrupt="retry")
async def look_up(city: str) -> str:
    """Look up the weather."""
    return f"{city}: mild"


@tool(needs_approval=True)
async def send(text: str) -> str:
    """Send a text."""
    return f"sent {text}"


async def store(ledger: Ledger, run_id: str, count: int | None = None) -> None:
    for number, entry in enumerate(RUNS[run_id][:count]):
        await ledger.append(run_id, number, entry.encode(), status="running")


def make_agent(answers: Answers, tools: list[Tool] | None = None, **options: Any) -> Agent:
    return Agent(model="m", transport=answers, tools=[look_up, send] if tools is None else tools, **options)


def outputs_of(request: dict[str, Any]) -> list[str]:
    return [item["output"] for item in request["input"] if item.get("type") == "function_call_output"]


@pytest.mark.parametrize("run_id", RUNS)
def test_stored_entries_keep_their_encoding(run_id: str) -> None:
    for encoded in RUNS[run_id]:
        entry = msgspec.json.decode(encoded, type=Entry)
        assert json.loads(msgspec.json.encode(entry)) == json.loads(encoded)


def test_recorded_runs_have_every_kind_of_entry() -> None:
    tags = {json.loads(entry)["entry"] for entries in RUNS.values() for entry in entries}
    assert tags == {"Began", "Answered", "Wasted", "Intended", "Paused", "Resulted", "Resumed", "Ended"}


async def test_run_that_waits_for_approval_is_resumed(ledger: Ledger) -> None:
    await store(ledger, "run_paused")
    answers = Answers("It is sent.")
    agent = make_agent(answers, prices=Prices(input=1, output=2))
    outcome = await agent.resume("run_paused", approvals={"call_2": True}, ledger=ledger)
    assert (outcome.kind, outcome.text) == ("final", "It is sent.")
    assert outputs_of(answers.requests[0]) == ["Bern: mild", "sent hi"]
    assert outcome.usage.total_tokens == 139 + 110 + 110
    assert outcome.cost == pytest.approx((333 * 1 + 26 * 2) / 1_000_000)


async def test_call_that_a_crash_interrupted_is_made_again(ledger: Ledger) -> None:
    await store(ledger, "run_whole", 3)
    answers = Answers("Mild.")
    outcome = await make_agent(answers).resume("run_whole", ledger=ledger)
    assert (outcome.kind, outcome.tool_calls, outputs_of(answers.requests[0])) == ("final", 1, ["Bern: mild"])


async def test_finished_run_has_the_same_outcome(ledger: Ledger) -> None:
    await store(ledger, "run_whole")
    answers = Answers("Something else.")
    outcome = await make_agent(answers).resume("run_whole", ledger=ledger)
    assert (outcome.kind, outcome.text, outcome.turns, answers.requests) == ("final", "Mild.", 2, [])


async def test_run_with_a_denied_call_and_a_limit_is_read(ledger: Ledger) -> None:
    await store(ledger, "run_limited")
    state = (await load("run_limited", ledger)).state
    outputs = [item["output"] for item in state.history if item.get("type") == "function_call_output"]
    assert outputs == ['{"error":"Not today."}', "Bern: mild"]
    assert (state.turns, state.tool_calls, state.usage.total_tokens, state.text) == (3, 1, 330, "This is all.")
    assert state.ended is not None
    assert state.ended.kind == "budget"


async def test_invalid_output_is_not_repaired_twice(ledger: Ledger) -> None:
    await store(ledger, "run_invalid", 3)
    outcome = await make_agent(Answers("7"), tools=[], output_type=int).resume("run_invalid", ledger=ledger)
    assert outcome.error is not None
    assert (outcome.kind, outcome.error.code, outcome.error.raw) == ("failed", "invalid_output", '"six"')


async def test_usage_of_a_subagent_is_read(ledger: Ledger) -> None:
    await store(ledger, "run_spent")
    outcome = await make_agent(Answers("")).resume("run_spent", ledger=ledger)
    assert (outcome.kind, outcome.usage.total_tokens) == ("final", 330)


@pytest.mark.parametrize("is_packed", [False, True])
async def test_subagent_that_waits_for_approval_is_resumed(ledger: Ledger, is_packed: bool) -> None:
    expert = make_agent(Answers("Sent inside."), tools=[send], name="expert")
    answers = Answers("It is sent.")
    lead = make_agent(answers, tools=[expert.as_tool("expert", "Sends.")])
    approvals = {"call_e/call_s": True}
    if is_packed:
        outcome = await lead.resume(RECORDED["state"].encode(), approvals=approvals)
    else:
        await store(ledger, "run_nested")
        await store(ledger, "run_nested:1:0")
        outcome = await lead.resume("run_nested", approvals=approvals, ledger=ledger)
    assert (outcome.kind, outcome.text, outputs_of(answers.requests[0])) == ("final", "It is sent.", ["Sent inside."])


def test_packed_state_keeps_its_encoding() -> None:
    packed = RECORDED["state"].encode()
    assert json.loads(unpack(packed).pack()) == json.loads(packed)
