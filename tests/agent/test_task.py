"""Typed output: parsing, one repair turn, and failures."""

import dataclasses
from typing import Any

import msgspec
import pydantic
import pytest

from antiphon import ConfigError, Limits, tool
from support.scripted_model import ScriptedModel, call


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


LOOK = call("look_up", {"city": "Bern"})


@dataclasses.dataclass
class Weather:
    city: str
    celsius: int
    note: str | None = None


class Forecast(msgspec.Struct):
    days: list[Weather]


class Report(pydantic.BaseModel):
    title: str
    stars: int = pydantic.Field(ge=1, le=5)


@dataclasses.dataclass
class Odd:
    number: int

    def __post_init__(self) -> None:
        if self.number % 2 == 0:
            raise ArithmeticError("it is even")


@pytest.mark.parametrize(
    ("kind", "text", "output"),
    [
        (Weather, '{"city": "Bern", "celsius": 4, "note": null}', Weather("Bern", 4)),
        (Forecast, '{"days": [{"city": "Bern", "celsius": 4, "note": "x"}]}', Forecast([Weather("Bern", 4, "x")])),
        (Report, '{"title": "Good", "stars": 4}', Report(title="Good", stars=4)),
        (list[int], '{"value": [1, 2]}', [1, 2]),
        (int, '{"value": 7}', 7),
        (list[Report], '{"value": [{"title": "Good", "stars": 4}]}', [Report(title="Good", stars=4)]),
        (Weather | None, '{"value": null}', None),
        (int, 'Here it is:\n```json\n{"value": 7}\n```', 7),
    ],
)
async def test_answer_is_parsed_into_its_type(scripted: ScriptedModel, kind: Any, text: str, output: Any) -> None:
    scripted.set_answers(text)
    outcome = await scripted.agent(output_type=kind).run("Go.")
    assert (outcome.kind, outcome.output, outcome.text) == ("final", output, text)
    format_ = scripted.sent[0]["text"]["format"]
    assert (format_["type"], format_["strict"], format_["schema"]["type"]) == ("json_schema", True, "object")
    assert format_["schema"]["additionalProperties"] is False


async def test_answer_of_type_str_is_the_text(in_process: ScriptedModel) -> None:
    in_process.set_answers("It is mild.")
    outcome = await in_process.agent(output_type=str).run("Go.")
    assert (outcome.kind, outcome.output, "text" in in_process.sent[0]) == ("final", "It is mild.", False)


async def test_invalid_answer_is_requested_once_more(scripted: ScriptedModel) -> None:
    scripted.set_answers('{"city": "Bern", "celsius": "mild"}', '{"city": "Bern", "celsius": 4, "note": null}')
    outcome = await scripted.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.output, outcome.turns) == ("final", Weather("Bern", 4), 2)
    reason = "Expected `int`, got `str` - at `$.celsius`"
    assert scripted.sent[1]["input"][-1] == {
        "role": "user",
        "content": f"Your answer does not fit: {reason}. Answer again, with nothing but the JSON.",
    }


async def test_second_invalid_answer_fails_the_run_with_its_text(scripted: ScriptedModel) -> None:
    scripted.set_answers("It is mild.", "It really is.", '{"city": "Bern", "celsius": 4, "note": null}')
    outcome = await scripted.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.turns, outcome.output) == ("failed", 2, None)
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.raw) == ("invalid_output", "It really is.")
    assert outcome.error.message.startswith("The answer does not match the output type: ")


async def test_incomplete_typed_answer_is_requested_once_more(scripted: ScriptedModel) -> None:
    scripted.set_answers(
        [{"text": '{"city": "Be'}, {"finish": "length"}], '{"city": "Bern", "celsius": 4, "note": null}'
    )
    outcome = await scripted.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.output) == ("final", Weather("Bern", 4))
    assert "it was cut off (max_output_tokens)" in scripted.sent[1]["input"][-1]["content"]


async def test_last_answer_at_a_limit_is_parsed(scripted: ScriptedModel) -> None:
    scripted.set_answers([LOOK], '{"value": 7}')
    outcome = await scripted.agent(tools=[look_up], output_type=int, limits=Limits(turns=1)).run("Go.")
    assert (outcome.kind, outcome.output) == ("max_turns", 7)


async def test_refusal_fails_the_run_with_its_text(in_process: ScriptedModel) -> None:
    in_process.set_answers([{"refusal": "I will not."}])
    outcome = await in_process.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.text) == ("failed", "I will not.")
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.message) == ("refusal", "I will not.")


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (Weather, "[" * 100_000, "JSON is nested too deeply"),
        (Weather, "```json\n" + "[" * 100_000 + "\n```", "JSON is nested too deeply"),
        (Odd, '{"number": 2}', "ArithmeticError: it is even"),
    ],
    ids=["too deep", "too deep within a fence", "against the type's own rule"],
)
async def test_reason_of_an_invalid_answer_is_sent_to_the_model(
    in_process: ScriptedModel, kind: Any, text: str, reason: str
) -> None:
    in_process.set_answers(text)
    outcome = await in_process.agent(output_type=kind).run("Go.")
    assert outcome.error is not None
    assert (outcome.kind, outcome.turns, outcome.error.message) == (
        "failed",
        2,
        f"The answer does not match the output type: {reason}",
    )
    assert in_process.sent[1]["input"][-1]["content"].startswith(f"Your answer does not fit: {reason}.")


def test_output_type_without_strict_schema_is_rejected(in_process: ScriptedModel) -> None:
    with pytest.raises(ConfigError) as raised:
        in_process.agent(output_type=dict[str, int])
    assert raised.value.message == (
        "agent.output_type: strict mode cannot express an object with arbitrary keys; "
        "declare the keys, or use a list of pairs."
    )
