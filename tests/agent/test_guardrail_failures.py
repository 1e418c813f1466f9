"""Guardrails that fail: nothing passes unchecked, and the run can be resumed."""

import asyncio
import contextlib
import logging
from typing import Any

import pytest

from antiphon import ConfigError, RunEnded, ToolContext, ToolFinished, ToolResult, read_run, tool
from antiphon.agent.guardrails import Block, InputCheck, OutputCheck, Replace, ResultCheck
from antiphon.agent.outcome import RunError
from antiphon.ledger import Ledger
from antiphon.store.ledger import MemoryLedger
from antiphon.tools.base import ModelRetry
from support.scripted_model import ScriptedModel, call, look_up

LOOK = call("look_up", {"city": "Bern"}, "call_l")


async def test_failed_guardrail_stops_the_run_before_the_effect(in_process: ScriptedModel, ledger: Ledger) -> None:
    broken = [True]

    def check(_: Any) -> Any:
        if broken[0]:
            raise ZeroDivisionError("oops")

    for stage in ("input", "output", "call"):
        broken[0] = True
        in_process.set_answers([LOOK], "Mild.")
        agent = in_process.agent(tools=[look_up], **{f"{stage}_guardrails": [check]})
        outcome = await agent.run("Go.", ledger=ledger, run_id=f"run_{stage}")
        assert outcome.error is not None
        assert (outcome.kind, outcome.error.code) == ("failed", "guardrail_failed")
        assert outcome.error.message == "The guardrail 'check' failed: ZeroDivisionError: oops."
        broken[0] = False
        assert (await agent.resume(f"run_{stage}", ledger=ledger)).text == "Mild."


async def test_message_of_a_failed_guardrail_ends_with_one_full_stop(in_process: ScriptedModel) -> None:
    def check(_: InputCheck) -> None:
        raise ValueError("The text is too long.")

    outcome = await in_process.agent(input_guardrails=[check]).run("Go.")
    assert outcome.error is not None
    assert outcome.error.message == "The guardrail 'check' failed: ValueError: The text is too long."


