"""Evaluations: cases, evaluators, concurrency, repetitions and the report."""

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from antiphon import Agent, ConfigError
from antiphon.evals import (
    Case,
    CaseResult,
    Evaluator,
    ModelJudge,
    Report,
    Score,
    contains,
    equals_expected,
    evaluate,
    evaluate_sync,
    is_instance,
    max_seconds,
)
from antiphon.testing.scripted import ScriptedTransport

ADD = Case("add", input=(1, 2), expected=3)
WRONG = Case("wrong", input=(1, 2), expected=4)


async def add(numbers: tuple[int, int]) -> int:
    return sum(numbers)


async def test_cases_are_scored_by_all_evaluators() -> None:
    own = Case("own", input=(2, 2), evaluators=[contains("4")])
    report = await evaluate(add, [ADD, WRONG, own], [equals_expected(), is_instance(int), max_seconds(60)])
    assert [result.output for result in report.results] == [3, 3, 4]
    values = [{name: score.value for name, score in result.scores.items()} for result in report.results]
    assert values == [
        {"equals": True, "has_type": True, "in_time": True},
        {"equals": False, "has_type": True, "in_time": True},
        {"has_type": True, "in_time": True, "contains_text": True},
    ]
    assert [result.has_passed for result in report.results] == [True, False, True]
    assert (report.has_passed, report.compute_averages()["equals"]) == (False, 0.5)


async def test_evaluators_of_the_same_name_do_not_hide_each_other() -> None:
    def fail(_: CaseResult[Any, Any]) -> bool:
        raise ValueError("no")

    report = await evaluate(add, [ADD], [contains("4"), contains("3"), contains("3"), fail, fail])
    (result,) = report.results
    values = {name: score.value for name, score in result.scores.items()}
    assert values == {"contains_text": False, "contains_text_2": True, "contains_text_3": True}
    assert result.failures == {"fail": "ValueError: no", "fail_2": "ValueError: no"}
    assert not report.has_passed


async def test_end_of_an_iterator_is_an_error_of_the_case() -> None:
    report = await asyncio.wait_for(evaluate(lambda numbers: next(iter(())), [ADD]), 30)
    assert report.results[0].error == "RuntimeError: StopIteration: "


@pytest.mark.parametrize(
    ("evaluator", "output", "value"),
    [
        (contains("bern"), "In Bern.", False),
        (contains("bern", ignore_case=True), "In Bern.", True),
        (contains(), "I expect it.", True),
        (contains('"a":1'), {"a": 1}, True),
        (is_instance(str), 7, False),
        (max_seconds(1e-9), "slow", False),
        (lambda _: 0.5, "", 0.5),
        (lambda _: "label", "", "label"),
        (lambda _: Score(True, "well"), "", True),
    ],
)
async def test_evaluator_returns_a_value(evaluator: Evaluator, output: Any, value: Any) -> None:
    report = await evaluate(lambda _: output, [Case("one", input=None, expected="expect")], [evaluator])
    ((score,),) = [result.scores.values() for result in report.results]
    assert score.value == value


async def test_evaluator_that_does_not_apply_has_no_score() -> None:
    report = await evaluate(add, [Case("one", input=(1, 2))], [equals_expected(), contains()])
    assert (report.results[0].scores, report.has_passed) == ({}, True)


async def test_errors_are_part_of_the_report() -> None:
    def fail(numbers: tuple[int, int]) -> int:
        if numbers == (0, 0):
            raise ValueError("nothing to add")
        return sum(numbers)

    def broken(_: CaseResult[Any, Any]) -> bool:
        raise KeyError("no")

    async def odd(_: CaseResult[Any, Any]) -> Any:
        return object()

    report = await evaluate(fail, [ADD, Case("zero", input=(0, 0))], [broken, odd, equals_expected()])
    first, second = report.results
    assert first.failures == {
        "broken": "KeyError: 'no'",
        "odd": "TypeError: an evaluator returned object, not a boolean, number or text",
    }
    assert (first.scores["equals"].value, first.has_passed) == (True, False)
    assert (second.error, second.scores, second.has_passed) == ("ValueError: nothing to add", {}, False)


