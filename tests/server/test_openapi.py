"""The OpenAPI document and the server agree."""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from antiphon.engine.items import make_page
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.conversation import AddItems, CreateConversation
from antiphon.protocol.prompt import PromptDefinition
from antiphon.protocol.request import CountRequest, CreateRequest
from antiphon.server.openapi import make_openapi_document
from support import strategies
from support.openapi_document import load_document, make_test_router
from support.schema_validator import SchemaValidator


@functools.cache
def make_validator(name: str) -> SchemaValidator:
    """Return a validator for a component of the document."""
    components = load_document(requires_key=False)["components"]
    return SchemaValidator({"$ref": f"#/components/schemas/{name}", "components": components})


def list_errors(name: str, value: Any) -> list[str]:
    return [error.message for error in make_validator(name).iter_errors(value)]


def to_json(value: Any) -> Any:
    return json.loads(codec.encode(value))


def test_document_is_public_and_constant(guarded: Any) -> None:
    first, second = guarded.ask("GET", "/openapi.json"), guarded.ask("GET", "/openapi.json")
    assert (first.status, first.headers["content-type"], first.body) == (200, "application/json", second.body)
    assert first.json == load_document(requires_key=True)


def list_faults(document: dict[str, Any]) -> list[str]:
    return [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()]


def test_document_is_valid_openapi() -> None:
    assert list_faults(load_document(requires_key=False)) == []


def test_document_with_keys_is_valid_openapi() -> None:
    document, other = load_document(requires_key=True), load_document(requires_key=False)
    schemas = document["components"]["schemas"]
    assert schemas == other["components"]["schemas"]
    # Validating these schemas again takes seconds. Empty ones take their place, so that references are still checked.
    components = document["components"] | {"schemas": {name: {} for name in schemas}}
    assert list_faults(document | {"components": components}) == []


def test_every_component_is_a_valid_schema_and_is_referenced() -> None:
    document = load_document(requires_key=False)
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert referred == set(schemas)


@pytest.mark.parametrize("changes", [{}, {"stateless": True}])
def test_document_lists_exactly_the_routes(changes: dict[str, Any]) -> None:
    router = make_test_router(**changes)
    documented = {
        (method.upper(), path)
        for path, operations in make_openapi_document(router, requires_key=False)["paths"].items()
        for method in operations
    }
    assert documented == {(entry.method, entry.path.replace("...", "")) for entry in router.entries}


def operations(document: dict[str, Any]) -> dict[str, Any]:
    return {described["operationId"]: described for path in document["paths"].values() for described in path.values()}


def test_every_operation_has_a_unique_id_and_a_summary() -> None:
    described = operations(load_document(requires_key=False))
    assert len(described) == len(make_test_router().entries)
    assert all(operation["summary"] for operation in described.values())


def test_key_is_required_if_the_server_has_keys() -> None:
    security = {
        guarded: operations(load_document(requires_key=guarded))["listModels"]["security"] for guarded in (False, True)
    }
    assert security == {False: [{}, {"bearer": []}], True: [{"bearer": []}]}
    assert operations(load_document(requires_key=True))["checkLife"]["security"] == []


def test_operation_lists_its_statuses() -> None:
    described = operations(load_document(requires_key=True))
    statuses = {name: " ".join(described[name]["responses"]) for name in ("createResponse", "getItem", "checkLife")}
    assert statuses == {
        "createResponse": "200 400 401 403 404 413 429 500 502 503 504",
        "getItem": "200 400 401 403 404 500",
        "checkLife": "200 400 500",
    }


def test_query_parameters_have_their_bounds() -> None:
    parameters = operations(load_document(requires_key=False))["listItems"]["parameters"]
    assert [(each["name"], each["in"]) for each in parameters] == [
        ("conversation_id", "path"),
        ("include", "query"),
        ("after", "query"),
        ("limit", "query"),
        ("order", "query"),
    ]
    assert parameters[3]["schema"] == {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}


BODIES: dict[type, Callable[[bytes], Any]] = {
    CreateRequest: codec.decode_request,
    CountRequest: codec.decode_count,
    CreateConversation: codec.decode_create_conversation,
    AddItems: codec.decode_add_items,
    PromptDefinition: codec.decode_prompt_definition,
}


@pytest.mark.parametrize("body", BODIES)
@given(data=st.data())
def test_generated_requests_match_the_document(body: type, data: st.DataObject) -> None:
    value = data.draw(strategies.instances(body))
    assert list_errors(body.__name__, to_json(value)) == []


@given(strategies.responses())
def test_generated_responses_match_the_document(response: Any) -> None:
    assert list_errors("Response", to_json(response)) == []


@given(strategies.all_events())
def test_generated_events_match_the_document(event: Any) -> None:
    assert list_errors("Event", to_json(event)) == []


@given(st.lists(strategies.all_items(), max_size=3))
def test_generated_item_pages_match_the_document(items: list[Any]) -> None:
    assert list_errors("ItemPage", to_json(make_page(items, has_more=False))) == []


