"""Estimated usage in runs, if the server reports none."""

import asyncio
from typing import Any

import pytest

from antiphon import Limits, Prices, read_run, tool
from antiphon.agent.loop import ESTIMATED
from antiphon.agent.outcome import Notice, RunEnded, RunEvent, TextDelta, TurnFinished
from antiphon.ledger import Ledger
from antiphon.protocol.response import Usage
from antiphon.upstream.usage import estimate_payload_usage
from support.scripted_model import DROP, HOLD, ScriptedModel, UpstreamModel, call, open_scripted, usage

TEXT = "seven b" * 50  # 350 bytes, which are 100 tokens
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": TEXT}]}
IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{TEXT * 100}"}


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


def make_usage(read: int, output: int) -> Usage:
    return Usage(read, output, read + output, estimated=True)


@pytest.mark.parametrize(
    ("request_", "read", "output", "expected"),
    [
        ({}, [], [], make_usage(4, 0)),
        ({"instructions": TEXT}, [{"role": "user", "content": TEXT}], [ANSWER], make_usage(4 + 100 + 4 + 100 + 2, 106)),
        ({"tools": [TEXT]}, [], [], make_usage(4 + 102, 0)),
        ({}, [{"role": "user", "content": [IMAGE]}], [], make_usage(4 + 4 + 1600 + 2, 0)),
        ({}, [{"type": "reasoning", "encrypted_content": TEXT}], [], make_usage(8, 0)),
    ],
    ids=["nothing", "texts", "tools", "image", "encrypted"],
)
def test_usage_is_estimated_from_request_and_output(
    request_: dict[str, Any], read: list[Any], output: list[Any], expected: Usage
) -> None:
    estimate = estimate_payload_usage(request_, read, output)
    assert estimate.estimated
    # Roles and other fields are text too.
    assert estimate.input_tokens == pytest.approx(expected.input_tokens, abs=3)
    assert estimate.output_tokens == pytest.approx(expected.output_tokens, abs=3)
    assert estimate.total_tokens == estimate.input_tokens + estimate.output_tokens


# In runs


def set_endless_calls(scripted: ScriptedModel, counted: Any) -> None:
    scripted.set_answers(*[[call("look_up", {"city": f"{turn}"}), {"usage": counted}] for turn in range(30)])


async def watch(events: Any) -> tuple[list[RunEvent], Any]:
    events = [event async for event in events]
    assert isinstance(events[-1], RunEnded)
    return events, events[-1].outcome


def notices_of(events: list[RunEvent]) -> list[str]:
    return [event.message for event in events if isinstance(event, Notice)]


@pytest.mark.parametrize(
    "limits", [Limits(tokens=300, turns=None), Limits(cost=0.0003, turns=None)], ids=["tokens", "cost"]
)
@pytest.mark.parametrize("counted", [None, usage(0, 0)["usage"]], ids=["null", "zeros"])
async def test_limits_apply_to_estimated_usage_with_one_notice(limits: Limits, counted: Any) -> None:
    async with open_scripted("upstream") as scripted:
        assert isinstance(scripted, UpstreamModel)
        set_endless_calls(scripted, counted)
        agent = scripted.agent(tools=[look_up], limits=limits, prices=Prices(input=1.0, output=1.0))
        events, outcome = await watch(agent.run_stream("Go."))
    assert (outcome.kind, outcome.usage.estimated) == ("budget", True)
    assert outcome.turns < 6
    assert notices_of(events) == [ESTIMATED, "budget: the model is asked for its final answer"]
    turns = [event.usage for event in events if isinstance(event, TurnFinished)]
    assert sum(each.total_tokens for each in turns) == outcome.usage.total_tokens
    # The input grows with every turn.
    assert [each.input_tokens for each in turns] == sorted({each.input_tokens for each in turns})


async def test_estimate_includes_history_stored_on_the_server() -> None:
    read: list[list[int]] = []
    for state in ("client", "server"):
        async with open_scripted("upstream") as scripted:
            set_endless_calls(scripted, None)
            events, _ = await watch(
                scripted.agent(tools=[look_up], limits=Limits(turns=4), conversation_state=state).run_stream("Go.")
            )
            read.append([event.usage.input_tokens for event in events if isinstance(event, TurnFinished)])
    assert read[0] == read[1]