async def test_number_of_cases_at_once_is_limited() -> None:
    running: set[int] = set()
    most = 0

    async def task(number: int) -> int:
        nonlocal most
        running.add(number)
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.discard(number)
        return number

    report = await evaluate(task, [Case(str(number), input=number) for number in range(9)], concurrency=3)
    assert (most, [result.output for result in report.results]) == (3, list(range(9)))


async def test_each_case_is_repeated() -> None:
    outputs = iter([3, 4, 3])

    async def flaky(_: object) -> int:
        return next(outputs)

    report = await evaluate(flaky, [ADD], [equals_expected()], repeat=3, concurrency=1)
    assert [(result.attempt, result.has_passed) for result in report.results] == [(1, True), (2, False), (3, True)]
    assert "add [2]" in report.format_table()


async def test_agent_is_evaluated_with_its_usage() -> None:
    transport = ScriptedTransport({"rules": [{"answers": ["It is mild in Bern."]}]})
    agent = Agent(model="scripted", transport=transport)
    limited = Agent(model="missing", transport=transport)
    case = Case("weather", input="How is it?", expected="mild")
    report = await evaluate(agent, [case], [contains()])
    (result,) = report.results
    assert (result.output, result.has_passed) == ("It is mild in Bern.", True)
    assert result.outcome is not None
    assert str(result.outcome.usage.total_tokens) in report.format_table()
    failed = await evaluate(limited, [case], [contains()])
    assert str(failed.results[0].error).startswith("failed: ")
    await agent.close()


def script_judge(**judgement: Any) -> ScriptedTransport:
    return ScriptedTransport({"rules": [{"answers": [json.dumps(judgement)]}]})


async def test_model_judges_the_output_by_a_rubric() -> None:
    transport = script_judge(reason="It is polite.", has_passed=True, score=1.5)
    judge = ModelJudge("Is it polite?", model="scripted", name="polite", transport=transport)
    report = await evaluate(lambda _: "Good morning!", [Case("greet", input="Greet me.", expected="Hi!")], [judge])
    assert report.results[0].scores == {
        "polite": Score(True, "It is polite."),
        "polite_score": Score(1.0, "It is polite."),
    }
    (request,) = transport.requests
    text = request["input"][0]["content"]
    for part in ("Is it polite?", "Good morning!", "Greet me.", "Hi!"):
        assert part in text
    await judge.close()


async def test_judge_without_a_judgement_is_a_failure() -> None:
    judge = ModelJudge("Is it polite?", model="scripted", transport=script_judge(reason="?"))
    report = await evaluate(lambda _: "Hi!", [Case("greet", input=None)], [judge])
    assert "the judge ended with failed" in report.results[0].failures["judge"]
    assert not report.has_passed


def test_report_is_a_table() -> None:
    def rate(result: CaseResult[Any, Any]) -> dict[str, Any]:
        if result.output == 4:
            raise LookupError("no fourth star")
        return {"stars": float(result.output), "class": "good" if result.output > 2 else "bad"}

    cases = [Case("one", input="1"), Case("three", input="3"), Case("none", input="x"), Case("four", input="4")]
    report = evaluate_sync(int, cases, [rate])
    fixed = Report([dataclasses.replace(each, seconds=0.25) for each in report.results])
    assert fixed.format_table().splitlines() == [
        "case           stars  class  seconds  error",
        "-" * 93,
        "one            1.00   bad    0.25",
        "three          3.00   good   0.25",
        "none                         0.25     ValueError: invalid literal for int() with base 10: 'x'",
        "four                         0.25     rate: LookupError: no fourth star",
        "-" * 93,
        "2 of 4 passed  2.00          0.25",
    ]


async def test_mistakes_are_refused() -> None:
    for options, message in (
        ({"concurrency": 0}, "concurrency must be at least 1."),
        ({"repeat": 0}, "repeat must be at least 1."),
    ):
        with pytest.raises(ConfigError, match=message):
            await evaluate(add, [ADD], **options)
    with pytest.raises(ConfigError, match="Two cases are called 'add'"):
        await evaluate(add, [ADD, ADD])
