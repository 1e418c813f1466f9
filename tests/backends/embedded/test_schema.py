"""Translation of JSON schemas for the grammar compiler."""

from typing import Any

import pytest

from antiphon.backends.embedded.schema import translate_schema
from antiphon.errors import InvalidRequest


def translate(schema: dict[str, Any]) -> dict[str, Any]:
    translated = translate_schema(schema, "here")
    del translated["x-guidance"]
    return translated


def test_objects_are_closed_by_default() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert translate({"type": "array", "items": inner}) == {
        "type": "array",
        "items": {**inner, "additionalProperties": False},
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"a": {}}, "required": ["a", "b"]},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"type": "object"},
    ],
)
def test_objects_stay_open_if_schema_needs_it(schema: dict[str, Any]) -> None:
    assert translate(schema) == schema


def test_annotations_and_false_keywords_are_dropped() -> None:
    assert translate({"type": "array", "items": {"type": "string", "format": "uri"}, "uniqueItems": False}) == {
        "type": "array",
        "items": {"type": "string"},
    }


def test_known_format_is_retained() -> None:
    assert translate({"type": "string", "format": "date"}) == {"type": "string", "format": "date"}


def test_property_may_have_a_keyword_as_name() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "format": {"type": "string"}}}
    assert translate(schema) == {**schema, "additionalProperties": False}


def test_max_items_is_limited_within_the_schema() -> None:
    assert translate({"type": "array", "maxItems": 10**6}) == {"type": "array", "maxItems": 1000}
    assert translate({"type": "array", "maxItems": 5000, "minItems": 4000}) == {
        "type": "array",
        "maxItems": 4000,
        "minItems": 4000,
    }


def test_client_cannot_set_compiler_options() -> None:
    assert translate_schema({"x-guidance": {"lenient": True}}, "here")["x-guidance"].get("lenient") is None


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"not": {}}, "here.not"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "here.properties.a.uniqueItems"),
        ({"anyOf": [{}, {"items": {"if": {}}}]}, "here.anyOf[1].items.if"),
        ({"$defs": {"a": {"propertyNames": {}}}}, "here.$defs.a.propertyNames"),
    ],
)
def test_unsupported_keyword_is_rejected_with_param_path(schema: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translate_schema(schema, "here")
    assert caught.value.param == param


def test_deeply_nested_schema_is_rejected() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        translate_schema(schema, "here")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/a"}},
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}},
        },
    ],
)
def test_schema_without_finite_values_is_rejected(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="always contains itself") as caught:
        translate_schema(schema, "here")
    assert (caught.value.param, caught.value.code) == ("here", "unsupported_schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "string"}}},
        {"type": "object", "properties": {"$ref": {"type": "string"}}, "required": ["$ref"]},
        {"const": {"$ref": "#"}},
        {"$ref": "#/nowhere"},
        {"anyOf": 5, "allOf": {}, "type": "object", "properties": [], "required": [[]], "$ref": 3},
        {"type": "array", "minItems": "many", "prefixItems": 1},
        {"$ref": "#/$defs/0/x", "$defs": [1]},
    ],
)
def test_recursive_schema_with_finite_values_is_accepted(schema: dict[str, Any]) -> None:
    assert translate_schema(schema, "here")["x-guidance"]
