"""The form of the final answer: read into its type, asked for once more, or told as it was."""

import dataclasses
from typing import Any

import msgspec
import pydantic
import pytest

from antiphon import ConfigError, Limits, tool
from support.agent_stage import Stage, call


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
    ("kind", "said", "output"),
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
async def test_the_answer_is_read_into_its_type(stage: Stage, kind: Any, said: str, output: Any) -> None:
    stage.play(said)
    outcome = await stage.agent(output_type=kind).run("Go.")
    assert (outcome.kind, outcome.output, outcome.text) == ("final", output, said)
    asked = stage.sent[0]["text"]["format"]
    assert (asked["type"], asked["strict"], asked["schema"]["type"]) == ("json_schema", True, "object")
    assert asked["schema"]["additionalProperties"] is False


async def test_an_answer_that_does_not_fit_may_be_given_once_more(stage: Stage) -> None:
    stage.play('{"city": "Bern", "celsius": "mild"}', '{"city": "Bern", "celsius": 4, "note": null}')
    outcome = await stage.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.output, outcome.turns) == ("final", Weather("Bern", 4), 2)
    reason = "Expected `int`, got `str` - at `$.celsius`"
    assert stage.sent[1]["input"][-1] == {
        "role": "user",
        "content": f"Your answer does not fit: {reason}. Answer again, with nothing but the JSON.",
    }


async def test_if_it_does_not_fit_again_the_run_fails_with_the_text(stage: Stage) -> None:
    stage.play("It is mild.", "It really is.", '{"city": "Bern", "celsius": 4, "note": null}')
    outcome = await stage.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.turns, outcome.output) == ("failed", 2, None)
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.raw) == ("invalid_output", "It really is.")
    assert outcome.error.message.startswith("The answer does not match the output type: ")


async def test_an_answer_that_was_cut_off_may_be_given_once_more_too(stage: Stage) -> None:
    stage.play([{"text": '{"city": "Be'}, {"finish": "length"}], '{"city": "Bern", "celsius": 4, "note": null}')
    outcome = await stage.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.output) == ("final", Weather("Bern", 4))
    assert "it was cut off (max_output_tokens)" in stage.sent[1]["input"][-1]["content"]


async def test_the_last_word_of_a_run_that_had_to_end_is_read_too(stage: Stage) -> None:
    stage.play([LOOK], '{"value": 7}')
    outcome = await stage.agent(tools=[look_up], output_type=int, limits=Limits(turns=2)).run("Go.")
    assert (outcome.kind, outcome.output) == ("max_turns", 7)


async def test_a_refusal_fails_the_run_with_its_words(here: Stage) -> None:
    here.play([{"refusal": "I will not."}])
    outcome = await here.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.text) == ("failed", "I will not.")
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.message) == ("refusal", "I will not.")


@pytest.mark.parametrize(
    ("kind", "said", "reason"),
    [
        (Weather, "[" * 100_000, "JSON is nested too deeply"),
        (Weather, "```json\n" + "[" * 100_000 + "\n```", "JSON is nested too deeply"),
        (Odd, '{"number": 2}', "ArithmeticError: it is even"),
    ],
    ids=["too deep", "too deep within a fence", "against the type's own rule"],
)
async def test_whatever_is_wrong_with_an_answer_is_told_to_the_model(
    here: Stage, kind: Any, said: str, reason: str
) -> None:
    here.play(said)
    outcome = await here.agent(output_type=kind).run("Go.")
    assert outcome.error is not None
    assert (outcome.kind, outcome.turns, outcome.error.message) == (
        "failed",
        2,
        f"The answer does not match the output type: {reason}",
    )
    assert here.sent[1]["input"][-1]["content"].startswith(f"Your answer does not fit: {reason}.")


def test_a_type_that_no_answer_can_be_held_to_is_refused_with_what_can_be_done(here: Stage) -> None:
    with pytest.raises(ConfigError) as raised:
        here.agent(output_type=dict[str, int])
    assert raised.value.message == (
        "agent.output_type: strict mode cannot express an object with arbitrary keys; "
        "declare the keys, or use a list of pairs."
    )
