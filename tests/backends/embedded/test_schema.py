from typing import Any

import pytest

from antiphon.backends.embedded.schema import fit_schema
from antiphon.errors import InvalidRequest


def fit(schema: dict[str, Any]) -> dict[str, Any]:
    fitted = fit_schema(schema, "here")
    del fitted["x-guidance"]
    return fitted


def test_objects_are_closed_where_the_schema_leaves_it_open() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert fit({"type": "array", "items": inner}) == {
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
def test_objects_stay_open_where_closing_would_contradict_the_schema(schema: dict[str, Any]) -> None:
    assert fit(schema) == schema


def test_remarks_and_empty_demands_are_left_out() -> None:
    assert fit({"type": "array", "items": {"type": "string", "format": "uri"}, "uniqueItems": False}) == {
        "type": "array",
        "items": {"type": "string"},
    }


def test_a_known_format_is_kept() -> None:
    assert fit({"type": "string", "format": "date"}) == {"type": "string", "format": "date"}


def test_a_property_may_be_named_like_a_keyword() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "format": {"type": "string"}}}
    assert fit(schema) == {**schema, "additionalProperties": False}


def test_very_long_lists_are_cut_within_the_schema() -> None:
    assert fit({"type": "array", "maxItems": 10**6}) == {"type": "array", "maxItems": 1000}
    assert fit({"type": "array", "maxItems": 5000, "minItems": 4000}) == {
        "type": "array",
        "maxItems": 4000,
        "minItems": 4000,
    }


def test_a_client_cannot_set_the_compilers_own_options() -> None:
    assert fit_schema({"x-guidance": {"lenient": True}}, "here")["x-guidance"].get("lenient") is None


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "here.not"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "here.properties.a.uniqueItems"),
        ({"anyOf": [{}, {"items": {"if": {}}}]}, "here.anyOf[1].items.if"),
        ({"$defs": {"a": {"propertyNames": {}}}}, "here.$defs.a.propertyNames"),
    ],
)
def test_what_a_grammar_cannot_express_is_refused_by_its_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        fit_schema(schema, "here")
    assert refusal.value.param == place


def test_a_bottomless_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        fit_schema(schema, "here")


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
def test_a_schema_that_no_finite_value_fits_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="without end") as refusal:
        fit_schema(schema, "here")
    assert (refusal.value.param, refusal.value.code) == ("here", "unsupported_schema")


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
def test_a_schema_that_leads_back_to_itself_may_still_end(schema: dict[str, Any]) -> None:
    assert fit_schema(schema, "here")["x-guidance"]
