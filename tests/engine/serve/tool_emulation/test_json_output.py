"""JSON output: schemas, the check of an answer, and answers of a model without JSON support."""

import json
from typing import Any

import pytest

from antiphon.engine.serve.tool_emulation import json_output as module
from antiphon.engine.serve.tool_emulation.json_output import JsonOutputCheck, OutputSchema
from antiphon.errors import InvalidRequest
from antiphon.protocol.request import JsonObjectFormat, JsonSchemaFormat
from support.tool_emulation import call

# Schemas


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
def test_schema_patterns_match_in_linear_time(
    schema: dict[str, Any], value: Any, faults: list[str], draft: str
) -> None:
    assert OutputSchema({"$schema": draft, **schema}).list_faults(value) == faults


@pytest.mark.parametrize("draft", DRAFTS)
def test_subschema_with_its_own_draft_is_checked_the_same(draft: str) -> None:
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
def test_unsupported_pattern_accepts_any_value(schema: dict[str, Any], value: Any) -> None:
    assert OutputSchema(schema).list_faults(value) == []


def test_undeclared_properties_are_found() -> None:
    schema = OutputSchema({"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False})
    assert schema.list_faults({"a": 1, "b": 1}) == ["$: Unevaluated properties are not allowed ('b' was unexpected)"]


@pytest.mark.parametrize("pattern", ["(", "(?=a)a{99999999999999999999}"])
def test_pattern_that_is_not_a_regex_is_refused(pattern: str) -> None:
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
def test_unique_items_compares_by_json_equality(value: list[Any], unique: bool) -> None:
    faults = OutputSchema({"uniqueItems": True}).list_faults(value)
    assert faults == ([] if unique else [f"$: {value!r} has non-unique elements"])


def test_schema_with_exponential_cost_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, Any] = {f"p{n}": {"anyOf": [{"$ref": f"#/$defs/p{n + 1}"}] * 2} for n in range(30)}
    schema = OutputSchema({"$ref": "#/$defs/p0", "$defs": {**parts, "p30": {"type": "null"}}})
    assert schema.list_faults(None) == []
    monkeypatch.setattr(module, "_TIME_LIMIT", 0.1)
    with pytest.raises(InvalidRequest, match="takes too long") as caught:
        schema.list_faults(1)
    assert (caught.value.param, caught.value.code) == ("text.format.schema", "invalid_value")


def test_too_large_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIME_LIMIT", 0.05)
    with pytest.raises(InvalidRequest, match="takes too long"):
        OutputSchema({"properties": {f"p{n}": {"type": "string"} for n in range(5000)}})


def test_number_too_large_for_a_float_is_a_fault() -> None:
    faults = OutputSchema({"multipleOf": 0.5}).list_faults(json.loads("1" * 400))
    assert faults == ["$: it has a number that is too large to check"]


# The check of an answer


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"$ref": "#/$defs/short"}},
    "required": ["n"],
    "$defs": {"short": {"type": "string", "maxLength": 2}},
}
CHECK = JsonOutputCheck(JsonSchemaFormat("number", "a number", SCHEMA))


def test_valid_answer_loses_its_code_fence() -> None:
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
def test_faults_name_their_json_path(text: str, faults: list[str]) -> None:
    assert CHECK.parse(text) == (text, faults)


def test_json_object_format_accepts_only_objects() -> None:
    check = JsonOutputCheck(JsonObjectFormat())
    assert [check.parse(text)[1] for text in ('{"a": [1]}', "[1]")] == [[], ["not a JSON object"]]


def test_instructions_have_schema_name_and_description() -> None:
    prompt = CHECK.make_instructions()
    assert ("'number': a number" in prompt, '"maxLength": 2' in prompt) == (True, True)


def test_invalid_schema_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        JsonOutputCheck(JsonSchemaFormat("n", schema={"type": "nonsense"}))
    assert (caught.value.param, caught.value.code) == ("text.format.schema", "invalid_value")


@pytest.mark.parametrize("reference", ["https://example.org/schema.json", "#/$defs/missing"])
def test_external_reference_in_schema_is_refused(reference: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        JsonOutputCheck(JsonSchemaFormat("n", schema={"$ref": reference})).parse("{}")
    assert (caught.value.param, caught.value.code) == ("text.format.schema", "invalid_value")


def test_deeply_nested_answer_is_invalid_json() -> None:
    assert CHECK.parse("[" * 100_000)[1][0].startswith("not valid JSON: ")


def test_schema_that_refers_to_itself_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="refers to itself without end"):
        JsonOutputCheck(JsonSchemaFormat("n", schema={"$ref": "#"})).parse("1")


