"""Answers that must be JSON."""

import pytest

from antiphon.engine.serve.tool_emulation.json_output import JsonOutputCheck
from antiphon.errors import InvalidRequest
from antiphon.protocol.request import JsonObjectFormat, JsonSchemaFormat

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"$ref": "#/$defs/short"}},
    "required": ["n"],
    "$defs": {"short": {"type": "string", "maxLength": 2}},
}
CHECK = JsonOutputCheck(JsonSchemaFormat("number", "a number", SCHEMA))


def test_an_answer_that_fits_loses_what_is_around_it() -> None:
    assert CHECK.parse('```json\n{"n": 1, "s": "ab"}\n```\n') == ('{"n": 1, "s": "ab"}', [])


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("I think 1.", ["not valid JSON: Expecting value: line 1 column 1 (char 0)"]),
        ('{"n": "1", "s": "abc"}', ["$.n: '1' is not of type 'integer'", "$.s: 'abc' is too long"]),
        ("{}", ["$: 'n' is a required property"]),
        ('{"n": NaN}', ["not valid JSON: NaN is not a JSON value"]),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, faults: list[str]) -> None:
    assert CHECK.parse(text) == (text, faults)


def test_an_object_is_an_object() -> None:
    check = JsonOutputCheck(JsonObjectFormat())
    assert [check.parse(text)[1] for text in ('{"a": [1]}', "[1]")] == [[], ["not a JSON object"]]


def test_the_model_is_told_the_schema_and_what_it_is_for() -> None:
    told = CHECK.make_instructions()
    assert ("'number': a number" in told, '"maxLength": 2' in told) == (True, True)


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        JsonOutputCheck(JsonSchemaFormat("n", schema={"type": "nonsense"}))
    assert (caught.value.param, caught.value.code) == ("text.format.schema", "invalid_value")


@pytest.mark.parametrize("reference", ["https://example.org/schema.json", "#/$defs/missing"])
def test_nothing_is_fetched_for_a_schema(reference: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        JsonOutputCheck(JsonSchemaFormat("n", schema={"$ref": reference})).parse("{}")
    assert (caught.value.param, caught.value.code) == ("text.format.schema", "invalid_value")


def test_an_answer_without_end_is_no_json() -> None:
    assert CHECK.parse("[" * 100_000)[1][0].startswith("not valid JSON: ")


def test_a_schema_without_end_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="refers to itself without end"):
        JsonOutputCheck(JsonSchemaFormat("n", schema={"$ref": "#"})).parse("1")
