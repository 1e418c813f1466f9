"""Guardrails on input, output and tool calls: they stop the run, replace a value, or send it back to the model."""

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from antiphon import Limits, MemorySession, ToolContext, tool
from antiphon.agent.guardrails import Block, CallCheck, InputCheck, OutputCheck, Replace, ResultCheck
from antiphon.agent.history import join_text
from antiphon.agent.outcome import RunError
from antiphon.agent.tool_calls import WITHHELD
from antiphon.ledger import Ledger
from antiphon.store.ledger import MemoryLedger
from antiphon.tools.base import ModelRetry
from support.scripted_model import ScriptedModel, call, look_up, outputs_of

LOOK = call("look_up", {"city": "Bern"}, "call_l")


def make_async(guardrail: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def check(checked: Any) -> Any:
        await asyncio.sleep(0)
        return guardrail(checked)

    return check


@pytest.fixture(params=["sync", "async"])
def adapt(request: pytest.FixtureRequest) -> Callable[[Callable[[Any], Any]], Any]:
    """Return a function that makes a guardrail synchronous or asynchronous."""
    return make_async if request.param == "async" else lambda guardrail: guardrail


def error_of(output: Any) -> str:
    return str(json.loads(output)["error"])


# Input


async def test_blocked_input_ends_the_run_before_the_first_turn(
    in_process: ScriptedModel, ledger: Ledger, adapt: Any
) -> None:
    checks: list[InputCheck] = []

    def refuse(check: InputCheck) -> Block | None:
        checks.append(check)
        return Block("no weather talk") if "weather" in check.text else None

    agent = in_process.agent(input_guardrails=[adapt(refuse)])
    in_process.set_answers("Hello.")
    outcome = await agent.run("The weather?", ledger=ledger, run_id="run_1")
    assert (outcome.kind, outcome.error, outcome.text, outcome.state) == (
        "blocked",
        RunError("input_guardrail", "no weather talk"),
        "",
        None,
    )
    assert in_process.sent == []
    assert (checks[0].agent, checks[0].run_id, checks[0].items) == (
        "agent",
        "run_1",
        [{"role": "user", "content": "The weather?"}],
    )
    # A blocked run is finished.
    again = await agent.resume("run_1", ledger=ledger)
    assert (again.kind, again.error, in_process.sent) == ("blocked", outcome.error, [])
    assert (await agent.run("Hi!")).kind == "final"


async def test_guardrail_replaces_the_input(in_process: ScriptedModel, ledger: Ledger, adapt: Any) -> None:
    def redact(check: InputCheck) -> Replace:
        return Replace(check.text.replace("4711", "****"))

    def require_redacted(check: InputCheck) -> None:
        assert "4711" not in check.text

    in_process.set_answers("Hello.")
    agent = in_process.agent(input_guardrails=[adapt(redact), adapt(require_redacted)])
    outcome = await agent.run("My pin is 4711.", ledger=ledger, run_id="run_1")
    replaced = {"role": "user", "content": "My pin is ****."}
    assert (in_process.sent[0]["input"], outcome.history[0]) == ([replaced], replaced)
    assert (await agent.resume("run_1", ledger=ledger)).history == outcome.history


async def test_replaced_input_leaves_the_history(in_process: ScriptedModel) -> None:
    in_process.set_answers("Hello.")
    first = await in_process.agent().run("One.")
    text = in_process.agent(input_guardrails=[lambda _: Replace("Three.")])
    outcome = await text.run("Two.", history=first.history)
    assert [join_text([item]) for item in outcome.history] == ["One.", "Hello.", "Three.", "Hello."]
    whole = in_process.agent(input_guardrails=[lambda check: Replace(check.items[-1:])])
    outcome = await whole.run("Two.", history=first.history)
    assert [join_text([item]) for item in outcome.history] == ["Two.", "Hello."]
    broken = await in_process.agent(input_guardrails=[lambda _: Replace(7)]).run("Two.")
    assert broken.error is not None
    assert "an input is replaced by a string or a list of items" in broken.error.message


async def test_text_of_an_input_is_that_of_the_new_messages(in_process: ScriptedModel) -> None:
    texts: list[str] = []
    in_process.set_answers("Hello.")
    agent = in_process.agent(input_guardrails=[lambda check: texts.append(check.text)])
    first = await agent.run("One.")
    await agent.run("Two.", history=first.history)
    assert texts == ["One.", "Two."]


async def test_input_guardrails_run_again_before_the_first_turn(
    in_process: ScriptedModel,
) -> None:
    crashed: list[MemoryLedger] = []

    class Watched(MemoryLedger):
        async def append(self, *arguments: Any, **options: Any) -> None:
            await super().append(*arguments, **options)
            crashed.append(copy.deepcopy(self))

    in_process.set_answers("Hello.")
    await in_process.agent().run("Hi!", ledger=Watched(), run_id="run_1")
    guarded = in_process.agent(input_guardrails=[lambda _: Block("no")])
    assert (await guarded.resume("run_1", ledger=crashed[0])).kind == "blocked"
    assert (await guarded.resume("run_1", ledger=crashed[1])).kind == "final"


# Output


async def test_blocked_output_is_not_in_the_outcome(in_process: ScriptedModel, ledger: Ledger, adapt: Any) -> None:
    def refuse(check: OutputCheck) -> Block | None:
        return Block("no secrets") if "secret" in check.output else None

    in_process.set_answers("The secret is 42.")
    agent = in_process.agent(output_guardrails=[adapt(refuse)])
    outcome = await agent.run("Tell me.", ledger=ledger, run_id="run_1")
    expected = ("blocked", None, "", RunError("output_guardrail", "no secrets"))
    assert (outcome.kind, outcome.output, outcome.text, outcome.error) == expected
    assert outcome.history == ({"role": "user", "content": "Tell me."},)
    again = await agent.resume("run_1", ledger=ledger)
    assert (again.kind, again.output, again.text, again.error) == expected
    assert again.history == outcome.history


async def test_guardrail_replaces_the_output(in_process: ScriptedModel, ledger: Ledger, adapt: Any) -> None:
    calls: list[str] = []

    def redact(check: OutputCheck) -> Replace:
        calls.append(check.text)
        return Replace(check.output.replace("42", "**"))

    in_process.set_answers([{"reasoning": "Hm."}, {"text": "It is 42."}])
    agent = in_process.agent(output_guardrails=[adapt(redact)])
    outcome = await agent.run("Tell me.", ledger=ledger, run_id="run_1")
    assert (outcome.kind, outcome.output, outcome.text) == ("final", "It is **.", "It is **.")
    assert "It is 42." not in json.dumps(outcome.history)
    again = await agent.resume("run_1", ledger=ledger)
    assert (again.output, again.text, again.history) == (outcome.output, outcome.text, outcome.history)
    assert calls == ["It is 42."]


async def test_blocked_output_is_not_in_the_session(in_process: ScriptedModel) -> None:
    session = MemorySession()
    in_process.set_answers("The secret is 42.", "Hello.")
    await in_process.agent(output_guardrails=[lambda _: Block("no")]).run("Tell me.", session=session)
    await in_process.agent().run("Hi!", session=session)
    assert [join_text([item]) for item in await session.load()] == ["Tell me.", "Hi!", "Hello."]


@pytest.mark.parametrize("way", ["failure", "deadline"])
async def test_unchecked_output_is_not_in_the_outcome(in_process: ScriptedModel, ledger: Ledger, way: str) -> None:
    broken = [True]

    async def check(_: OutputCheck) -> None:
        if broken[0] and way == "failure":
            raise ValueError
        if broken[0]:
            await asyncio.Event().wait()

    in_process.set_answers("The secret is 42.")
    limits = Limits(seconds=0.1) if way == "deadline" else Limits()
    agent = in_process.agent(output_guardrails=[check], limits=limits)
    outcome = await agent.run("Tell me.", ledger=ledger, run_id="run_1")
    expected = ("failed" if way == "failure" else "deadline", None, "", ({"role": "user", "content": "Tell me."},))
    assert (outcome.kind, outcome.output, outcome.text, outcome.history) == expected
    broken[0] = False
    resumed = await agent.resume("run_1", ledger=ledger, limits=Limits())
    assert (resumed.kind, resumed.text) == ("final", "The secret is 42.")


async def test_cut_off_output_is_replaced_too(in_process: ScriptedModel) -> None:
    in_process.set_answers([{"text": "The secret is"}, {"finish": "length"}])
    outcome = await in_process.agent(output_guardrails=[lambda _: Replace("Hidden.")]).run("Tell me.")
    assert outcome.error is not None
    assert (outcome.kind, outcome.output, outcome.text, outcome.error.raw) == ("incomplete", "Hidden.", "Hidden.", None)


async def test_guardrail_replaces_a_typed_output(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers('{"value": [1, 2]}')
    agent = in_process.agent(output_type=list[int], output_guardrails=[lambda check: Replace([*check.output, 3])])
    outcome = await agent.run("Count.", ledger=ledger, run_id="run_1")
    assert (outcome.output, outcome.text) == ([1, 2, 3], '{"value":[1,2,3]}')
    assert (await agent.resume("run_1", ledger=ledger)).output == [1, 2, 3]
    broken = in_process.agent(output_type=list[int], output_guardrails=[lambda _: Replace("three")])
    failed = await broken.run("Count.")
    assert failed.error is not None
    assert (failed.kind, failed.error.code) == ("failed", "guardrail_failed")
    assert "does not match the output type" in failed.error.message


@pytest.mark.parametrize(("retries", "kind", "turns"), [(0, "failed", 1), (1, "failed", 2), (2, "final", 3)])
async def test_output_is_sent_back_a_limited_number_of_times(
    in_process: ScriptedModel, adapt: Any, retries: int, kind: str, turns: int
) -> None:
    seen: list[int] = []

    def require_number(check: OutputCheck) -> None:
        seen.append(check.retries)
        if not check.output.isdigit():
            raise ModelRetry("Answer with a number.")

    in_process.set_answers("Many.", "A lot.", "7")
    agent = in_process.agent(output_guardrails=[adapt(require_number)], output_retries=retries)
    outcome = await agent.run("How many?")
    assert (outcome.kind, outcome.turns, seen) == (kind, turns, list(range(turns)))
    if kind == "final":
        assert in_process.sent[-1]["input"][-1] == {"role": "user", "content": "Answer with a number."}
    else:
        text = ["Many.", "A lot."][turns - 1]
        assert outcome.error == RunError("invalid_output", "The answer was not accepted: Answer with a number.", text)


async def test_answer_of_the_last_turn_is_checked_too(in_process: ScriptedModel) -> None:
    answers = ([LOOK], "The secret is 42.")
    limits = Limits(turns=1)
    in_process.set_answers(*answers)
    blocking = in_process.agent(tools=[look_up], limits=limits, output_guardrails=[lambda _: Block("no")])
    assert (await blocking.run("Go.")).kind == "blocked"

    def send_back(_: OutputCheck) -> None:
        raise ModelRetry("again")

    in_process.set_answers(*answers)
    outcome = await in_process.agent(tools=[look_up], limits=limits, output_guardrails=[send_back]).run("Go.")
    assert (outcome.kind, outcome.output, outcome.turns) == ("max_turns", None, 2)


async def test_sending_back_stops_at_the_limit_of_turns(in_process: ScriptedModel) -> None:
    def send_back(_: OutputCheck) -> None:
        raise ModelRetry("again")

    in_process.set_answers("One.", "Two.", "Three.")
    limits = Limits(turns=2, wrap_up=False)
    agent = in_process.agent(output_guardrails=[send_back], output_retries=9, limits=limits)
    outcome = await agent.run("Go.")
    assert (outcome.kind, outcome.turns) == ("max_turns", 2)


# Calls


async def test_blocked_call_ends_the_run_and_no_call_of_the_turn_runs(
    in_process: ScriptedModel, ledger: Ledger, adapt: Any
) -> None:
    made: list[str] = []

    @tool
    async def pay(amount: int) -> str:
        """Pay."""
        made.append(f"paid {amount}")
        return "paid"

    def refuse(check: CallCheck) -> Block | None:
        return Block("too much") if check.arguments.get("amount", 0) > 100 else None

    in_process.set_answers([call("pay", {"amount": 1}, "call_1"), call("pay", {"amount": 500}, "call_2")], "Done.")
    agent = in_process.agent(tools=[pay], call_guardrails=[adapt(refuse)])
    outcome = await agent.run("Pay.", ledger=ledger, run_id="run_1")
    assert (outcome.kind, outcome.error, made) == ("blocked", RunError("call_guardrail", "too much"), [])
    assert [item["call_id"] for item in outcome.history[-2:]] == ["call_1", "call_2"]
    assert ((await agent.resume("run_1", ledger=ledger)).kind, made) == ("blocked", [])


async def test_call_is_sent_back_with_a_message(in_process: ScriptedModel, adapt: Any) -> None:
    def refuse(check: CallCheck) -> None:
        if check.arguments["city"] == "Bern":
            raise ModelRetry("Use the whole name.")

    in_process.set_answers([LOOK], [call("look_up", {"city": "Berne"})], "Mild.")
    outcome = await in_process.agent(tools=[look_up], call_guardrails=[adapt(refuse)]).run("Go.")
    assert (outcome.kind, outcome.tool_calls) == ("final", 1)
    first, second = (output for _, output in outputs_of(in_process.sent[-1]))
    assert (error_of(first), second) == ("Use the whole name.", "Berne: mild")


async def test_replaced_arguments_are_approved_and_used(in_process: ScriptedModel, ledger: Ledger) -> None:
    checked: list[str] = []

    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    def cap(check: CallCheck) -> Replace:
        checked.append(check.call.arguments)
        return Replace({"amount": min(check.arguments["amount"], 100 - len(checked))})

    in_process.set_answers([call("pay", {"amount": 500}, "call_p")], "Done.")
    agent = in_process.agent(tools=[pay], call_guardrails=[cap])
    paused = await agent.run("Pay.", ledger=ledger, run_id="run_1")
    assert [each.arguments for each in paused.pending] == ['{"amount":99}']
    outcome = await agent.resume("run_1", approvals={"call_p": True}, ledger=ledger)
    assert (outcome.kind, checked) == ("final", ['{"amount":500}'])
    assert outputs_of(in_process.sent[-1]) == [("call_p", "paid 99")]


async def test_call_that_has_begun_is_not_checked_again(in_process: ScriptedModel) -> None:
    keys: list[str] = []
    actions: list[Any] = [None]
    crashed: list[MemoryLedger] = []
    ledger = MemoryLedger()

    @tool(on_interrupt="retry")
    async def pay(context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        crashed.append(copy.deepcopy(ledger))
        return "paid"

    in_process.set_answers([call("pay", {}, "call_p")], "Done.", "Done.")
    agent = in_process.agent(tools=[pay], call_guardrails=[lambda _: actions[0]])
    assert (await agent.run("Pay.", ledger=ledger, run_id="run_1")).kind == "final"
    actions[0] = Block("closed now")
    assert (await agent.resume("run_1", ledger=crashed[0])).kind == "final"
    assert keys == ["run_1:1:0"] * 2


async def test_guardrails_run_on_a_call_that_waited_for_approval(in_process: ScriptedModel) -> None:
    actions: list[Any] = [None]

    @tool(needs_approval=True)
    async def pay() -> str:
        """Pay."""
        raise AssertionError

    in_process.set_answers([call("pay", {}, "call_p")], "Done.")
    agent = in_process.agent(tools=[pay], call_guardrails=[lambda _: actions[0]])
    paused = await agent.run("Pay.")
    assert paused.state is not None
    actions[0] = Block("closed now")
    assert (await agent.resume(paused.state, approvals={"call_p": True})).kind == "blocked"


# Results


async def test_guardrail_replaces_a_result(in_process: ScriptedModel, ledger: Ledger, adapt: Any) -> None:
    def redact(check: ResultCheck) -> Replace:
        return Replace({"city": str(check.result.output).split(":", maxsplit=1)[0], "tool": check.call.name})

    in_process.set_answers([LOOK], "Mild.")
    agent = in_process.agent(tools=[look_up], result_guardrails=[adapt(redact)])
    await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert outputs_of(in_process.sent[-1]) == [("call_l", '{"city":"Bern","tool":"look_up"}')]
    assert not any(b"mild" in entry for entry in await ledger.read("run_1"))


async def test_result_is_sent_back_with_a_message(in_process: ScriptedModel, adapt: Any) -> None:
    def refuse(_: ResultCheck) -> None:
        raise ModelRetry("Too long: ask for less.")

    in_process.set_answers([LOOK], "Well.")
    outcome = await in_process.agent(tools=[look_up], result_guardrails=[adapt(refuse)]).run("Go.")
    assert outcome.kind == "final"
    assert error_of(outputs_of(in_process.sent[-1])[0][1]) == "Too long: ask for less."


async def test_blocked_result_ends_the_run_after_one_effect(
    in_process: ScriptedModel, ledger: Ledger, adapt: Any
) -> None:
    keys: list[str] = []

    @tool
    async def pay(context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        return "paid from account 4711"

    def refuse(check: ResultCheck) -> Block | None:
        return Block("an account number") if "4711" in check.result.output else None

    in_process.set_answers([call("pay", {}, "call_p"), LOOK], "Done.")
    agent = in_process.agent(tools=[pay, look_up], result_guardrails=[adapt(refuse)])
    outcome = await agent.run("Pay.", ledger=ledger, run_id="run_1")
    assert (outcome.kind, outcome.error) == ("blocked", RunError("result_guardrail", "an account number"))
    outputs = [item["output"] for item in outcome.history if item.get("type") == "function_call_output"]
    assert (error_of(outputs[0]), outputs[1]) == (WITHHELD, "Bern: mild")
    again = await agent.resume("run_1", ledger=ledger)
    assert (again.kind, again.error, keys, len(in_process.sent)) == ("blocked", outcome.error, ["run_1:1:0"], 1)


# Tools


async def test_tool_sends_a_call_back_without_retries(in_process: ScriptedModel) -> None:
    attempts: list[str] = []

    @tool(retries=3)
    async def find(name: str) -> str:
        """Find a person."""
        attempts.append(name)
        if " " not in name:
            raise ModelRetry("Give the whole name.")
        return "found"

    in_process.set_answers([call("find", {"name": "Ada"})], [call("find", {"name": "Ada L"})], "Found.")
    outcome = await in_process.agent(tools=[find]).run("Go.")
    assert (outcome.kind, attempts) == ("final", ["Ada", "Ada L"])
    first, second = (output for _, output in outputs_of(in_process.sent[-1]))
    assert (error_of(first), second) == ("Give the whole name.", "found")


async def test_guardrails_of_the_active_agent_apply(in_process: ScriptedModel) -> None:
    names: list[str] = []

    def note(check: Any) -> None:
        names.append(f"{type(check).__name__} {check.agent}")

    in_process.set_answers([call("transfer_to_b", {}, "call_h")], [LOOK], "Mild.")
    checks = {f"{stage}_guardrails": [note] for stage in ("input", "output", "call", "result")}
    other = in_process.agent(name="b", tools=[look_up], **checks)
    await in_process.agent(name="a", handoffs=[other], **checks).run("Go.")
    assert names == [
        "InputCheck a",
        "CallCheck a",
        "ResultCheck a",
        "CallCheck b",
        "ResultCheck b",
        "OutputCheck b",
    ]