# Answers of a model without JSON support


ANSWER_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {
    "format": {"type": "json_schema", "name": "number", "schema": ANSWER_SCHEMA, "strict": True},
    "verbosity": "low",
}
OBJECT = {"format": {"type": "json_object"}}
LACKS = ["json_schema"]


def texts(answer: Any) -> list[str]:
    return [part["text"] for item in answer.output if item["type"] == "message" for part in item["content"]]


async def test_schema_is_sent_in_the_instructions(emulate: Any) -> None:
    harness = await emulate({"text": '{"n": 1}'}, lacks=LACKS)
    answer = await harness.ask(text=FORMAT, instructions="Be brief.")
    request = answer.turns[0].request
    assert (request.text.format, request.text.verbosity) == (None, "low")
    assert request.instructions.startswith("Be brief.\n\n")
    assert '"required": ["n"]' in request.instructions
    assert (texts(answer), answer.response["instructions"]) == (['{"n": 1}'], "Be brief.")
    assert answer.response["text"]["format"]["type"] == "json_schema"


async def test_backend_with_json_schema_gets_the_format_unchanged(emulate: Any) -> None:
    harness = await emulate({"text": "whatever"})
    answer = await harness.ask(text=FORMAT)
    assert (answer.turns[0].request.text.format.name, texts(answer)) == ("number", ["whatever"])


@pytest.mark.parametrize("form", [FORMAT, OBJECT])
async def test_code_fence_around_the_answer_is_removed(emulate: Any, form: Any) -> None:
    harness = await emulate({"text": '```json\n{"n": 1}\n```'}, lacks=LACKS)
    assert texts(await harness.ask(text=form)) == ['{"n": 1}']


async def test_invalid_answer_is_hidden_and_retried_once(emulate: Any) -> None:
    rules = [{"user": "'n' is a required property", "answers": ['{"n": 2}']}]
    harness = await emulate({"reasoning": "Hm."}, {"text": '{"m": 2}'}, lacks=LACKS, rules=rules)
    answer = await harness.ask(text=FORMAT)
    assert (texts(answer), [item["type"] for item in answer.output]) == (['{"n": 2}'], ["reasoning", "message"])
    assert [item["type"] for item in answer.read] == ["message", "reasoning", "message", "message"]


async def test_invalid_answer_after_the_retry_fails_the_response(emulate: Any) -> None:
    harness = await emulate({"text": "One."}, lacks=LACKS)
    answer = await harness.ask(text=FORMAT)
    (error,) = answer.get_events("error")
    assert (answer.response["status"], answer.output, len(answer.turns), error["error"]["type"]) == (
        "failed",
        [],
        2,
        "model_error",
    )
    assert answer.response["error"] == {
        "code": "invalid_output",
        "message": "The model's answer does not match 'text.format': "
        "not valid JSON: Expecting value: line 1 column 1 (char 0)",
        "type": "model_error",
    }


async def test_text_before_a_call_is_commentary_and_not_checked(emulate: Any) -> None:
    harness = await emulate({"text": "I look it up."}, call("f", {}), lacks=LACKS)
    answer = await harness.ask(text=FORMAT, tools=[{"type": "function", "name": "f"}])
    assert [(item["type"], item.get("phase")) for item in answer.output] == [
        ("message", "commentary"),
        ("function_call", None),
    ]


async def test_refusal_is_not_checked(emulate: Any) -> None:
    harness = await emulate({"refusal": "No."}, lacks=LACKS)
    answer = await harness.ask(text=FORMAT)
    assert (answer.response["status"], answer.output[0]["content"]) == (
        "completed",
        [{"type": "refusal", "refusal": "No."}],
    )


async def test_cut_off_answer_is_not_checked(emulate: Any) -> None:
    harness = await emulate({"text": '{"n": '}, {"finish": "length"}, lacks=LACKS)
    answer = await harness.ask(text=FORMAT)
    assert (answer.response["status"], texts(answer)) == ("incomplete", ['{"n": '])


async def test_backend_with_any_tool_gets_only_json_emulation(emulate: Any) -> None:
    harness = await emulate({"text": '{"n": 1}'}, lacks=LACKS, native_tools=None)
    answer = await harness.ask(
        text=FORMAT, tools=[{"type": "mcp", "server_label": "l", "server_url": "https://a.example"}]
    )
    assert (texts(answer), answer.turns[0].request.tools[0].type) == (['{"n": 1}'], "mcp")
