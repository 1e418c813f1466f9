"""Schemas and grammars that are cheap to send and expensive to compile.

The embedded model compiles them in the server process, so a bomb that gets through ends the server or fills its memory.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.loop_blocks import MAX_BLOCK
from support.upstream_server import json_of
from support.upstream_thread import ThreadedServer
from support.victim import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

MODEL = "smollm2-135m"
# llama.cpp and the weights take about 250 MB.
MAX_GROWTH_MB = 150


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server with the embedded model, for all tests of this module."""
    victim = Victim(tmp_path_factory.mktemp("bombs"), backends={"embedded": {"kind": "embedded", "context": 2048}})
    response = victim.ask("POST", "/v1/responses", make_body(text=make_format({"type": "integer"})))
    assert response.status == 200
    yield victim
    victim.stop()


@pytest.fixture(autouse=True)
def _bounded(server: Victim) -> Iterator[None]:
    """Check after each test that the server is alive, and that its memory and its event loop stayed within bounds."""
    server.reset_peak()
    before = server.rss_mb()
    log = len(server.log())
    yield
    assert server.is_running()
    assert server.ask("GET", "/healthz").status == 200
    assert server.peak_mb() < before + MAX_GROWTH_MB
    assert server.longest_block() < MAX_BLOCK
    assert "Traceback" not in server.log()[log:]


def make_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Hi", "max_output_tokens": 16, **fields}


def make_format(schema: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "x", "schema": schema}}


def make_function(schema: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", "parameters": schema}


def make_custom(definition: str, syntax: str = "lark") -> dict[str, Any]:
    return {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": syntax, "definition": definition}}


def refuse(server: Victim, **fields: Any) -> tuple[str, str]:
    """Return the param and the message of the error."""
    response = server.ask("POST", "/v1/responses", make_body(**fields))
    error = response.json["error"]
    assert (response.status, error["type"]) == (400, "invalid_request_error"), error
    return error["param"], error["message"]


BOMBS: dict[str, Any] = {
    "minItems": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000},
    "minLength": {"type": "string", "minLength": 1_000_000_000},
    "minProperties": {"type": "object", "minProperties": 1_000_000_000},
    "multipleOf": {"type": "integer", "multipleOf": 9_999_991},
    "enum": {"enum": list(range(6000))},
    "pattern": {"type": "string", "pattern": "((a{1000}){1000}){1000}"},
    "anyOf": {"anyOf": [{"type": "string", "maxLength": n} for n in range(600)]},
}


@pytest.mark.parametrize("keyword", BOMBS)
def test_schema_bomb_is_refused_by_keyword_everywhere(server: Victim, keyword: str) -> None:
    schema = {"type": "object", "properties": {"x": {"allOf": [BOMBS[keyword]]}}}
    path = f"properties.x.allOf[0].{keyword}"
    params = [
        refuse(server, text=make_format(BOMBS[keyword]))[0],
        refuse(server, text=make_format(schema))[0],
        refuse(server, tools=[make_function(schema)])[0],
        refuse(server, tools=[make_function(schema)], tool_choice="required", stream=True)[0],
        refuse(server, tools=[make_function({"$ref": "#/$defs/a", "$defs": {"a": schema}})], background=True)[0],
        refuse(server, tools=[make_custom(f"start: %json {json.dumps(schema)}")])[0],
    ]
    assert params == [
        f"text.format.schema.{keyword}",
        f"text.format.schema.{path}",
        f"tools[0].parameters.{path}",
        f"tools[0].parameters.{path}",
        f"tools[0].parameters.$defs.a.{path}",
        f"tools[0].format.definition.%json.{path}",
    ]


def test_intersected_patterns_are_refused_by_the_trial(server: Victim) -> None:
    parts = " & ".join(f"/(.|\\n)*{chr(97 + index % 26)}.{{{index}}}(.|\\n)*/" for index in range(39))
    param, message = refuse(server, tools=[make_custom(f"start: T\nT: {parts}")])
    assert (param, "cannot be read" in message) == ("tools[0].format.definition", True)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "allOf": [{"multipleOf": number} for number in (9973, 9967, 9949)]},
        {"$ref": "#/$defs/a0", "$defs": {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(2000)}
         | {"a2000": {}}},
        {"allOf": [{"anyOf": [{"properties": {f"p{n}": {"const": m}}} for m in range(20)]} for n in range(8)]},
        {"type": "array", "items": {"type": "array", "minItems": 9999}, "minItems": 9999, "prefixItems": [
            {"type": "array", "minItems": 9000 + n, "items": {"type": "string", "maxLength": n}} for n in range(400)]},
    ],
)  # fmt: skip
def test_combinations_within_the_limits_are_left_to_the_trial(server: Victim, schema: Any) -> None:
    response = server.ask("POST", "/v1/responses", make_body(text=make_format(schema)))
    assert response.status in (200, 400), response.json
    if response.status == 400:
        # Large schemas do not fit the context window either.
        assert response.json["error"]["param"] in ("text.format.schema", "input")


