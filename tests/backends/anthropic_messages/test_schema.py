"""Schemas in the part of the language that can be enforced."""

from typing import Any

import pytest

from antiphon.backends.anthropic_messages.schema import fit


def test_objects_are_closed_and_limits_are_said() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "description": "In years"},
            "mail": {"type": ["string", "null"], "format": "email"},
            "code": {"type": "string", "format": "acme"},
            "kind": {"oneOf": [{"const": "a"}, {"$ref": "#/$defs/Kind"}]},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["age"],
        "$defs": {"Kind": {"properties": {"b": {"type": "boolean"}}}},
    }
    assert fit(schema) == {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "description": 'In years\n\n{"minimum": 0}'},
            "mail": {"type": ["string", "null"], "format": "email"},
            "code": {"type": "string", "description": '{"format": "acme"}'},
            "kind": {"anyOf": [{"const": "a"}, {"$ref": "#/$defs/Kind"}]},
            "tags": {
                "type": "array",
                "items": {"enum": ["x", "y"]},
                "minItems": 1,
                "description": '{"maxItems": 3}',
            },
        },
        "required": ["age"],
        "$defs": {"Kind": {"properties": {"b": {"type": "boolean"}}, "additionalProperties": False}},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"a": {"type": "object", "additionalProperties": True}}},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"type": "array", "items": True},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"$ref": "#/$defs/Tree", "$defs": {"Tree": {"properties": {"kids": {"items": {"$ref": "#/$defs/Tree"}}}}}},
    ],
)
def test_a_schema_that_leaves_names_open_or_has_no_end_does_not_fit(schema: Any) -> None:
    assert fit(schema) is None
