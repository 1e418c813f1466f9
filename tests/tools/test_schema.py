"""Schemas from elsewhere: which of them a model can be held to as they are."""

from typing import Any

import pytest

from antiphon.tools.function import tool
from antiphon.tools.schema import is_strict

TEXT = {"type": "string"}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        closed(),
        closed(text=TEXT, default=TEXT) | {"title": "Arguments"},
        closed(texts={"type": "array", "items": closed(text=TEXT)}),
        closed(text={"anyOf": [TEXT, {"type": "null"}]}),
        closed(place={"$ref": "#/$defs/Place"}) | {"$defs": {"Place": closed(city=TEXT)}},
    ],
)
def test_a_schema_with_closed_objects_and_nothing_optional_is_strict(schema: dict[str, Any]) -> None:
    assert is_strict(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {}},
        closed(text=TEXT) | {"required": []},
        closed(text=TEXT) | {"additionalProperties": True},
        closed(text=TEXT | {"default": "x"}),
        closed(anything={}),
        closed(texts={"type": "array", "items": {"type": "object", "properties": {"text": TEXT}}}),
        closed(text={"anyOf": [TEXT, {"type": "object"}]}),
        closed(place={"$ref": "#/$defs/Place"})
        | {"$defs": {"Place": {"type": "object", "properties": {"city": TEXT}}}},
        closed(text={"allOf": [TEXT]}),
    ],
)
def test_any_other_is_not(schema: dict[str, Any]) -> None:
    assert not is_strict(schema)


def test_our_own_strict_schemas_are() -> None:
    @tool
    def look_up(city: str, days: list[int], note: str | None = None) -> str:
        """Find something."""
        return ""

    assert is_strict(look_up.parameters)
