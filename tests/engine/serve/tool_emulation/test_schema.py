"""Schemas that clients send, and values that fit them or not."""

import json
from typing import Any

import pytest

from antiphon.engine.serve.tool_emulation import json_output as module
from antiphon.engine.serve.tool_emulation.json_output import OutputSchema
from antiphon.errors import InvalidRequest

# Python's own expressions would need years for these.
SLOW = "^(a+)+$"
LONG = "a" * 40 + "b"
DRAFTS = [
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
]


@pytest.mark.parametrize(
    ("schema", "value", "faults"),
    [
        ({"pattern": SLOW}, LONG, [f"$: '{LONG}' does not match '{SLOW}'"]),
        ({"pattern": SLOW}, "aa", []),
        ({"pattern": SLOW}, 1, []),
        ({"propertyNames": {"pattern": SLOW}}, {LONG: 1}, [f"$: '{LONG}' does not match '{SLOW}'"]),
        ({"patternProperties": {SLOW: {"type": "null"}}}, {LONG: 1, "aa": 1}, ["$.aa: 1 is not of type 'null'"]),
        (
            {"patternProperties": {SLOW: True}, "properties": {"b": True}, "additionalProperties": False},
            {LONG: 1, "aa": 1, "b": 1},
            [f"$: Additional properties are not allowed ('{LONG}' was unexpected)"],
        ),
        (
            {"patternProperties": {"^x": True}, "additionalProperties": {"type": "null"}},
            {"x": 1, "y": 1},
            ["$.y: 1 is not of type 'null'"],
        ),
        ({"patternProperties": {SLOW: True}, "unevaluatedProperties": False}, {LONG: 1}, []),
    ],
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_patterns_are_matched_at_once(schema: dict[str, Any], value: Any, faults: list[str], draft: str) -> None:
    assert OutputSchema({"$schema": draft, **schema}).list_faults(value) == faults


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_part_that_names_a_draft_of_its_own_is_checked_no_differently(draft: str) -> None:
    schema = OutputSchema({"properties": {"a": {"$schema": draft, "pattern": SLOW}}})
    assert schema.list_faults({"a": LONG}) == [f"$.a: '{LONG}' does not match '{SLOW}'"]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"pattern": "^(?=b)"}, "a"),
        ({"patternProperties": {"^(?=a)": False}}, {"a": 1}),
        ({"patternProperties": {"^(?=a)": True}, "additionalProperties": False}, {"a": 1}),
    ],
)
def test_nothing_is_refused_for_a_pattern_that_cannot_be_read(schema: dict[str, Any], value: Any) -> None:
    assert OutputSchema(schema).list_faults(value) == []


def test_properties_that_nothing_speaks_of_are_found() -> None:
    schema = OutputSchema({"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False})
    assert schema.list_faults({"a": 1, "b": 1}) == ["$: Unevaluated properties are not allowed ('b' was unexpected)"]


@pytest.mark.parametrize("pattern", ["(", "(?=a)a{99999999999999999999}"])
def test_a_pattern_that_is_no_expression_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a 'regex'"):
        OutputSchema({"pattern": pattern})


@pytest.mark.parametrize(
    ("value", "unique"),
    [
        ([1, True, "1", 0, False, None, [1], [True], {"a": 0}, {"a": False}], True),
        ([1, 1.0], False),
        ([{"a": 1, "b": [1]}, {"b": [1.0], "a": 1}], False),
        ([1, 1], False),
        ([{"a": number} for number in range(5000)], True),
    ],
)
def test_items_are_unique_if_none_equals_another(value: list[Any], unique: bool) -> None:
    faults = OutputSchema({"uniqueItems": True}).list_faults(value)
    assert faults == ([] if unique else [f"$: {value!r} has non-unique elements"])


def test_a_schema_whose_parts_multiply_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, Any] = {f"p{n}": {"anyOf": [{"$ref": f"#/$defs/p{n + 1}"}] * 2} for n in range(30)}
    schema = OutputSchema({"$ref": "#/$defs/p0", "$defs": {**parts, "p30": {"type": "null"}}})
    assert schema.list_faults(None) == []
    monkeypatch.setattr(module, "_TIME_LIMIT", 0.1)
    with pytest.raises(InvalidRequest, match="takes too long") as caught:
        schema.list_faults(1)
    assert (caught.value.param, caught.value.code) == ("text.format.schema", "invalid_value")


def test_a_schema_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIME_LIMIT", 0.05)
    with pytest.raises(InvalidRequest, match="takes too long"):
        OutputSchema({"properties": {f"p{n}": {"type": "string"} for n in range(5000)}})


def test_a_number_that_no_float_holds_is_a_fault() -> None:
    faults = OutputSchema({"multipleOf": 0.5}).list_faults(json.loads("1" * 400))
    assert faults == ["$: it has a number that is too large to check"]
