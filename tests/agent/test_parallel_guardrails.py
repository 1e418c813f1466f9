"""Input guardrails that run beside the first model call."""

import asyncio
from typing import Any

import pytest

from antiphon import (
    ArgumentsDelta,
    Block,
    ConfigError,
    InputCheck,
    Limits,
    ParallelGuardrail,
    Replace,
    RunError,
    TextDelta,
    tool,
)
from antiphon.ledger import Ledger
from support.scripted_model import HOLD, ScriptedModel, call, usage

LOOK = call("look", {}, "call_l")
REFUSED = RunError("input_guardrail", "no weather talk")


class Gate:
    """A guardrail that waits for `release`, with an action. `started` is set when it runs."""

    def __init__(self, action: Any = None) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.is_cancelled = False
        self._action = action

    async def __call__(self, check: InputCheck) -> Any:
        assert check.text == "The weather?"
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        if isinstance(self._action, Exception):
            raise self._action
        return self._action


async def test_refused_input_cancels_the_model_call(in_process: ScriptedModel, ledger: Ledger) -> None:
    gate = Gate(Block("no weather talk"))
    in_process.set_answers([{"text": "It is"}, HOLD, {"text": " mild."}])
    agent = in_process.agent(input_guardrails=[ParallelGuardrail(gate)])
    texts: list[str] = []
    stream = agent.run_stream("The weather?", ledger=ledger, run_id="run_1")
    async for event in stream:
        if isinstance(event, TextDelta):
            texts.append(event.text)
            # The model is still writing when the guardrail refuses the input.
            gate.release.set()
    outcome = stream.outcome
    assert (outcome.kind, outcome.error, outcome.text, outcome.turns) == ("blocked", REFUSED, "", 0)
    assert outcome.history == ({"role": "user", "content": "The weather?"},)
    again = await agent.resume("run_1", ledger=ledger)
    assert (again.kind, again.error, len(in_process.sent)) == ("blocked", REFUSED, 1)


@pytest.mark.parametrize("limits", [Limits(), Limits(seconds=60)], ids=["without a deadline", "with a deadline"])
async def test_tools_and_the_answer_wait_for_the_guardrail(in_process: ScriptedModel, limits: Limits) -> None:
    made: list[str] = []

    @tool
    def look() -> str:
        """Look."""
        made.append("look")
        return "done"

    for action, kind, calls, total in ((None, "final", ["look"], 40), (Block("no weather talk"), "blocked", [], 20)):
        made.clear()
        gate = Gate(action)
        in_process.set_answers([LOOK, usage(10, 10)], [{"text": "Mild."}, usage(10, 10)])
        agent = in_process.agent(tools=[look], input_guardrails=[ParallelGuardrail(gate)], limits=limits)
        stream = agent.run_stream("The weather?")
        async for event in stream:
            if isinstance(event, ArgumentsDelta):
                # The model has written its call. The guardrail ends when the run waits for it.
                asyncio.get_running_loop().call_later(0.05, made.append, "checked")
                asyncio.get_running_loop().call_later(0.05, gate.release.set)
        outcome = stream.outcome
        assert (outcome.kind, made, outcome.usage.total_tokens) == (kind, ["checked", *calls], total)


async def test_several_guardrails_run_at_once_and_after_the_others(in_process: ScriptedModel) -> None:
    slow, fast = Gate(), Gate(Block("no weather talk"))
    in_process.set_answers([HOLD, {"text": "Mild."}])
    order: list[bool] = []
    first: Any = lambda _: order.append(slow.started.is_set())  # noqa: E731
    agent = in_process.agent(input_guardrails=[ParallelGuardrail(slow), ParallelGuardrail(fast), first])
    run = asyncio.create_task(agent.run("The weather?"))
    await slow.started.wait()
    await fast.started.wait()
    fast.release.set()
    outcome = await run
    assert (outcome.kind, outcome.error, order, slow.is_cancelled) == ("blocked", REFUSED, [False], True)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Replace("Hi."), "A parallel guardrail cannot replace the input: the model has it already."),
        (ValueError("broken"), "The guardrail 'Gate' failed: ValueError: broken."),
    ],
)
async def test_failure_ends_the_run_which_can_be_resumed(
    in_process: ScriptedModel, ledger: Ledger, action: Any, reason: str
) -> None:
    gate = Gate(action)
    gate.release.set()
    in_process.set_answers("Mild.")
    broken = in_process.agent(input_guardrails=[ParallelGuardrail(gate)])
    outcome = await broken.run("The weather?", ledger=ledger, run_id="run_1")
    assert (outcome.kind, outcome.error) == ("failed", RunError("guardrail_failed", reason))
    repaired = Gate()
    repaired.release.set()
    agent = in_process.agent(input_guardrails=[ParallelGuardrail(repaired)])
    outcome = await agent.resume("run_1", ledger=ledger)
    assert (outcome.kind, outcome.text, repaired.started.is_set()) == ("final", "Mild.", True)


async def test_end_of_the_run_cancels_the_guardrail(in_process: ScriptedModel) -> None:
    gate, cancel = Gate(), asyncio.Event()
    in_process.set_answers("Mild.")
    run = asyncio.create_task(
        in_process.agent(input_guardrails=[ParallelGuardrail(gate)]).run("The weather?", cancel=cancel)
    )
    await gate.started.wait()
    cancel.set()
    assert ((await run).kind, gate.is_cancelled) == ("cancelled", True)


async def test_error_of_the_model_cancels_the_guardrail(in_process: ScriptedModel) -> None:
    gate = Gate()
    in_process.set_answers([{"raise": {"status": 400, "message": "No.", "type": "invalid_request_error"}}])
    outcome = await in_process.agent(input_guardrails=[ParallelGuardrail(gate)]).run("The weather?")
    assert (outcome.kind, gate.is_cancelled) == ("failed", True)


def test_guardrail_must_be_a_function() -> None:
    with pytest.raises(ConfigError):
        ParallelGuardrail("no function")  # type: ignore[arg-type]
