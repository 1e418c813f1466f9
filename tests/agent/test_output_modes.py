"""Typed output by a tool call and by a prompt, and unions of types."""

import dataclasses
from typing import Annotated, Any

import msgspec
import pydantic
import pytest

from antiphon import Block, ConfigError, Limits, ModelRetry, Notice, Replace, RunEvent, tool
from antiphon.agent.tool_calls import ANSWER_ACCEPTED
from antiphon.errors import InvalidRequest
from antiphon.ledger import Ledger
from support.scripted_model import ScriptedModel, call, look_up, outputs_of


@dataclasses.dataclass
class Weather:
    city: str
    celsius: int


@dataclasses.dataclass
class Apology:
    """Why there is no answer."""

    reason: str


@dataclasses.dataclass
class Excuse(Apology):
    pass


@dataclasses.dataclass
class Rating:
    stars: Annotated[int, pydantic.Field(le=5)]


class Report(pydantic.BaseModel):
    title: str


class Point(msgspec.Struct, tag=True):
    x: int


class Line(msgspec.Struct, tag=True):
    length: int


LOOK = call("look_up", {"city": "Bern"}, "call_l")
ANSWER = call("final_answer", {"city": "Bern", "celsius": 4}, "call_a")
BERN = Weather("Bern", 4)


# By a tool call


async def test_answer_is_the_call_of_a_tool(scripted: ScriptedModel) -> None:
    scripted.set_answers([LOOK], [ANSWER])
    outcome = await scripted.agent(tools=[look_up], output_type=Weather, output_mode="tool").run("Go.")
    assert (outcome.kind, outcome.output, outcome.turns, outcome.tool_calls) == ("final", BERN, 2, 1)
    assert outcome.text == '{"city":"Bern","celsius":4}'
    assert outcome.history[-1]["output"] == ANSWER_ACCEPTED
    for request in scripted.sent:
        assert "text" not in request
        assert [each["name"] for each in request["tools"]] == ["look_up", "final_answer"]
        assert request["tool_choice"] == "required"
    answer_tool = scripted.sent[0]["tools"][1]
    assert (answer_tool["strict"], answer_tool["parameters"]["required"]) == (True, ["city", "celsius"])


async def test_value_without_fields_is_wrapped_in_the_arguments(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("final_answer", {"value": [1, 2]})])
    outcome = await in_process.agent(output_type=list[int], output_mode="tool").run("Go.")
    assert (outcome.kind, outcome.output) == ("final", [1, 2])


async def test_union_has_one_tool_for_each_type(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("final_answer_Apology", {"reason": "I do not know."})])
    agent = in_process.agent(output_type=Weather | Apology | Report, output_mode="tool")
    assert (await agent.run("Go.")).output == Apology("I do not know.")
    described = {each["name"]: each["description"] for each in in_process.sent[0]["tools"]}
    assert list(described) == ["final_answer_Weather", "final_answer_Apology", "final_answer_Report"]
    assert described["final_answer_Apology"].endswith("Why there is no answer.")
    assert "Weather(" not in described["final_answer_Weather"]


async def test_optional_type_has_one_tool(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("final_answer", {"value": None})])
    outcome = await in_process.agent(output_type=Weather | None, output_mode="tool").run("Go.")
    assert (outcome.kind, outcome.output) == ("final", None)


async def test_invalid_call_is_sent_back_a_limited_number_of_times(scripted: ScriptedModel) -> None:
    wrong = [call("final_answer", {"city": "Bern", "celsius": "mild"}, "call_w")]
    agent = scripted.agent(output_type=Weather, output_mode="tool")
    scripted.set_answers(wrong, [ANSWER])
    outcome = await agent.run("Go.")
    assert (outcome.kind, outcome.output, outcome.turns) == ("final", BERN, 2)
    ((call_id, output),) = outputs_of(scripted.sent[1])
    assert (call_id, "Expected `int`, got `str` - at `$.celsius`" in output) == ("call_w", True)
    scripted.set_answers(wrong, [call("final_answer", "{", "call_2")], [ANSWER])
    outcome = await agent.run("Go.")
    assert outcome.error is not None
    assert (outcome.kind, outcome.turns, outcome.error.code, outcome.error.raw) == ("failed", 2, "invalid_output", "{")


async def test_text_instead_of_the_call_is_sent_back_unless_it_fits(in_process: ScriptedModel) -> None:
    agent = in_process.agent(output_type=Weather, output_mode="tool")
    in_process.set_answers("It is mild.", [ANSWER])
    assert (await agent.run("Go.")).output == BERN
    assert in_process.sent[1]["input"][-1]["content"].endswith("Answer again, by calling a tool for it.")
    in_process.set_answers('{"city": "Bern", "celsius": 4}')
    assert (await agent.run("Go.")).output == BERN


