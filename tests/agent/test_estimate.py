"""What a turn took, where the server does not say."""

from typing import Any

import pytest

from antiphon import Limits, Prices, tool
from antiphon.agent.loop import ESTIMATED
from antiphon.agent.outcome import Notice, RunEnded, RunEvent, TurnFinished
from antiphon.protocol.response import Usage
from antiphon.upstream.usage import estimate_payload_usage
from support.agent_stage import DROP, Stage, TheirStage, call, open_stage, usage

TEXT = "seven b" * 50  # 350 bytes, which are 100 tokens
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": TEXT}]}
PICTURE = {"type": "input_image", "image_url": f"data:image/png;base64,{TEXT * 100}"}


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


def guess(read: int, said: int) -> Usage:
    return Usage(read, said, read + said, estimated=True)


@pytest.mark.parametrize(
    ("request_", "read", "said", "expected"),
    [
        ({}, [], [], guess(4, 0)),
        ({"instructions": TEXT}, [{"role": "user", "content": TEXT}], [SAID], guess(4 + 100 + 4 + 100 + 2, 106)),
        ({"tools": [TEXT]}, [], [], guess(4 + 102, 0)),
        ({}, [{"role": "user", "content": [PICTURE]}], [], guess(4 + 4 + 1600 + 2, 0)),
        ({}, [{"type": "reasoning", "encrypted_content": TEXT}], [], guess(8, 0)),
    ],
    ids=["nothing", "texts", "tools", "a picture", "what is sealed"],
)
def test_a_guess_is_made_from_what_is_read_and_said(
    request_: dict[str, Any], read: list[Any], said: list[Any], expected: Usage
) -> None:
    guessed = estimate_payload_usage(request_, read, said)
    assert guessed.estimated
    # Roles and the like are texts as well.
    assert guessed.input_tokens == pytest.approx(expected.input_tokens, abs=3)
    assert guessed.output_tokens == pytest.approx(expected.output_tokens, abs=3)
    assert guessed.total_tokens == guessed.input_tokens + guessed.output_tokens


# In runs


def play_endless(stage: Stage, counted: Any) -> None:
    stage.play(*[[call("look_up", {"city": f"{turn}"}), {"usage": counted}] for turn in range(30)])


async def watch(events: Any) -> tuple[list[RunEvent], Any]:
    told = [event async for event in events]
    assert isinstance(told[-1], RunEnded)
    return told, told[-1].outcome


def notices_of(told: list[RunEvent]) -> list[str]:
    return [event.message for event in told if isinstance(event, Notice)]


@pytest.mark.parametrize(
    "limits", [Limits(tokens=300, turns=None), Limits(cost=0.0003, turns=None)], ids=["tokens", "cost"]
)
@pytest.mark.parametrize("counted", [None, usage(0, 0)["usage"]], ids=["null", "zeros"])
async def test_limits_hold_where_the_server_does_not_count_and_that_is_told_once(limits: Limits, counted: Any) -> None:
    async with open_stage("upstream") as stage:
        assert isinstance(stage, TheirStage)
        play_endless(stage, counted)
        agent = stage.agent(tools=[look_up], limits=limits, prices=Prices(input=1.0, output=1.0))
        told, outcome = await watch(agent.run_stream("Go."))
    assert (outcome.kind, outcome.usage.estimated) == ("budget", True)
    assert outcome.turns < 6
    assert notices_of(told) == [ESTIMATED, "budget: the model is asked for its final answer"]
    turns = [event.usage for event in told if isinstance(event, TurnFinished)]
    assert sum(each.total_tokens for each in turns) == outcome.usage.total_tokens
    # It reads more in every turn.
    assert [each.input_tokens for each in turns] == sorted({each.input_tokens for each in turns})


async def test_what_the_server_keeps_is_read_again_in_every_turn() -> None:
    read: list[list[int]] = []
    for state in ("client", "server"):
        async with open_stage("upstream") as stage:
            play_endless(stage, None)
            told, _ = await watch(stage.agent(tools=[look_up], limits=Limits(turns=4), state=state).run_stream("Go."))
            read.append([event.usage.input_tokens for event in told if isinstance(event, TurnFinished)])
    assert read[0] == read[1]


async def test_without_a_limit_that_depends_on_it_nothing_is_told_of_the_guess(stage: Stage) -> None:
    stage.play([{"text": "Mild."}, usage(0, 0)])
    told, outcome = await watch(stage.agent().run_stream("Go."))
    assert (notices_of(told), outcome.usage.estimated) == ([], True)


# What came to nothing


def play_failures(stage: Stage, *last: Any) -> None:
    failed = [usage(1000, 10), {"failure": {"code": "server_error", "message": "Boom."}}]
    stage.play(failed, failed, *last)


async def test_what_failed_attempts_took_counts() -> None:
    async with open_stage("upstream") as stage:
        play_failures(stage, [{"text": "Mild."}, usage(5, 1)])
        outcome = await stage.agent(prices=Prices(input=1000.0, output=1000.0)).run("Go.")
    assert (outcome.kind, outcome.turns, outcome.usage) == ("final", 1, Usage(2005, 21, 2026))
    assert outcome.cost == pytest.approx(2.026)


async def test_an_attempt_that_has_used_up_everything_is_not_repeated() -> None:
    async with open_stage("upstream") as stage:
        play_failures(stage, "Mild.")
        outcome = await stage.agent(limits=Limits(tokens=500, wrap_up=False)).run("Go.")
        assert (outcome.kind, outcome.turns, outcome.usage.total_tokens) == ("budget", 0, 1010)
        assert len(stage.sent) == 1
        # With more to spend it goes on.
        assert outcome.state is not None
        assert (await stage.agent(limits=Limits(tokens=5000)).resume(outcome.state)).text == "Mild."


async def test_after_attempts_that_have_used_up_everything_there_is_a_last_word() -> None:
    async with open_stage("upstream") as stage:
        failed = [usage(1000, 10), {"failure": {"code": "server_error", "message": "Boom."}}]
        stage.play(failed, [{"text": "No idea."}, usage(5, 1)])
        outcome = await stage.agent(tools=[look_up], limits=Limits(tokens=500)).run("Go.")
    assert (outcome.kind, outcome.text, outcome.usage.total_tokens) == ("budget", "No idea.", 1016)
    assert stage.sent[1]["tool_choice"] == "none"


async def test_a_limit_of_nothing_still_lets_the_first_turn_be_tried_again() -> None:
    async with open_stage("upstream") as stage:
        stage.play([{"raise": {"message": "Boom.", "status": 400, "type": "server_error"}}])
        agent = stage.agent(limits=Limits(cost=0.0), prices=Prices(input=1.0, output=1.0))
        assert (await agent.run("Go.")).kind == "failed"


async def test_what_broke_off_is_guessed_as_far_as_it_was_heard(stage: Stage) -> None:
    stage.play([{"text": TEXT}, DROP], [{"text": "Mild."}, usage(5, 1)])
    outcome = await stage.agent().run("Go.")
    assert outcome.usage.estimated
    assert outcome.usage.output_tokens == pytest.approx(105, abs=3)


async def test_what_was_refused_took_nothing() -> None:
    async with open_stage("upstream") as stage:
        stage.play([{"raise": {"message": "Busy.", "status": 503}}], [{"text": "A"}, usage(5, 1)])
        assert (await stage.agent().run("Go.")).usage == Usage(5, 1, 6)
