"""Tools whose result is the final output of a run."""

import dataclasses
from typing import Any

import pydantic
import pytest

from antiphon import Limits, ModelRetry, Replace, ToolResult, tool
from antiphon.ledger import Ledger
from support.scripted_model import ScriptedModel, call, look_up


@dataclasses.dataclass
class Receipt:
    number: int


@tool(final=True)
def book(seats: int) -> Receipt:
    """Book seats."""
    if seats > 9:
        raise ModelRetry("There are nine seats.")
    return Receipt(seats)


BOOK = call("book", {"seats": 2}, "call_b")
LOOK = call("look_up", {"city": "Bern"}, "call_l")


@pytest.mark.parametrize(("kind", "output"), [(None, '{"number":2}'), (Receipt, Receipt(2))])
async def test_result_is_the_output(scripted: ScriptedModel, kind: Any, output: Any) -> None:
    scripted.set_answers([BOOK])
    outcome = await scripted.agent(tools=[book], output_type=kind).run("Go.")
    assert (outcome.kind, outcome.output, outcome.text) == ("final", output, '{"number":2}')
    assert (outcome.turns, outcome.tool_calls, len(scripted.sent)) == (1, 1, 1)


class Bill(pydantic.BaseModel):
    total: int = pydantic.Field(alias="sum")


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [(Bill, Bill(sum=3), '{"sum":3}'), (list[Bill], [Bill(sum=3)], '[{"sum":3}]')],
)
async def test_result_with_aliases_is_the_output(in_process: ScriptedModel, kind: Any, value: Any, text: str) -> None:
    pay = tool(name="pay", description="Pay.", final=True)(_returning(value))
    in_process.set_answers([call("pay", {})], [call("pay", {})])
    outcome = await in_process.agent(tools=[pay], output_type=kind).run("Go.")
    assert (outcome.kind, outcome.output, outcome.text) == ("final", value, text)
    replaced = in_process.agent(tools=[pay], output_type=kind, output_guardrails=[lambda _: Replace(value)])
    assert (await replaced.run("Go.")).output == value


async def test_model_may_answer_without_the_tool(in_process: ScriptedModel) -> None:
    in_process.set_answers('{"number": 3}')
    outcome = await in_process.agent(tools=[book], output_type=Receipt).run("Go.")
    assert outcome.output == Receipt(3)


async def test_text_of_a_tool_is_an_output_of_type_str(in_process: ScriptedModel) -> None:
    say = tool(name="say", description="Say a text.", final=True)
    in_process.set_answers([call("say", {})])
    for value in ("Hello.", "7"):
        outcome = await in_process.agent(tools=[say(_returning(value))], output_type=str).run("Go.")
        assert (outcome.kind, outcome.output) == ("final", value)


def _returning(value: Any) -> Any:
    def function() -> Any:
        return value

    return function


async def test_error_of_the_tool_does_not_end_the_run(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("book", {"seats": 10})], [BOOK])
    outcome = await in_process.agent(tools=[book], output_type=Receipt).run("Go.")
    assert (outcome.kind, outcome.output, outcome.turns) == ("final", Receipt(2), 2)


async def test_first_of_several_results_is_the_output(in_process: ScriptedModel) -> None:
    in_process.set_answers([LOOK, call("book", {"seats": 3}, "call_1"), BOOK])
    outcome = await in_process.agent(tools=[book, look_up]).run("Go.")
    assert (outcome.output, outcome.turns, outcome.tool_calls) == ('{"number":3}', 1, 3)


async def test_result_that_does_not_match_the_output_type_fails_the_run(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("say", {})])
    say = tool(name="say", description="Say a text.", final=True)(_returning({"amount": 1}))
    outcome = await in_process.agent(tools=[say], output_type=Receipt).run("Go.")
    assert outcome.error is not None
    assert (outcome.kind, outcome.error.code, outcome.error.raw) == ("failed", "invalid_output", '{"amount":1}')
    assert outcome.error.message.startswith("The result of the tool 'say' does not match the output type: ")


async def test_other_call_waits_for_approval_before_the_end(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([BOOK, call("pay", {}, "call_p")])
    pay = tool(name="pay", description="Pay.", needs_approval=True)(_returning("paid"))
    agent = in_process.agent(tools=[book, pay], output_type=Receipt)
    paused = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert (paused.kind, [each.call_id for each in paused.pending]) == ("needs_approval", ["call_p"])
    outcome = await agent.resume("run_1", approvals={"call_p": True}, ledger=ledger)
    assert (outcome.kind, outcome.output, outcome.tool_calls) == ("final", Receipt(2), 2)
    assert (await agent.resume("run_1", ledger=ledger)).output == Receipt(2)


async def test_final_tool_runs_in_the_last_turn_of_a_limit(in_process: ScriptedModel) -> None:
    in_process.set_answers([LOOK, BOOK])
    agent = in_process.agent(tools=[book, look_up], limits=Limits(turns=1, wrap_up=False))
    outcome = await agent.run("Go.")
    assert (outcome.kind, outcome.output, outcome.tool_calls) == ("final", '{"number":2}', 1)
    assert "the run has reached a limit" in outcome.history[3]["output"]


async def test_output_guardrails_check_the_result(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([BOOK])
    agent = in_process.agent(tools=[book], output_type=Receipt, output_guardrails=[lambda _: Replace(Receipt(0))])
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert (outcome.output, outcome.text, outcome.history[-1]["output"]) == (Receipt(0), '{"number":0}', '{"number":0}')
    assert (await agent.resume("run_1", ledger=ledger)).output == Receipt(0)


async def test_final_tool_of_a_subagent_ends_the_subagent_only(in_process: ScriptedModel) -> None:
    expert = in_process.agent(name="expert", tools=[book])
    in_process.set_answers([call("expert", {"input": "Book."}, "call_e")], [BOOK], "Booked.")
    outcome = await in_process.agent(tools=[expert.as_tool("expert", "Books.")]).run("Go.")
    assert (outcome.kind, outcome.text) == ("final", "Booked.")
    assert outcome.history[2]["output"] == '{"number":2}'


async def test_content_parts_are_a_text(in_process: ScriptedModel) -> None:
    parts = [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}]
    show = tool(name="show", description="Show it.", final=True)(_returning(ToolResult(parts)))
    in_process.set_answers([call("show", {})])
    assert (await in_process.agent(tools=[show]).run("Go.")).output == "one two"
