"""The document says what the server does: nothing less, nothing more."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from antiphon.engine.engine import Engine
from antiphon.engine.items import make_page
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.conversation import AddItems, CreateConversation
from antiphon.protocol.prompt import PromptDefinition
from antiphon.protocol.request import CountRequest, CreateRequest
from antiphon.server.openapi import make_openapi_document
from antiphon.server.router import Router
from antiphon.server.routes import make_router
from antiphon.store.memory.store import MemoryStore
from support import strategies
from support.live_server import make_settings


def route(**changes: Any) -> Router:
    settings = make_settings(**changes)
    return make_router(Engine(backends={}, store=MemoryStore()), settings)


ROUTER = route()
DOCUMENT = make_openapi_document(ROUTER, requires_key=False)


def validator(name: str) -> Draft202012Validator:
    """What checks an instance against a component of the document."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


VALIDATORS = {name: validator(name) for name in DOCUMENT["components"]["schemas"]}


def faults(name: str, value: Any) -> list[str]:
    return [error.message for error in VALIDATORS[name].iter_errors(value)]


def wired(value: Any) -> Any:
    return json.loads(codec.encode(value))


def test_the_document_is_public_json_and_the_same_every_time(guarded: Any) -> None:
    first, second = guarded.ask("GET", "/openapi.json"), guarded.ask("GET", "/openapi.json")
    assert (first.status, first.headers["content-type"], first.body) == (200, "application/json", second.body)
    assert first.json == make_openapi_document(ROUTER, requires_key=True)


@pytest.mark.parametrize("guarded", [False, True])
def test_the_document_is_valid(guarded: bool) -> None:
    document = make_openapi_document(ROUTER, requires_key=guarded)
    assert [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()] == []


def test_every_component_is_a_valid_schema_that_something_refers_to() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert referred == set(schemas)


@pytest.mark.parametrize("changes", [{}, {"stateless": True}])
def test_every_route_is_documented_and_nothing_else(changes: dict[str, Any]) -> None:
    router = route(**changes)
    documented = {
        (method.upper(), path)
        for path, operations in make_openapi_document(router, requires_key=False)["paths"].items()
        for method in operations
    }
    assert documented == {(entry.method, entry.path.replace("...", "")) for entry in router.entries}


def operations(document: dict[str, Any]) -> dict[str, Any]:
    return {described["operationId"]: described for path in document["paths"].values() for described in path.values()}


def test_every_operation_has_its_own_id_and_a_summary() -> None:
    described = operations(DOCUMENT)
    assert len(described) == len(ROUTER.entries)
    assert all(operation["summary"] for operation in described.values())


def test_a_key_is_required_where_the_server_has_keys() -> None:
    security = {
        guarded: operations(make_openapi_document(ROUTER, requires_key=guarded))["listModels"]["security"]
        for guarded in (False, True)
    }
    assert security == {False: [{}, {"bearer": []}], True: [{"bearer": []}]}
    assert operations(make_openapi_document(ROUTER, requires_key=True))["checkLife"]["security"] == []


def test_an_operation_lists_the_statuses_it_answers_with() -> None:
    described = operations(make_openapi_document(ROUTER, requires_key=True))
    statuses = {name: " ".join(described[name]["responses"]) for name in ("createResponse", "getItem", "checkLife")}
    assert statuses == {
        "createResponse": "200 400 401 404 413 429 500 502 503 504",
        "getItem": "200 400 401 404 500",
        "checkLife": "200 400 500",
    }


def test_query_parameters_have_their_bounds() -> None:
    parameters = operations(DOCUMENT)["listItems"]["parameters"]
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
@settings(max_examples=40)
@given(data=st.data())
def test_every_request_that_we_can_make_fits(body: type, data: st.DataObject) -> None:
    value = data.draw(strategies.instances(body))
    assert faults(body.__name__, wired(value)) == []


@settings(max_examples=40)
@given(strategies.responses())
def test_every_response_fits(response: Any) -> None:
    assert faults("Response", wired(response)) == []


@settings(max_examples=100)
@given(strategies.all_events())
def test_every_event_fits(event: Any) -> None:
    assert faults("Event", wired(event)) == []


@settings(max_examples=40)
@given(st.lists(strategies.all_items(), max_size=3))
def test_every_page_of_items_fits(items: list[Any]) -> None:
    assert faults("ItemPage", wired(make_page(items, has_more=False))) == []


def has_whole_floats(value: Any) -> bool:
    """1.0 is an integer to a JSON schema, but not to us."""
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
@settings(max_examples=60)
@given(data=st.data())
def test_the_codec_takes_what_the_document_allows_and_nothing_else(body: type, data: st.DataObject) -> None:
    value = data.draw(strategies.damaged(strategies.instances(body)))
    assume(not has_whole_floats(value) and " - at " not in json.dumps(value))
    found = faults(body.__name__, complete(value))
    assert is_accepted(body, value) == (not found), found


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
        (True, {"tools": [{"type": "tool", "function": {"name": "f"}}]}),  # of a type that we do not know
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
def test_codec_and_document_agree_on_the_corners(accepted: bool, value: Any) -> None:
    assert (is_accepted(CreateRequest, value), not faults("CreateRequest", value)) == (accepted, accepted)


def test_a_conversation_takes_no_more_items_at_once_than_the_document_says() -> None:
    bodies = [{"items": [{"role": "user", "content": "hi"}] * number} for number in (20, 21)]
    assert [is_accepted(AddItems, body) for body in bodies] == [not faults("AddItems", body) for body in bodies]
    assert not is_accepted(AddItems, bodies[1])


def test_what_the_sdk_sends_and_gets_fits(server: Any) -> None:
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
        (sent, got): ([] if sent is None else faults(sent, json.loads(raw.http_request.content or b"{}")))
        + faults(got, json.loads(raw.text))
        for (sent, got), raw in exchanges.items()
    }
    assert found == {kinds: [] for kinds in exchanges}


def test_what_the_sdk_streams_fits(server: Any) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "weather", "stream": True})
    lines = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line.startswith(b"data: {")]
    assert len(lines) > 5
    assert [faults("Event", json.loads(line)) for line in lines] == [[]] * len(lines)
