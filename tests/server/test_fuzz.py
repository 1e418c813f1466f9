"""Generated requests, valid and invalid by the OpenAPI document, get responses that the document describes."""

import functools
import importlib.util
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from antiphon.engine.prepare.parameters import UNIMPLEMENTED, WEBSOCKET_PARAMETERS
from antiphon.store.memory.store import MemoryStore
from support.live_server import TIMEOUT, LiveServer, make_settings
from support.openapi_document import load_document, make_test_router

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# The same requests in every run. Generating an invalid request takes up to half a second.
SETTINGS = settings(derandomize=True, database=None, max_examples=6, suppress_health_check=list(HealthCheck))
INVALID_SETTINGS = settings(SETTINGS, max_examples=max(2, settings.default.max_examples // 15))

# The operations by id, from the routes: schemathesis needs a second to read the document, in every test process.
_described = [
    entry.operation() if callable(entry.operation) else entry.operation for entry in make_test_router().entries
]
OPERATIONS = {operation.id: operation for operation in _described if operation is not None}
# The client of schemathesis sends files without names, and no WebSocket messages.
NEVER_ACCEPTED = {"addContainerFile", "addUploadPart", "connectResponses", "createFile"}
# Vector stores need the packages of an extra.
HAS_SEARCH = importlib.util.find_spec("onnxruntime") is not None
# Ids of a file, a vector store and a batch by name, as long as no test has deleted them.
EXISTING_FILES: dict[str, str] = {}
REFUSABLE = [name for name, operation in OPERATIONS.items() if operation.body_type or operation.query_type]


class OpenStore(MemoryStore):
    """A store that requires no key, although requests create keys."""

    async def has_keys(self) -> bool:
        return False


@pytest.fixture(scope="module")
def target() -> Iterator[LiveServer]:
    running = LiveServer({}, make_settings(), OpenStore())
    EXISTING_FILES.clear()
    yield running
    running.stop()


def use_existing_objects(case: Case, target: LiveServer) -> None:
    """Point a generated request at existing objects. Most generated ids would get a 404."""
    names = set(case.path_parameters)
    if "response_id" in names:
        # A foreground response that has ended cannot be cancelled.
        body = {"model": "scripted", "input": "hello", "background": case.path.endswith("/cancel")}
        made = target.ask("POST", "/v1/responses", body).json
        case.path_parameters["response_id"] = made["id"]
    if "conversation_id" in names:
        items = [{"role": "user", "content": "hello"}]
        conversation_id = target.ask("POST", "/v1/conversations", {"items": items}).json["id"]
        case.path_parameters["conversation_id"] = conversation_id
        if "item_id" in names:
            page = target.ask("GET", f"/v1/conversations/{conversation_id}/items").json
            case.path_parameters["item_id"] = page["first_id"]
    if "container_id" in names:
        use_existing_container(case, target)
    elif names & {"file_id", "upload_id", "vector_store_id"}:
        use_existing_files(case, target)
    if "prompt_id" in names:
        case.path_parameters["prompt_id"] = target.ask("POST", "/v1/prompts", {"template": {}}).json["id"]
        case.query = {}
    if case.path.startswith("/v1/organization"):
        use_existing_project(case, target)
    if "model" in names:
        case.path_parameters["model"] = "scripted"
    if isinstance(case.body, dict):
        use_existing_model(case)


def use_existing_project(case: Case, target: LiveServer) -> None:
    ids = case.path_parameters
    path = "/v1/organization/projects"
    if not case.path.startswith(path):
        case.query = {"start_time": 1_700_000_000}  # other parameters depend on each other
        return
    if "project_id" not in ids:
        return
    # A project can be archived once, and has a name of its own.
    project = target.ask("POST", path, {"name": f"project {time.monotonic_ns()}"}).json
    ids["project_id"] = project["id"]
    if "api_key_id" in ids:
        ids["api_key_id"] = target.ask("POST", f"{path}/{quote(project['id'])}/api_keys", {}).json["id"]
    case.query = {}


def use_existing_container(case: Case, target: LiveServer) -> None:
    ids = case.path_parameters
    container_id = ids["container_id"] = target.ask("POST", "/v1/containers", {"name": "notes"}).json["id"]
    if "file_id" in ids:
        body = {"file_id": upload_file(target)}
        ids["file_id"] = target.ask("POST", f"/v1/containers/{container_id}/files", body).json["id"]
    case.query = {}


def use_existing_files(case: Case, target: LiveServer) -> None:
    ids = case.path_parameters
    if case.method == "DELETE" or not EXISTING_FILES:
        EXISTING_FILES.update(create_files(target))
    ids.update({name: value for name, value in EXISTING_FILES.items() if name in ids})
    if "upload_id" in ids:  # an upload ends only once
        upload = {"filename": "notes.txt", "bytes": 0, "mime_type": "text/plain", "purpose": "user_data"}
        ids["upload_id"] = target.ask("POST", "/v1/uploads", upload).json["id"]
    if "vector_store_id" in ids:
        case.query = {}
    file_id = EXISTING_FILES["file_id"]
    bodies = {
        "/complete": {"part_ids": []},
        "/files": {"file_id": file_id},
        "/file_batches": {"file_ids": [file_id]},
        "/search": {"query": "notes"},
    }
    for ending, body in bodies.items():
        if case.method == "POST" and case.path.endswith(ending):
            case.body = body


def create_files(target: LiveServer) -> dict[str, str]:
    """Create a file and, if the extra is installed, a vector store with it. Return their ids by name."""
    ids = {"file_id": upload_file(target)}
    if HAS_SEARCH:
        body = {"file_ids": [ids["file_id"]]}
        store_id = ids["vector_store_id"] = target.ask("POST", "/v1/vector_stores", {}).json["id"]
        ids["batch_id"] = target.ask("POST", f"/v1/vector_stores/{store_id}/file_batches", body).json["id"]
    return ids


def upload_file(target: LiveServer) -> str:
    """Upload a file whose content can be downloaded, and return its id."""
    fields = ('name="purpose"\r\n\r\nbatch', 'name="file"; filename="notes.txt"\r\n\r\nnotes')
    form = "".join(f"--b\r\nContent-Disposition: form-data; {field}\r\n" for field in fields) + "--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    file_id: str = target.ask("POST", "/v1/files", form.encode(), headers=headers).json["id"]
    return file_id


def use_existing_model(case: Case) -> None:
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
    """Reduce a generated body to what the scripted model supports."""
    if isinstance(case.body, dict) and case.path.startswith("/v1/responses"):
        for name in ("tools", "tool_choice", "text", "include", "top_logprobs"):
            case.body.pop(name, None)
        case.body |= {"input": "hello", "stream": stream}
    if isinstance(case.body, dict) and case.path == "/v1/agent/execute":
        case.body = {"Instruction": "hello", "Stream": stream}
    if isinstance(case.body, dict) and case.path.startswith("/v1/vector_stores"):
        for name in ("file_ids", "chunking_strategy", "expires_after", "attributes"):
            if name in case.body and case.path.count("/") == 2:
                del case.body[name]


def call(case: Case, target: LiveServer) -> int:
    response = case.call(base_url=target.url, timeout=TIMEOUT)
    if case.method == "DELETE":
        EXISTING_FILES.clear()
    case.validate_response(response, checks=CHECKS)
    return response.status_code


@functools.cache
def load_operations() -> dict[str, APIOperation]:
    """Return the operations of the document by id."""
    schema = schemathesis.openapi.from_dict(load_document(requires_key=False))
    return {found.ok().definition.raw["operationId"]: found.ok() for found in schema.get_all_operations()}


def test_operations_of_the_routes_are_those_of_the_document() -> None:
    found = load_operations()
    assert set(OPERATIONS) == set(found)
    assert [name for name in OPERATIONS if list(found[name].body) or list(found[name].query)] == REFUSABLE


@pytest.mark.usefixtures("unchecked_wire")
@pytest.mark.parametrize("name", OPERATIONS)
def test_valid_request_gets_a_documented_response(name: str, target: LiveServer) -> None:
    cases = load_operations()[name].as_strategy(generation_mode=GenerationMode.POSITIVE)
    seen = set()

    @SETTINGS
    @given(cases, st.sampled_from(["streamed", "simple", "existing", "generated"]))
    def send(case: Case, manner: str) -> None:
        if manner != "generated":
            use_existing_objects(case, target)
        if manner in ("simple", "streamed"):
            simplify(case, stream=manner == "streamed")
        seen.add(call(case, target))

    send()
    is_available = HAS_SEARCH or not load_operations()[name].path.startswith("/v1/vector_stores")
    assert 200 in seen or name in NEVER_ACCEPTED or not is_available


@pytest.mark.hypothesis
@pytest.mark.usefixtures("unchecked_wire")
@pytest.mark.parametrize("name", REFUSABLE)
def test_invalid_request_gets_a_documented_response(name: str, target: LiveServer) -> None:
    cases = load_operations()[name].as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @INVALID_SETTINGS
    @given(cases, st.booleans())
    def send(case: Case, existing: bool) -> None:
        if existing:
            use_existing_objects(case, target)
        call(case, target)

    send()
