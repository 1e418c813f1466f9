"""Checks of JSON schemas before they are compiled."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.embedded.schema import translate_schema
from antiphon.config.settings import GrammarLimits
from antiphon.errors import InvalidRequest
from antiphon.grammars.schema_check import SchemaCheck

LIMITS = GrammarLimits()


def refuse(schema: Any, limits: GrammarLimits = LIMITS) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        SchemaCheck(limits).check(schema, "here")
    return caught.value


BOMBS = {
    "minItems": ({"type": "array", "minItems": 10**9}, "items"),
    "minItems as a float": ({"type": "array", "minItems": 1e9}, "items"),
    "minLength": ({"type": "string", "minLength": 10**9}, "length"),
    "minProperties": ({"type": "object", "minProperties": 10**9}, "properties"),
    "multipleOf": ({"type": "integer", "multipleOf": 9_999_991}, "multiple_of"),
    "multipleOf as a decimal": ({"type": "number", "multipleOf": 0.9999991}, "multiple_of"),
    "multipleOf with an exponent": ({"type": "number", "multipleOf": 1e-30}, "multiple_of"),
    "enum": ({"enum": list(range(5001))}, "enum_values"),
    "anyOf": ({"anyOf": [{}] * 501}, "alternatives"),
    "prefixItems": ({"prefixItems": [{}] * 501}, "alternatives"),
    "properties": ({"properties": {str(n): {} for n in range(1001)}}, "properties"),
    "required": ({"required": [str(n) for n in range(1001)]}, "properties"),
    "pattern": ({"pattern": "((a{100}){100}){100}"}, "pattern_size"),
    "patternProperties.a{99999}": ({"patternProperties": {"a{99999}": {}}}, "pattern_size"),
    "pattern with a long number": ({"pattern": "a{" + "9" * 5000 + "}"}, "pattern_size"),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda schema: schema, "here"),
        (lambda schema: {"properties": {"x": schema}}, "here.properties.x"),
        (lambda schema: {"$defs": {"x": schema}}, "here.$defs.x"),
        (lambda schema: {"allOf": [{}, {"items": schema}]}, "here.allOf[1].items"),
        (lambda schema: {"$ref": "#/other/x", "other": {"x": schema}}, "here.other.x"),
    ],
)
def test_numbers_that_a_grammar_writes_out_are_limited(name: str, wrap: Any, path: str) -> None:
    schema, setting = BOMBS[name]
    error = refuse(wrap(schema))
    keyword = name.partition(" ")[0]
    assert (error.param, error.code, error.status) == (f"{path}.{keyword}", "unsupported_schema", 400)
    assert f"The limit is {getattr(LIMITS, setting)} (setting grammars.{setting})." in error.message


@pytest.mark.parametrize(
    ("schema", "setting"),
    [
        ({"description": "x" * 300_000}, "schema_bytes"),
        ({"properties": {"x" * 300_000: {}}}, "schema_bytes"),
        ({"default": json.loads("[" * 500 + "]" * 500)}, "schema_depth"),
        ({"properties": {str(n): {"$ref": "#"} for n in range(900)}}, "references"),
    ],
)
def test_size_of_the_whole_schema_is_limited(schema: Any, setting: str) -> None:
    error = refuse(schema, GrammarLimits(references=800))
    assert error.param is not None
    assert error.param.startswith("here")
    assert f"(setting grammars.{setting})" in error.message


def test_schemas_of_one_request_share_the_limit_on_size() -> None:
    check = SchemaCheck(GrammarLimits(schema_bytes=1000))
    for number in range(3):
        check.check({"description": "x" * 300}, f"tools[{number}].parameters")
    with pytest.raises(InvalidRequest) as caught:
        check.check({"description": "x" * 300}, "tools[3].parameters")
    assert caught.value.param == "tools[3].parameters"


MALFORMED = [
    ({"minItems": "x"}, "minItems"),
    ({"minItems": True}, "minItems"),
    ({"maxItems": -1}, "maxItems"),
    ({"maxLength": 1.5}, "maxLength"),
    ({"minProperties": None}, "minProperties"),
    ({"required": 5}, "required"),
    ({"required": [5]}, "required"),
    ({"format": []}, "format"),
    ({"properties": []}, "properties"),
    ({"properties": {"a": 5}}, "properties.a"),
    ({"patternProperties": {"(": {}}}, "patternProperties.("),
    ({"$ref": 3}, "$ref"),
    ({"$ref": "#/nowhere"}, "$ref"),
    ({"$ref": "#/$defs/0", "$defs": {}}, "$ref"),
    ({"$ref": "#/enum/00000000000000000000", "enum": [1]}, "$ref"),
    ({"$ref": "other.json"}, "$ref"),
    ({"$ref": "#/minItems", "minItems": 3}, "minItems"),
    ({"pattern": "("}, "pattern"),
    ({"pattern": "a)"}, "pattern"),
    ({"pattern": "[a"}, "pattern"),
    ({"pattern": "a\\"}, "pattern"),
    ({"pattern": "a{3,2}"}, "pattern"),
    ({"pattern": {}}, "pattern"),
    ({"type": "foo"}, "type"),
    ({"type": []}, "type"),
    ({"type": ["string", {}]}, "type"),
    ({"type": {}}, "type"),
    ({"items": 5}, "items"),
    ({"items": [{}, None]}, "items[1]"),
    ({"additionalProperties": "no"}, "additionalProperties"),
    ({"anyOf": []}, "anyOf"),
    ({"anyOf": {}}, "anyOf"),
    ({"oneOf": [True, 1]}, "oneOf[1]"),
    ({"allOf": "x"}, "allOf"),
    ({"prefixItems": 1}, "prefixItems"),
    ({"enum": {}}, "enum"),
    ({"enum": []}, "enum"),
    ({"enum": [float("inf")]}, "enum[0]"),
    ({"const": [1, [float("nan")]]}, "const"),
    ({"minimum": "1"}, "minimum"),
    ({"maximum": float("inf")}, "maximum"),
    ({"exclusiveMinimum": []}, "exclusiveMinimum"),
    ({"multipleOf": 0}, "multipleOf"),
    ({"multipleOf": -2}, "multipleOf"),
    ({"multipleOf": "2"}, "multipleOf"),
    ({"uniqueItems": "yes"}, "uniqueItems"),
    ({"$defs": {"a": []}}, "$defs.a"),
    ({"definitions": 1}, "definitions"),
    ({"$schema": 1}, "$schema"),
    ({"$id": {}}, "$id"),
]


@pytest.mark.parametrize(("schema", "path"), MALFORMED)
def test_malformed_keyword_is_refused_with_its_path(schema: Any, path: str) -> None:
    for wrapped, prefix in ((schema, "here"), ({"anyOf": [{}, schema]}, "here.anyOf[1]")):
        if "$ref" in schema and wrapped is not schema:
            continue  # the reference starts at the root
        error = refuse(wrapped)
        assert (error.param, error.type) == (f"{prefix}.{path}", "invalid_request_error")


def test_ordinary_schemas_are_simple_and_others_are_not() -> None:
    def is_simple(schema: Any) -> bool:
        check = SchemaCheck(LIMITS)
        check.check(schema, "here")
        return check.is_simple

    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "A name", "maxLength": 100},
            "age": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 150}, {"type": "null"}]},
            "mood": {"type": "string", "enum": ["good", "bad"]},
            "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}, "maxItems": 5},
            "born": {"type": "string", "format": "date"},
        },
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"friend": {"type": "object", "properties": {"name": {"type": "string"}}}},
    }
    assert is_simple(person)
    others: list[Any] = [
        {"pattern": "a"},
        {"multipleOf": 2},
        {"allOf": [{}]},
        {"oneOf": [{}]},
        {"minItems": 101},
        {"minLength": 257},
        {"anyOf": [{}], "type": "string"},
        {"maximum": 10**13},
        {"enum": list(range(600))},
        {"const": {"a": 1}},
        {"patternProperties": {"a": {}}},
        {"minProperties": 1},
        {"properties": {str(n): {"$ref": "#"} for n in range(60)}},
    ]
    assert [is_simple({"properties": {"x": each}}) for each in others] == [False] * len(others)


def test_long_names_do_not_multiply_the_work() -> None:
    inner = {"properties": {str(n): {"type": "string"} for n in range(1000)}}
    schema = {"properties": {"x" * 200_000: inner}}
    began = time.thread_time()
    SchemaCheck(LIMITS).check(schema, "here")
    assert time.thread_time() - began < 0.5
    error = refuse({"properties": {"x" * 200_000: {"minItems": "x"}}})
    assert error.param is not None
    assert len(error.param) < 1100


KEYWORDS = sorted({name for schema, _ in MALFORMED for name in schema} | {"minLength", "not", "description", "x"})
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["string", "array", "object", "#", "#/$defs/a", "(", "a{9}", "date"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYWORDS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=30,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), JSON, max_size=5))
def test_any_json_is_translated_or_refused_with_a_path(schema: dict[str, Any]) -> None:
    param: str | None = "here"
    try:
        json.dumps(translate_schema(schema, "here"), allow_nan=False)
    except InvalidRequest as error:
        param = error.param
    assert (param or "").startswith("here")