async def test_other_calls_of_the_turn_run_before_the_end(in_process: ScriptedModel) -> None:
    other = in_process.agent(name="other")
    in_process.set_answers([ANSWER, LOOK, call("transfer_to_other", {}, "call_t")])
    agent = in_process.agent(tools=[look_up], output_type=Weather, output_mode="tool", handoffs=[other])
    outcome = await agent.run("Go.")
    assert (outcome.kind, outcome.output, outcome.agent, outcome.turns) == ("final", BERN, "agent", 1)
    outputs = [item["output"] for item in outcome.history if "output" in item]
    assert (outputs[:2], "the run has ended with an answer" in outputs[2]) == ([ANSWER_ACCEPTED, "Bern: mild"], True)


async def test_last_turn_at_a_limit_offers_the_output_tool_only(in_process: ScriptedModel) -> None:
    in_process.set_answers([LOOK], [ANSWER])
    agent = in_process.agent(tools=[look_up], output_type=Weather, output_mode="tool", limits=Limits(turns=1))
    outcome = await agent.run("Go.")
    assert (outcome.kind, outcome.output) == ("max_turns", BERN)
    last = in_process.sent[1]
    assert ([each["name"] for each in last["tools"]], last["tool_choice"]) == (["final_answer"], "required")


async def test_finished_run_has_the_output_again(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([ANSWER])
    agent = in_process.agent(output_type=Weather, output_mode="tool")
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    again = await agent.resume("run_1", ledger=ledger)
    assert (again.kind, again.output, again.text, again.history) == ("final", BERN, outcome.text, outcome.history)


async def test_run_resumed_with_another_output_type_does_not_match(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([ANSWER])
    agent = in_process.agent(output_type=Weather, output_mode="tool")
    await agent.run("Go.", ledger=ledger, run_id="run_1")
    same = await in_process.agent(output_type=Weather).resume("run_1", ledger=ledger)
    assert (same.kind, same.output) == ("final", BERN)
    other = await in_process.agent(output_type=Apology).resume("run_1", ledger=ledger)
    assert other.error is not None
    assert (other.kind, other.error.code) == ("failed", "invalid_output")


async def test_guardrail_replaces_the_answer_of_an_output_tool(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([ANSWER])
    redact: Any = lambda check: Replace(Weather("****", check.output.celsius))  # noqa: E731
    agent = in_process.agent(output_type=Weather, output_mode="tool", output_guardrails=[redact])
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert (outcome.output, outcome.text) == (Weather("****", 4), '{"city":"****","celsius":4}')
    assert "Bern" not in str(outcome.history)
    assert (await agent.resume("run_1", ledger=ledger)).output == outcome.output


async def test_guardrail_blocks_and_sends_back_the_answer_of_an_output_tool(in_process: ScriptedModel) -> None:
    in_process.set_answers([ANSWER])
    blocked = in_process.agent(output_type=Weather, output_mode="tool", output_guardrails=[lambda _: Block("no")])
    outcome = await blocked.run("Go.")
    assert (outcome.kind, outcome.output, outcome.text, len(outcome.history)) == ("blocked", None, "", 1)

    def require_frost(check: Any) -> None:
        if check.output.celsius > 0:
            raise ModelRetry("It must freeze.")

    in_process.set_answers([ANSWER], [call("final_answer", {"city": "Bern", "celsius": -4})])
    strict = in_process.agent(output_type=Weather, output_mode="tool", output_guardrails=[require_frost])
    outcome = await strict.run("Go.")
    assert (outcome.kind, outcome.output) == ("final", Weather("Bern", -4))
    assert in_process.sent[-1]["input"][-1] == {"role": "user", "content": "It must freeze."}


def test_invalid_modes_are_refused(in_process: ScriptedModel) -> None:
    for options, message in (
        ({"output_type": Weather, "output_mode": "yaml"}, "output_mode: 'yaml' is not one of native, tool, prompt."),
        ({"output_mode": "tool"}, "output_mode requires an output_type."),
        (
            {
                "output_type": Weather,
                "output_mode": "tool",
                "tools": [tool(name="final_answer", description="Mine.")(lambda: 1)],
            },
            "There are two tools called 'final_answer'.",
        ),
    ):
        with pytest.raises(ConfigError) as raised:
            in_process.agent(**options)
        assert raised.value.message == message


# By a prompt


async def test_schema_is_in_the_instructions(scripted: ScriptedModel) -> None:
    scripted.set_answers('Here it is:\n```json\n{"city": "Bern", "celsius": 4}\n```')
    agent = scripted.agent(instructions="Be brief.", output_type=Weather, output_mode="prompt")
    outcome = await agent.run("Go.", settings={"temperature": 0})
    assert (outcome.kind, outcome.output) == ("final", BERN)
    request = scripted.sent[0]
    assert ("text" in request, request["instructions"].startswith("Be brief.\n\n")) == (False, True)
    assert '"required":["city","celsius"]' in request["instructions"]


async def test_schema_follows_dynamic_instructions(in_process: ScriptedModel) -> None:
    in_process.set_answers([LOOK], '{"city": "Bern", "celsius": 4}')
    agent = in_process.agent(
        tools=[look_up],
        instructions=lambda context: f"Turn {context.turn}.",
        output_type=Weather,
        output_mode="prompt",
    )
    assert (await agent.run("Go.")).output == BERN
    schema = agent._definition.task.output.prompt
    assert [each["instructions"] for each in in_process.sent] == [f"Turn 1.\n\n{schema}", f"Turn 2.\n\n{schema}"]


# Models without structured output

REFUSAL = "Invalid parameter: 'text.format' of type 'json_schema' is not supported with this model."


async def test_model_without_structured_output_gets_the_schema_as_a_prompt(in_process: ScriptedModel) -> None:
    in_process.set_answers('{"city": "Bern", "celsius": 4}')
    in_process.transport.refusals = [InvalidRequest(REFUSAL, param="text.format")]
    events: list[RunEvent] = []
    agent = in_process.agent(output_type=Weather, settings={"text": {"verbosity": "low"}}, hooks=[events.append])
    assert (await agent.run("Go.")).output == BERN
    assert (await agent.run("Go.")).output == BERN
    # The second run knows it already.
    first, repeated, second = in_process.sent
    assert first["text"]["format"]["type"] == "json_schema"
    assert repeated["text"] == second["text"] == {"verbosity": "low"}
    assert '"required":["city","celsius"]' in second["instructions"]
    notices = [event.message for event in events if isinstance(event, Notice)]
    assert notices == ["The model has no structured output. The instructions contain the schema of the output instead."]


@pytest.mark.parametrize("code", ["invalid_json_schema", "invalid_value"])
async def test_invalid_schema_fails_the_run(in_process: ScriptedModel, code: str) -> None:
    refusal = "Invalid schema for response_format 'output': 'x' is not supported."
    in_process.transport.refusals = [InvalidRequest(refusal, param="text.format.schema", code=code)]
    outcome = await in_process.agent(output_type=Weather).run("Go.")
    assert outcome.error is not None
    assert (outcome.kind, outcome.error.code, len(in_process.sent)) == ("failed", code, 1)


# Unions in the format of a schema


@pytest.mark.parametrize(
    ("kind", "text", "output"),
    [
        (Weather | Apology, '{"Weather": {"city": "Bern", "celsius": 4}, "Apology": null}', BERN),
        (Weather | Apology, '{"Weather": null, "Apology": {"reason": "no"}}', Apology("no")),
        (Rating | Apology, '{"Rating": {"stars": 5}, "Apology": null}', Rating(5)),
        (Point | Line, '{"value": {"type": "Line", "length": 3}}', Line(3)),
        (Weather | Report, '{"value": {"title": "Good"}}', Report(title="Good")),
    ],
)
async def test_union_is_parsed_into_its_types(in_process: ScriptedModel, kind: Any, text: str, output: Any) -> None:
    in_process.set_answers(text)
    keep: Any = lambda check: Replace(check.output)  # noqa: E731
    outcome = await in_process.agent(output_type=kind, output_guardrails=[keep]).run("Go.")
    assert (outcome.kind, outcome.output) == ("final", output)
    schema = in_process.sent[0]["text"]["format"]["schema"]
    assert (schema["type"], schema["additionalProperties"]) == ("object", False)


async def test_output_is_replaced_by_a_subclass_of_a_member(in_process: ScriptedModel) -> None:
    in_process.set_answers('{"Weather": null, "Apology": {"reason": "Fog."}}')
    agent = in_process.agent(output_type=Weather | Apology, output_guardrails=[lambda _: Replace(Excuse("Rain."))])
    outcome = await agent.run("Go.")
    assert (outcome.output, outcome.text) == (Excuse("Rain."), '{"Weather":null,"Apology":{"reason":"Rain."}}')


async def test_constraint_of_pydantic_applies_within_a_union(in_process: ScriptedModel) -> None:
    in_process.set_answers('{"Rating": {"stars": 6}, "Apology": null}')
    outcome = await in_process.agent(output_type=Rating | Apology, output_retries=0).run("Go.")
    assert outcome.error is not None
    assert outcome.error.message.endswith("stars: Input should be less than or equal to 5 - at `$.Rating`")


async def test_union_without_exactly_one_value_is_invalid(in_process: ScriptedModel) -> None:
    in_process.set_answers('{"Weather": null, "Apology": null}')
    outcome = await in_process.agent(output_type=Weather | Apology, output_retries=0).run("Go.")
    assert outcome.error is not None
    assert outcome.error.message.endswith("One of Weather, Apology must be set, and the others must be null")
