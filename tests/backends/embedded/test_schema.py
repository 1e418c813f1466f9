"""Translation of JSON schemas for the grammar compiler."""

import time
from typing import Any

import pytest

from antiphon.backends.embedded.schema import translate_schema
from antiphon.config.settings import GrammarLimits
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
        {"$ref": "#item", "$defs": {"a": {"$anchor": "item", "type": "string"}}},
        {"$id": "http://a/b", "$ref": "http://a/b#/$defs/a", "$defs": {"a": {"type": "string"}}},
        {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"type": "string"}}}},
    ],
)
def test_recursive_schema_with_finite_values_is_accepted(schema: dict[str, Any]) -> None:
    assert translate_schema(schema, "here")["x-guidance"]


def test_references_of_any_spelling_share_one_definition() -> None:
    spellings = ["#/$defs/a", "#/%24defs/a", "#/$defs/%61", "#/%24defs/%61"]
    schema = {"anyOf": [{"$ref": each} for each in spellings], "$defs": {"a": {"type": "integer"}, "b": {}}}
    assert translate(schema) == {"anyOf": [{"$ref": "#/$defs/a"}] * 4, "$defs": {"a": {"type": "integer"}}}


def test_definitions_of_one_name_stay_apart() -> None:
    schema = {
        "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/definitions/a"}, {"$ref": "#/$defs/a~1b"}],
        "$defs": {"a": {"type": "integer"}, "a/b": {"type": "null"}},
        "definitions": {"a": {"type": "string"}},
    }
    translated = translate(schema)
    targets = [translated["$defs"][each["$ref"].removeprefix("#/$defs/")] for each in translated["anyOf"]]
    assert targets == [{"type": "integer"}, {"type": "string"}, {"type": "null"}]


def test_recursive_root_is_a_definition_of_itself() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/root"}}, "additionalProperties": False}
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert translate(schema) == {**node, "$defs": {"root": node}}


def test_annotations_are_not_compiled() -> None:
    assert translate({"type": "string", "title": "t", "description": 5, "deprecated": True, "x": [1]}) == {
        "type": "string"
    }


def test_maximum_counts_are_reduced_and_whole_numbers_read() -> None:
    limits = GrammarLimits(items=3, length=5, properties=4)
    schema = {"maxItems": 1e9, "minItems": 2.0, "maxLength": 10**12, "maxProperties": 3}
    translated = translate_schema(schema, "here", limits=limits)
    del translated["x-guidance"]
    assert translated == {"maxItems": 3, "minItems": 2, "maxLength": 5, "maxProperties": 3}


def test_thousands_of_references_are_resolved_in_linear_time() -> None:
    spellings = [f"#/$defs/{''.join(f'%{ord(c):02x}' if n >> i & 1 else c for i, c in enumerate('definition42'))}"
                 for n in range(3000)]  # fmt: skip
    assert len(set(spellings)) == 3000
    schema = {
        "type": "array",
        "prefixItems": [{"$ref": each} for each in spellings[:500]],
        "items": {"type": "object", "properties": {f"p{n}": {"$ref": each} for n, each in enumerate(spellings[:900])}},
        "$defs": {"definition42": {"type": "object", "properties": {"a": {"$ref": "#"}}}},
    }
    chain = {
        f"a{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/a{n + 1}"}}, "required": ["a"]}
        for n in range(2000)
    }
    for each in (schema, {"$ref": "#/$defs/a0", "$defs": {**chain, "a2000": {"type": "null"}}}):
        began = time.thread_time()
        assert translate_schema(each, "here")["$defs"]
        assert time.thread_time() - began < 2


def test_references_that_repeat_a_large_part_are_refused() -> None:
    schema: dict[str, Any] = {"enum": ["x" * 50_000]}
    pointer = "#"
    references = []
    for _ in range(20):
        schema = {"type": "array", "items": schema}
        pointer += "/items"
        references.append({"$ref": pointer})
    with pytest.raises(InvalidRequest, match=r"grammars\.schema_bytes") as caught:
        translate_schema({**schema, "prefixItems": references}, "here")
    assert caught.value.param == "here"
