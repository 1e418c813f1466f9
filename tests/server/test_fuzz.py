"""Whatever the document lets a client send, and whatever it does not, is answered as the document says, and in time."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from antiphon.engine.engine import Engine
from antiphon.engine.prepare.parameters import UNIMPLEMENTED, WEBSOCKET_PARAMETERS
from antiphon.server.openapi import make_openapi_document
from antiphon.server.routes import make_router
from antiphon.store.memory.store import MemoryStore
from support.live_server import TIMEOUT, LiveServer, make_settings

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# The same requests every time: what is found here must not depend on luck.
SETTINGS = settings(derandomize=True, database=None, max_examples=8, suppress_health_check=list(HealthCheck))

_router = make_router(Engine(backends={}, store=MemoryStore()), make_settings())
SCHEMA = schemathesis.openapi.from_dict(make_openapi_document(_router, requires_key=False))
OPERATIONS = {found.ok().definition.raw["operationId"]: found.ok() for found in SCHEMA.get_all_operations()}
REFUSABLE = [name for name, operation in OPERATIONS.items() if list(operation.body) or list(operation.query)]


@pytest.fixture(scope="module")
def target() -> Iterator[LiveServer]:
    running = LiveServer({}, make_settings())
    yield running
    running.stop()


def tame(case: Case, target: LiveServer) -> None:
    """Lead a wild request to things that exist, where most wild ones would end at a 404."""
    names = set(case.path_parameters)
    if "response_id" in names:
        made = target.ask("POST", "/v1/responses", {"model": "scripted", "input": "hello"}).json
        case.path_parameters["response_id"] = made["id"]
    if "conversation_id" in names:
        items = [{"role": "user", "content": "hello"}]
        talk = target.ask("POST", "/v1/conversations", {"items": items}).json["id"]
        case.path_parameters["conversation_id"] = talk
        if "item_id" in names:
            page = target.ask("GET", f"/v1/conversations/{talk}/items").json
            case.path_parameters["item_id"] = page["first_id"]
    if "prompt_id" in names:
        case.path_parameters["prompt_id"] = target.ask("POST", "/v1/prompts", {"template": {}}).json["id"]
        case.query = {}
    if "model" in names:
        case.path_parameters["model"] = "scripted"
    if isinstance(case.body, dict):
        tame_body(case)


def tame_body(case: Case) -> None:
    if case.path.startswith("/v1/responses"):
        for name in (*UNIMPLEMENTED, *WEBSOCKET_PARAMETERS, "prompt", "previous_response_id", "conversation"):
            case.body.pop(name, None)
        case.body["model"] = "scripted"
    if case.path == "/v1/agent/execute":
        for name in ("ResponseContinuationId", "ConversationContext", "ToolsJson", "ToolChoiceName"):
            case.body.pop(name, None)
        case.body["Instruction"] = "hello"
    if case.path == "/v1/prompts":
        case.body["template"] = {"instructions": "Be {{manner}}."}


def simplify(case: Case, *, stream: bool) -> None:
    """Leave of a wild body what the scripted model can answer."""
    if isinstance(case.body, dict) and case.path.startswith("/v1/responses"):
        for name in ("tools", "tool_choice", "text", "include", "top_logprobs"):
            case.body.pop(name, None)
        case.body |= {"input": "hello", "stream": stream}
    if isinstance(case.body, dict) and case.path == "/v1/agent/execute":
        case.body = {"Instruction": "hello", "Stream": stream}


def call(case: Case, target: LiveServer) -> int:
    response = case.call(base_url=target.url, timeout=TIMEOUT)
    case.validate_response(response, checks=CHECKS)
    return response.status_code


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_the_document_allows_is_answered_as_it_says(name: str, target: LiveServer) -> None:
    cases = OPERATIONS[name].as_strategy(generation_mode=GenerationMode.POSITIVE)
    seen = set()

    @SETTINGS
    @given(cases, st.sampled_from(["streamed", "simple", "tame", "wild"]))
    def send(case: Case, manner: str) -> None:
        if manner != "wild":
            tame(case, target)
        if manner in ("simple", "streamed"):
            simplify(case, stream=manner == "streamed")
        seen.add(call(case, target))

    send()
    assert 200 in seen or name == "connectResponses"


@pytest.mark.parametrize("name", REFUSABLE)
def test_what_the_document_does_not_allow_is_answered_as_it_says(name: str, target: LiveServer) -> None:
    cases = OPERATIONS[name].as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @SETTINGS
    @given(cases, st.booleans())
    def send(case: Case, lead: bool) -> None:
        if lead:
            tame(case, target)
        call(case, target)

    send()