async def test_estimate_without_limit_has_no_notice(scripted: ScriptedModel) -> None:
    scripted.set_answers([{"text": "Mild."}, usage(0, 0)])
    events, outcome = await watch(scripted.agent().run_stream("Go."))
    assert (notices_of(events), outcome.usage.estimated) == ([], True)


# Failed attempts


def play_failures(scripted: ScriptedModel, *last: Any) -> None:
    failed = [usage(1000, 10), {"failure": {"code": "server_error", "message": "Boom."}}]
    scripted.set_answers(failed, failed, *last)


async def test_usage_of_failed_attempts_counts() -> None:
    async with open_scripted("upstream") as scripted:
        play_failures(scripted, [{"text": "Mild."}, usage(5, 1)])
        outcome = await scripted.agent(prices=Prices(input=1000.0, output=1000.0)).run("Go.")
    assert (outcome.kind, outcome.turns, outcome.usage) == ("final", 1, Usage(2005, 21, 2026))
    assert outcome.cost == pytest.approx(2.026)


async def test_attempt_that_used_up_the_budget_is_not_repeated() -> None:
    async with open_scripted("upstream") as scripted:
        play_failures(scripted, "Mild.")
        outcome = await scripted.agent(limits=Limits(tokens=500, wrap_up=False)).run("Go.")
        assert (outcome.kind, outcome.turns, outcome.usage.total_tokens) == ("budget", 0, 1010)
        assert len(scripted.sent) == 1
        # A higher limit lets it continue.
        assert outcome.state is not None
        assert (await scripted.agent(limits=Limits(tokens=5000)).resume(outcome.state)).text == "Mild."


async def test_used_up_budget_after_failed_attempts_has_a_last_turn() -> None:
    async with open_scripted("upstream") as scripted:
        failed = [usage(1000, 10), {"failure": {"code": "server_error", "message": "Boom."}}]
        scripted.set_answers(failed, [{"text": "No idea."}, usage(5, 1)])
        outcome = await scripted.agent(tools=[look_up], limits=Limits(tokens=500)).run("Go.")
    assert (outcome.kind, outcome.text, outcome.usage.total_tokens) == ("budget", "No idea.", 1016)
    assert scripted.sent[1]["tool_choice"] == "none"


async def test_first_turn_is_retried_with_a_minimal_budget() -> None:
    async with open_scripted("upstream") as scripted:
        scripted.set_answers([{"raise": {"message": "Boom.", "status": 400, "type": "server_error"}}])
        agent = scripted.agent(limits=Limits(cost=0.0), prices=Prices(input=1.0, output=1.0))
        assert (await agent.run("Go.")).kind == "failed"


async def test_usage_of_a_broken_stream_is_estimated_from_its_deltas(scripted: ScriptedModel) -> None:
    scripted.set_answers([{"text": TEXT}, DROP], [{"text": "Mild."}, usage(5, 1)])
    outcome = await scripted.agent().run("Go.")
    assert outcome.usage.estimated
    assert outcome.usage.output_tokens == pytest.approx(105, abs=3)


@pytest.mark.parametrize("is_closed", [False, True])
async def test_usage_of_a_cancelled_turn_is_estimated_from_its_deltas(
    scripted: ScriptedModel, ledger: Ledger, is_closed: bool
) -> None:
    scripted.set_answers([{"text": TEXT}, HOLD], [{"text": "Mild."}, usage(5, 1)])
    agent, cancel = scripted.agent(), asyncio.Event()
    async with agent.run_stream("Go.", ledger=ledger, run_id="run_1", cancel=cancel) as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                cancel.set()
                if is_closed:
                    break
    cancelled = (await read_run(ledger, "run_1")).usage
    assert cancelled.estimated
    assert (await agent.resume("run_1", ledger=ledger)).usage.total_tokens == cancelled.total_tokens + 6


async def test_rejected_request_has_no_usage() -> None:
    async with open_scripted("upstream") as scripted:
        scripted.set_answers([{"raise": {"message": "Busy.", "status": 503}}], [{"text": "A"}, usage(5, 1)])
        assert (await scripted.agent().run("Go.")).usage == Usage(5, 1, 6)
