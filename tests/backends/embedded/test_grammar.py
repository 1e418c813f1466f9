"""Output rules of requests, and their grammars."""

import json
from typing import Any

import pytest

from antiphon.backends.embedded.grammar import build_grammar, read_rules
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest

TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("a", "b", "c")]


def make_request(**parameters: Any) -> CreateRequest:
    return codec.decode_request(json.dumps({"model": "m", "input": "x", **parameters}).encode()).body


def allow(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


@pytest.mark.parametrize(
    ("choice", "parallel", "names", "may_answer", "max_calls"),
    [
        (None, None, ["a", "b", "c"], True, 8),
        ("auto", False, ["a", "b", "c"], True, 1),
        ("none", None, [], True, 0),
        ("required", True, ["a", "b", "c"], False, 8),
        ("required", False, ["a", "b", "c"], False, 1),
        ({"type": "function", "name": "b"}, True, ["b"], False, 1),
        (allow("auto", "a", "c"), None, ["a", "c"], True, 8),
        (allow("required", "c"), None, ["c"], False, 8),
        (allow("none", "c"), None, [], True, 0),
    ],
)
def test_every_form_of_tool_choice_is_read_into_rules(
    choice: Any, parallel: bool | None, names: list[str], may_answer: bool, max_calls: int
) -> None:
    rules = read_rules(make_request(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel))
    assert (list(rules.tools), rules.may_answer, rules.max_calls) == (names, may_answer, max_calls)


@pytest.mark.parametrize(
    ("choice", "functions", "customs", "may_answer", "max_calls"),
    [
        (None, ["a"], ["x", "y"], True, 8),
        ("none", [], [], True, 0),
        ({"type": "custom", "name": "y"}, [], ["y"], False, 1),
        ({"type": "function", "name": "a"}, ["a"], [], False, 1),
        (allow("required", "x"), [], ["x"], False, 8),
    ],
)
def test_tool_choice_applies_to_custom_tools(
    choice: Any, functions: list[str], customs: list[str], may_answer: bool, max_calls: int
) -> None:
    grammar = {"type": "grammar", "syntax": "regex", "definition": "a/b"}
    tools = [TOOLS[0], {"type": "custom", "name": "x"}, {"type": "custom", "name": "y", "format": grammar}]
    rules = read_rules(make_request(tools=tools, tool_choice=choice))
    assert (list(rules.tools), list(rules.custom_tools), rules.may_answer, rules.max_calls) == (
        functions,
        customs,
        may_answer,
        max_calls,
    )
    assert rules.open_ended == {"y"} & set(customs)
    assert rules.grammars == ({"tools[2].format.definition": r"start: /(?:a\/b)/"} if "y" in customs else {})


def test_schemas_are_listed_by_param_path() -> None:
    rules = read_rules(make_request(tools=TOOLS[:2], text={"format": {"type": "json_object"}}))
    assert list(rules.schemas) == ["tools[0].parameters", "tools[1].parameters", "text.format"]


def test_forced_call_has_no_answer_format() -> None:
    rules = read_rules(make_request(tools=TOOLS, tool_choice="required", text={"format": {"type": "json_object"}}))
    assert rules.answer is None


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_function_without_parameters_takes_none(parameters: Any) -> None:
    rules = read_rules(make_request(tools=[{"type": "function", "name": "a", "parameters": parameters}]))
    (schema,) = rules.schemas.values()
    assert (schema["properties"], schema["additionalProperties"]) == ({}, False)


def test_plain_turn_has_no_grammar() -> None:
    assert build_grammar(read_rules(make_request()), forbid_calls=False) is None