def test_many_spellings_of_one_reference_are_read_in_linear_time(server: Victim) -> None:
    name = "definition42"
    spellings = [
        "#/$defs/" + "".join(f"%{ord(each):02x}" if number >> index & 1 else each for index, each in enumerate(name))
        for number in range(3000)
    ]
    inner = [
        {"properties": {str(index): {"$ref": each} for index, each in enumerate(spellings[start : start + 1000])}}
        for start in (0, 1000, 2000)
    ]
    schema = {"anyOf": inner, "$defs": {name: {"type": "integer"}}}
    response = server.ask("POST", "/v1/responses", make_body(text=make_format(schema)))
    assert response.status in (200, 400), response.json


def test_background_bomb_is_refused_and_never_stored(server: Victim) -> None:
    param, message = refuse(server, text=make_format(BOMBS["minItems"]), background=True)
    assert param == "text.format.schema.minItems"
    assert "(setting grammars.items)" in message


KEYWORDS = [
    "type",
    "properties",
    "required",
    "items",
    "minItems",
    "maxItems",
    "enum",
    "const",
    "anyOf",
    "allOf",
    "$ref",
    "$defs",
    "pattern",
    "format",
    "minimum",
    "multipleOf",
    "additionalProperties",
    "minLength",
    "prefixItems",
]


def make_random(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(10 if depth < 4 else 7)
    if kind < 7:
        text = chance.choice(["string", "array", "(", "#", "a"])
        return [None, True, chance.randrange(-3, 30), 1.5, text, [], {}][kind]
    if kind == 7:
        return [make_random(chance, depth + 1) for _ in range(chance.randrange(3))]
    return {chance.choice(KEYWORDS): make_random(chance, depth + 1) for _ in range(chance.randrange(1, 4))}


def test_random_json_as_a_schema_never_fails_the_server(server: Victim) -> None:
    chance = random.Random(14)
    refused = 0
    for number in range(30):
        schema = {chance.choice(KEYWORDS): make_random(chance) for _ in range(chance.randrange(1, 4))}
        fields: dict[str, Any] = {"text": make_format(schema)} if number % 2 else {"tools": [make_function(schema)]}
        response = server.ask("POST", "/v1/responses", make_body(**fields))
        assert response.status in (200, 400), (schema, response.json)
        if response.status == 400:
            refused += 1
            assert response.json["error"]["param"].startswith(("text.format.schema", "tools[0].parameters")), schema
    assert 0 < refused < 30


def test_bomb_for_an_upstream_model_is_refused_by_its_trial(
    victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}]}
    options = {"kind": "chat_completions", "base_url": upstream(json_of(answer)).url, "models": ["m"]}
    other = victim(backends={"up": options}, grammars={"compile_seconds": 0.2})
    doubled = "".join(f"A{number}: A{number - 1} A{number - 1}\n" for number in range(1, 41))
    body = {"model": "m", "input": "Hi", "tools": [make_custom(f'start: A40\n{doubled}A0: "a"')]}
    response = other.ask("POST", "/v1/responses", body)
    assert (response.status, response.json["error"]["param"]) == (400, "tools[0].format.definition")
    body["tools"] = [make_custom('start: "a"+')]
    assert other.ask("POST", "/v1/responses", body).status == 200
    assert other.longest_block() < MAX_BLOCK
    assert other.peak_mb() < 200


def test_long_input_of_a_custom_tool_is_matched_beside_the_loop(
    victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    arguments = json.dumps({"input": "a" * 100_000})
    call = {"id": "call_1", "type": "function", "function": {"name": "c", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    options = {"kind": "chat_completions", "base_url": upstream(json_of(answer)).url, "models": ["m"]}
    other = victim(backends={"up": options})
    body = {"model": "m", "input": "Hi", "tools": [make_custom("start: /(a|b)+/")]}
    response = other.ask("POST", "/v1/responses", body)
    assert [item["type"] for item in response.json["output"]] == ["custom_tool_call"]
    assert other.longest_block() < MAX_BLOCK
