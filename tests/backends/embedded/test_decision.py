"""The decision between a call and a text, with given likelihoods of the first token."""

import json
import math
from typing import Any

import pytest

from antiphon.backends.base import Turn
from antiphon.backends.embedded.decision import CallDecision, OutputRequest, compute_call_margin, read_candidates
from antiphon.backends.embedded.grammar import read_rules
from antiphon.backends.embedded.model import (
    CompletionChoice,
    CompletionChunk,
    GeneratedToken,
    TokenCandidate,
    TokenLogprobs,
)
from antiphon.backends.embedded.prompt import DECISION_QUESTION
from antiphon.protocol import codec
from antiphon.protocol.items import Message

WEATHER = {"type": "function", "name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}
TIME = {"type": "function", "name": "get_time"}
NOTE = {"type": "custom", "name": "note"}
DICE = {
    "type": "custom",
    "name": "dice",
    "format": {"type": "grammar", "syntax": "regex", "definition": "d[468]"},
}
QUESTION = "What is the weather in Paris?"


def make_candidates(**likelihoods: float) -> list[TokenCandidate]:
    names = {"tag": "<tool_call>", "angle": "<", "fence": "```", "brace": "{", "text": "The", "other": "I"}
    return [TokenCandidate(names[key], math.log(value)) for key, value in likelihoods.items()]


def make_decision(input: Any = QUESTION, *, examples: bool = True, **parameters: Any) -> CallDecision:
    body = {"model": "m", "input": input, "tools": [WEATHER, TIME], **parameters}
    request = codec.decode_request(json.dumps(body).encode()).body
    items = [Message("user", request.input)] if isinstance(request.input, str) else request.input
    turn = Turn(request=request, items=items or [])
    return CallDecision(turn, read_rules(request), {"prompt": [1, 2], "max_tokens": 9}, examples=examples)


def allows_call(output: OutputRequest) -> bool:
    return "calls" in output.body["grammar"].splitlines()[1]


def allows_answer(output: OutputRequest) -> bool:
    return "answer" in output.body["grammar"].splitlines()[1]


@pytest.mark.parametrize(
    ("likelihoods", "is_call"),
    [
        ({"tag": 0.9, "text": 0.1}, True),
        ({"angle": 0.9, "text": 0.1}, True),
        ({"fence": 0.9, "text": 0.1}, True),
        ({"brace": 0.5, "tag": 0.4, "text": 0.1}, True),
        ({"text": 0.99, "tag": 0.01}, False),
        ({"text": 0.5, "other": 0.5}, False),
    ],
)
def test_output_is_held_to_the_more_likely_kind(likelihoods: dict[str, float], is_call: bool) -> None:
    output = make_decision().decide(make_candidates(**likelihoods))
    assert (allows_call(output), allows_answer(output)) == (is_call, not is_call)


@pytest.mark.parametrize(
    "parameters",
    [
        {"input": "Show me the JSON of the weather in Paris."},
        {"instructions": "Answer with code only."},
        {"text": {"format": {"type": "json_object"}}},
    ],
)
def test_json_is_an_answer_if_the_client_requests_it(parameters: dict[str, Any]) -> None:
    decision = make_decision(**parameters)
    output = decision.decide(make_candidates(brace=0.9, text=0.1))
    assert allows_answer(output)
    assert not output.reader.may_print_call
    assert allows_call(decision.decide(make_candidates(tag=0.95, brace=0.05)))


def test_answer_follows_its_format() -> None:
    schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    output = make_decision(text=form).decide(make_candidates(text=1.0))
    assert "degrees" in output.body["grammar"]
    assert "get_weather" not in output.body["grammar"]


def test_decision_uses_the_prompt_of_the_output_and_one_token() -> None:
    request = make_decision().request
    assert (request["prompt"], request["max_tokens"], request["temperature"]) == ([1, 2], 1, 0)


def test_decision_without_examples_asks_for_a_name() -> None:
    decision = make_decision(examples=False)
    assert decision.request["prompt"] == [1, 2, DECISION_QUESTION]
    assert decision.decide([TokenCandidate(" none", 0.0)]).body["prompt"] == [1, 2]


@pytest.mark.parametrize(
    ("token", "is_call"), [(" get", True), (" get_weather", True), (" {", True), (" none", False), ("", False)]
)
def test_name_of_a_tool_decides_without_examples(token: str, is_call: bool) -> None:
    output = make_decision(examples=False).decide([TokenCandidate(token, -0.1), TokenCandidate(" I", -2.4)])
    assert allows_call(output) is is_call


def test_output_has_the_parameters_of_the_turn() -> None:
    for likelihoods in ({"tag": 1.0}, {"text": 1.0}):
        body = make_decision().decide(make_candidates(**likelihoods)).body
        assert (body["prompt"], body["max_tokens"]) == ([1, 2], 9)


def test_printed_tool_is_required() -> None:
    output = make_decision(tools=[WEATHER, TIME, NOTE]).require_tool("get_time")
    assert "get_time" in output.body["grammar"]
    assert "get_weather" not in output.body["grammar"]
    assert not allows_answer(output)


def test_one_call_at_most_without_parallel_calls() -> None:
    grammar = make_decision(parallel_tool_calls=False).decide(make_candidates(tag=1.0)).body["grammar"]
    assert "\ncalls: closed\n" in grammar


def test_only_allowed_tools_can_be_called() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    grammar = make_decision(tool_choice=choice).decide(make_candidates(tag=1.0)).body["grammar"]
    assert "get_time" in grammar
    assert "get_weather" not in grammar


def test_custom_tools_can_be_called() -> None:
    output = make_decision(tools=[NOTE, DICE]).decide(make_candidates(tag=1.0))
    assert all(name in output.body["grammar"] for name in ("note", "dice"))


@pytest.mark.parametrize("candidates", [[], [TokenCandidate(" ", 0.0)]])
def test_missing_likelihoods_mean_an_answer(candidates: list[TokenCandidate]) -> None:
    assert allows_answer(make_decision().decide(candidates))


def test_margin_compares_calls_with_the_most_likely_other_token() -> None:
    candidates = make_candidates(tag=0.2, fence=0.2, text=0.3, other=0.1)
    assert compute_call_margin(candidates, count_json=False) == pytest.approx(math.log(0.2 / 0.3))
    assert compute_call_margin(candidates, count_json=True) == pytest.approx(math.log(0.4 / 0.3))


def test_call_after_a_result_has_to_be_clearly_more_likely() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "get_time", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "12:00"}
    decision = make_decision([{"role": "user", "content": QUESTION}, call, result])
    assert allows_answer(decision.decide(make_candidates(tag=0.3, text=0.2)))
    assert allows_call(decision.decide(make_candidates(tag=0.8, text=0.2)))


def test_start_of_a_tag_after_a_result_is_not_a_call() -> None:
    result = {"type": "function_call_output", "call_id": "1", "output": "12:00"}
    decision = make_decision([{"role": "user", "content": QUESTION}, result])
    assert allows_answer(decision.decide(make_candidates(angle=0.9, text=0.1)))


def test_candidates_of_the_first_token_are_read() -> None:
    candidates = make_candidates(tag=0.5, text=0.5)
    tokens = TokenLogprobs([GeneratedToken("<tool_call>", -0.7, [], candidates)])
    assert read_candidates([CompletionChunk(), CompletionChunk([CompletionChoice("x", None, tokens)])]) == candidates
    assert read_candidates([CompletionChunk([CompletionChoice("x")])]) == []