def has_whole_floats(value: Any) -> bool:
    """Return True if a float stands for an integer. JSON Schema accepts 1.0 as an integer; the codec does not."""
    if isinstance(value, dict | list):
        return any(map(has_whole_floats, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value.is_integer()


def complete(value: Any) -> Any:
    """We forgive a missing type where there is only one that it can be; the document does not offer to."""
    if isinstance(value, list):
        return [complete(element) for element in value]
    if not isinstance(value, dict):
        return value
    whole = {name: complete(inner) for name, inner in value.items()}
    if isinstance(whole.get("output"), dict):
        whole["output"] = {"type": "computer_screenshot", **whole["output"]}
    if isinstance(whole.get("summary"), list):
        whole["summary"] = [
            {"type": "summary_text", **part} if isinstance(part, dict) else part for part in whole["summary"]
        ]
    return whole


def is_accepted(body: type, value: Any) -> bool:
    try:
        BODIES[body](json.dumps(value).encode())
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("body", BODIES)
@given(data=st.data())
def test_codec_accepts_exactly_the_documented_requests(body: type, data: st.DataObject) -> None:
    value = data.draw(strategies.damaged(strategies.instances(body)))
    assume(not has_whole_floats(value) and " - at " not in json.dumps(value))
    found = list_errors(body.__name__, complete(value))
    assert is_accepted(body, value) == (not found), found


@pytest.mark.parametrize(
    ("name", "values"), [("CreateRequest", strategies.instances(CreateRequest)), ("Event", strategies.all_events())]
)
@given(data=st.data())
def test_compiled_validator_accepts_exactly_the_valid_values(name: str, values: Any, data: st.DataObject) -> None:
    value = data.draw(strategies.damaged(values))
    validator = make_validator(name)
    assert validator.is_accepted(value) == validator.described.is_valid(value)


@pytest.mark.parametrize(
    ("accepted", "value"),
    [
        (True, {"input": [{"role": "user", "content": "hi"}]}),
        (True, {"input": [{"type": None, "role": "user", "content": "hi"}, {"id": "msg_1"}]}),
        (True, {"input": [{"type": "acme:thing", "x": 1}], "unheard_of": 1}),
        (True, {"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "g"}]}),
        (True, {"tool_choice": {"type": "tool", "name": "f"}}),
        (True, {"tool_choice": {"type": "tool", "function": {"name": "f"}}}),
        (True, {"tools": [{"type": "function", "name": "f", "function": None}]}),
        (True, {"tools": [{"type": "tool", "function": {"name": "f"}}]}),  # of an unknown type
        (True, {"tool_choice": "required"}),
        (True, {"metadata": {"k" * 64: "v" * 512}}),
        (False, {"input": [{"role": "robot", "content": "hi"}]}),
        (False, {"input": [{"id": "msg_1", "role": "user"}]}),
        (False, {"input": [{"x": 1}]}),
        (False, {"tools": [{"type": "function", "name": ""}]}),
        (False, {"tools": [{"type": "function", "name": "f", "function": {"name": ""}}]}),
        (False, {"tool_choice": "perhaps"}),
        (False, {"temperature": 2.1}),
        (False, {"top_logprobs": 21}),
        (False, {"metadata": {"k" * 65: "v"}}),
        (False, {"metadata": {str(number): "v" for number in range(17)}}),
        (False, {"include": ["everything"]}),
    ],
)
def test_codec_and_document_agree_on_edge_cases(accepted: bool, value: Any) -> None:
    assert (is_accepted(CreateRequest, value), not list_errors("CreateRequest", value)) == (accepted, accepted)


def test_codec_and_document_agree_on_the_item_limit() -> None:
    bodies = [{"items": [{"role": "user", "content": "hi"}] * number} for number in (20, 21)]
    assert [is_accepted(AddItems, body) for body in bodies] == [not list_errors("AddItems", body) for body in bodies]
    assert not is_accepted(AddItems, bodies[1])


def test_sdk_requests_and_responses_match_the_document(server: Any) -> None:
    client = server.client()
    made = client.responses.create(model="scripted", input="hello")
    talk = client.conversations.create()
    item = {"type": "message", "role": "user", "content": "hello"}
    exchanges = {
        ("CreateRequest", "Response"): client.responses.with_raw_response.create(model="scripted", input="hello"),
        ("CountRequest", "InputTokens"): client.responses.input_tokens.with_raw_response.count(
            model="scripted", input="hello"
        ),
        ("CompactRequest", "CompactedResponse"): client.responses.with_raw_response.compact(
            model="scripted", input="hello"
        ),
        ("CreateConversation", "Conversation"): client.conversations.with_raw_response.create(),
        ("UpdateConversation", "Conversation"): client.conversations.with_raw_response.update(talk.id, metadata={}),
        ("AddItems", "ItemPage"): client.conversations.items.with_raw_response.create(talk.id, items=[item]),
        (None, "Response"): client.responses.with_raw_response.retrieve(made.id),
        (None, "ItemPage"): client.responses.input_items.with_raw_response.list(made.id),
        (None, "ModelList"): client.models.with_raw_response.list(),
        (None, "DeletedConversation"): client.conversations.with_raw_response.delete(talk.id),
    }
    found = {
        (sent, got): ([] if sent is None else list_errors(sent, json.loads(raw.http_request.content or b"{}")))
        + list_errors(got, json.loads(raw.text))
        for (sent, got), raw in exchanges.items()
    }
    assert found == {kinds: [] for kinds in exchanges}


def test_sdk_streams_match_the_document(server: Any) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "weather", "stream": True})
    lines = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line.startswith(b"data: {")]
    assert len(lines) > 5
    assert [list_errors("Event", json.loads(line)) for line in lines] == [[]] * len(lines)
