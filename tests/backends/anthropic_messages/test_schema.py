"""Restriction of JSON schemas to enforceable keywords."""

from typing import Any

import pytest

from antiphon.backends.anthropic_messages.schema import restrict_schema


def test_objects_are_closed_and_unsupported_keywords_described() -> None:
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
    assert restrict_schema(schema) == {
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
def test_open_or_recursive_schema_is_not_restricted(schema: Any) -> None:
    assert restrict_schema(schema) is None