async def test_failed_result_guardrail_leaves_the_call_open(in_process: ScriptedModel, ledger: Ledger) -> None:
    keys: list[str] = []
    broken = [True]

    @tool(on_interrupt="retry")
    async def pay(context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        return "paid"

    def check(_: ResultCheck) -> str | None:
        return "not an action" if broken[0] else None

    in_process.set_answers([call("pay", {}, "call_p")], "Done.")
    agent = in_process.agent(tools=[pay], result_guardrails=[check])
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert outcome.error is not None
    reason = "it returned str, not None, Replace or Block"
    assert (outcome.kind, reason in outcome.error.message) == ("failed", True)
    broken[0] = False
    assert ((await agent.resume("run_1", ledger=ledger)).kind, keys) == ("final", ["run_1:1:0"] * 2)


async def test_failed_result_guardrail_hides_no_finished_call(in_process: ScriptedModel) -> None:
    """A call that finishes while the run ends has its event and its output."""
    started = asyncio.Event()

    @tool
    async def save() -> str:
        """Save."""
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "saved"

    async def check(given: ResultCheck) -> None:
        if given.call.name == "look_up":
            await started.wait()
            raise ZeroDivisionError("oops")

    in_process.set_answers([LOOK, call("save", {}, "call_s")])
    agent = in_process.agent(tools=[look_up, save], result_guardrails=[check])
    events = [event async for event in agent.run_stream("Go.")]
    finished = [(event.call.name, event.output) for event in events if isinstance(event, ToolFinished)]
    assert finished == [("save", "saved")]
    assert isinstance(events[-1], RunEnded)
    assert "saved" in [item.get("output") for item in events[-1].outcome.history]


def test_guardrail_that_is_not_callable_is_rejected(in_process: ScriptedModel) -> None:
    with pytest.raises(ConfigError, match="'no' is not a guardrail"):
        in_process.agent(call_guardrails=["no"])


def test_guardrails_must_be_a_list(in_process: ScriptedModel) -> None:
    def check(_: InputCheck) -> None: ...

    with pytest.raises(ConfigError, match="input_guardrails: expected a list of functions, got function"):
        in_process.agent(input_guardrails=check)
    # A check of its functions would use it up, and then no guardrail would run.
    with pytest.raises(ConfigError, match="guardrails: expected a list of functions, got generator"):
        in_process.agent(input_guardrails=(each for each in [check]))


@pytest.mark.parametrize("reason", ["", None])
@pytest.mark.parametrize("stage", ["input", "output", "call", "result"])
async def test_block_without_a_reason_stops_the_run(in_process: ScriptedModel, stage: str, reason: Any) -> None:
    def check(_: Any) -> Block:
        return Block(reason)

    ledger = MemoryLedger()
    in_process.set_answers([LOOK] if stage in ("call", "result") else "Mild.")
    agent = in_process.agent(tools=[look_up], **{f"{stage}_guardrails": [check]})
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    error = RunError(f"{stage}_guardrail", "The guardrail 'check' has stopped the run.")
    assert (outcome.kind, outcome.error) == ("blocked", error)
    assert (await read_run(ledger, "run_1")).status == "blocked"


@pytest.mark.parametrize(
    ("stage", "value"),
    [
        ("input", "caf\udce9"),
        ("output", "caf\udce9"),
        ("call", '{"city": "caf\udce9"}'),
        ("result", "caf\udce9"),
    ],
)
async def test_lone_surrogates_in_a_replaced_value_are_replaced(
    in_process: ScriptedModel, stage: str, value: str
) -> None:
    ledger = MemoryLedger()
    in_process.set_answers(*[[LOOK], "Mild."] if stage in ("call", "result") else ["Mild."])
    agent = in_process.agent(tools=[look_up], **{f"{stage}_guardrails": [lambda _: Replace(value)]})
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert (outcome.kind, "caf?" in f"{outcome.history} {outcome.text}") == ("final", True)
    assert (await read_run(ledger, "run_1")).history == outcome.history


@pytest.mark.parametrize("stage", ["input", "output", "call", "result"])
async def test_lone_surrogates_in_an_exception_are_replaced(
    in_process: ScriptedModel, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    # pytest-xdist cannot send a report whose log has surrogates.
    caplog.set_level(logging.CRITICAL + 1, "antiphon")

    def check(_: object) -> None:
        raise ValueError("caf\udce9")

    ledger = MemoryLedger()
    in_process.set_answers(*[[LOOK], "Mild."] if stage in ("call", "result") else ["Mild."])
    agent = in_process.agent(tools=[look_up], **{f"{stage}_guardrails": [check]})
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert outcome.error == RunError("guardrail_failed", "The guardrail 'check' failed: ValueError: caf?.")
    assert (await read_run(ledger, "run_1")).error == outcome.error


async def test_lone_surrogates_in_a_message_to_the_model_are_replaced(in_process: ScriptedModel) -> None:
    def check(_: OutputCheck) -> None:
        raise ModelRetry("caf\udce9")

    in_process.set_answers("Mild.", "Wet.")
    outcome = await in_process.agent(output_guardrails=[check]).run("Go.")
    assert outcome.error is not None
    assert outcome.error.message == "The answer was not accepted: caf?"
    assert in_process.sent[1]["input"][-1]["content"] == "caf?"


async def test_replaced_result_with_invalid_fields_is_a_failure(in_process: ScriptedModel) -> None:
    def check(_: ResultCheck) -> Replace:
        return Replace(ToolResult(5))  # type: ignore[arg-type]

    ledger = MemoryLedger()
    in_process.set_answers([LOOK])
    agent = in_process.agent(tools=[look_up], result_guardrails=[check])
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert (outcome.kind, outcome.error and outcome.error.code) == ("failed", "guardrail_failed")
    assert (await read_run(ledger, "run_1")).status == "failed"


async def test_input_cannot_be_sent_back(in_process: ScriptedModel) -> None:
    def send_back(_: InputCheck) -> None:
        raise ModelRetry("again")

    outcome = await in_process.agent(input_guardrails=[send_back]).run("Go.")
    assert outcome.error is not None
    assert "an input cannot be sent back to the model" in outcome.error.message
