"""Every route with each scope, and with ids of another project: these look exactly like unknown ids."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from antiphon.config.settings import ApiKey
from antiphon.engine.files.loader import FileServiceLoader
from antiphon.server.metrics.server_metrics import ServerMetrics
from antiphon.server.router import RouteEntry
from antiphon.server.routes import make_router
from antiphon.server.scopes import ADMIN, INFERENCE, READ, Scope
from antiphon.store.files.location import FileLocation
from antiphon.store.keys import StoredKey, compute_digest
from antiphon.store.location import locate_store
from support.live_server import TIMEOUT, HttpResponse, LiveServer, make_settings
from support.postgres_server import EmptySchema

ADA, BOB = "sk-ada", "sk-bob"
FORM = {"Content-Type": "multipart/form-data; boundary=X"}
ITEM = {"type": "message", "role": "user", "content": "hi"}
VARYING_HEADERS = ("date", "x-request-id", "openai-processing-ms")
Ids = dict[str, str]


@pytest.fixture(scope="module", params=["memory", "postgres"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings = make_settings(metrics=True, api_keys=(ApiKey(ADA, "ada"), ApiKey(BOB, "bob")))
    url, location = "memory:", FileLocation(tmp_path_factory.mktemp("files") / "files")
    schema: EmptySchema | None = None
    if request.param == "postgres":
        schema = request.getfixturevalue("postgres_schema")
        url, location = schema.url, FileLocation(url=schema.url)
    files = FileServiceLoader(location, limits=settings.files)
    running = LiveServer({}, settings, locate_store(url), files=files)
    for scope in Scope:
        key = StoredKey(f"key_{scope.label}", compute_digest(scope.label.encode()), "scopes", "", (scope.label,), 1)
        running.wait_for(lambda key=key: running.engine.key_store.save_key(key))
    yield running
    running.stop()
    if schema is not None:
        schema.clear()


@pytest.fixture(scope="module")
def routes(server: LiveServer) -> list[RouteEntry]:
    router = make_router(server.engine, make_settings(), ServerMetrics(server.engine))
    return [entry for entry in router.entries if not entry.public]


def make_form(**fields: str) -> bytes:
    parts = [
        f'--X\r\nContent-Disposition: form-data; name="{name}"; filename="a.txt"\r\n\r\n{text}\r\n'
        if name in ("file", "data")
        else f'--X\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'
        for name, text in fields.items()
    ]
    return ("".join(parts) + "--X--\r\n").encode()


def send(server: LiveServer, key: str, method: str, path: str, body: Any = None) -> HttpResponse:
    headers = {"Authorization": f"Bearer {key}"} | (FORM if isinstance(body, bytes) else {})
    return server.ask(method, path, body, headers=headers)


def create(server: LiveServer, path: str, body: Any, key: str = ADA) -> Any:
    answer = send(server, key, "POST", path, body)
    assert answer.status == 200, answer.body
    return answer.json


# Scopes


def test_scope_of_each_route_follows_its_method_and_path(routes: list[RouteEntry]) -> None:
    for entry in routes:
        is_read = entry.method == "GET" and entry.path != "/v1/responses"
        is_admin = entry.path == "/metrics" or entry.path.startswith("/v1/organization/")
        assert entry.scope == (ADMIN if is_admin else READ if is_read else INFERENCE), entry


def test_route_refuses_exactly_the_scopes_below_its_own(server: LiveServer, routes: list[RouteEntry]) -> None:
    for entry in routes:
        target = re.sub(r"\{[\w.]+\}", "nothing", entry.path)
        for scope in Scope:
            answer = send(server, scope.label, entry.method, target, {} if entry.method == "POST" else None)
            is_refused = answer.status == 403 and answer.json["error"]["code"] == "insufficient_scope"
            assert is_refused == (scope < entry.scope), (entry, scope, answer.status)


@pytest.mark.parametrize(("scope", "is_open"), [("read", False), ("inference", True), ("admin", True)])
def test_websocket_needs_the_scope_inference(server: LiveServer, scope: str, is_open: bool) -> None:
    address = f"{server.url.replace('http', 'ws')}/v1/responses"
    headers = {"Authorization": f"Bearer {scope}"}
    if is_open:
        connect(address, additional_headers=headers).close()
        return
    with pytest.raises(InvalidStatus) as refused:
        connect(address, additional_headers=headers)
    assert refused.value.response.status_code == 403
    assert b'"code":"insufficient_scope"' in refused.value.response.body


# Ids of another project


@pytest.fixture(scope="module")
def ids(server: LiveServer) -> Ids:
    """Objects of Ada's project, by the name of the path parameter."""
    response = create(server, "/v1/responses", {"model": "scripted", "input": "hi", "background": True})
    conversation = create(server, "/v1/conversations", {"items": [ITEM]})
    items = send(server, ADA, "GET", f"/v1/conversations/{conversation['id']}/items").json
    file = create(server, "/v1/files", make_form(purpose="user_data", file="text"))
    fields = {"filename": "a", "bytes": 3, "mime_type": "text/plain", "purpose": "user_data"}
    upload = create(server, "/v1/uploads", fields)
    part = create(server, f"/v1/uploads/{upload['id']}/parts", make_form(data="abc"))
    pytest.importorskip("onnxruntime", reason="vector stores need the extra search")
    store = create(server, "/v1/vector_stores", {"name": "notes"})
    batch = create(server, f"/v1/vector_stores/{store['id']}/file_batches", {"file_ids": [file["id"]]})
    container = create(server, "/v1/containers", {"name": "work"})
    return {
        "response_id": response["id"],
        "conversation_id": conversation["id"],
        "item_id": items["data"][0]["id"],
        "prompt_id": create(server, "/v1/prompts", {"template": {"instructions": "Be brief."}})["id"],
        "file_id": file["id"],
        "upload_id": upload["id"],
        "part_id": part["id"],
        "vector_store_id": store["id"],
        "batch_id": batch["id"],
        "container_id": container["id"],
        "project_id": "ada",
        "api_key_id": create(server, "/v1/organization/projects/ada/api_keys", {})["id"],
        "model": "scripted",
    }


def make_unknown(ids: Mapping[str, str]) -> Ids:
    """Return ids of the same form that no project has."""
    unknown = {name: known if name == "model" else known[:-6] + "000000" for name, known in ids.items()}
    return unknown | {"project_id": "eve"}


def make_bodies(ids: Mapping[str, str]) -> dict[str, Any]:
    """Return the bodies of routes that need one."""
    return {
        "POST /v1/conversations/{conversation_id}": {"metadata": {"a": "b"}},
        "POST /v1/conversations/{conversation_id}/items": {"items": [ITEM]},
        "POST /v1/uploads/{upload_id}/parts": make_form(data="abc"),
        "POST /v1/uploads/{upload_id}/complete": {"part_ids": [ids["part_id"]]},
        "POST /v1/vector_stores/{vector_store_id}": {"name": "mine"},
        "POST /v1/vector_stores/{vector_store_id}/search": {"query": "text"},
        "POST /v1/vector_stores/{vector_store_id}/files": {"file_id": ids["file_id"]},
        "POST /v1/vector_stores/{vector_store_id}/files/{file_id}": {"attributes": {"a": "b"}},
        "POST /v1/vector_stores/{vector_store_id}/file_batches": {"file_ids": [ids["file_id"]]},
        "POST /v1/containers/{container_id}/files": {"file_id": ids["file_id"]},
        "POST /v1/organization/projects/{project_id}": {"name": "mine"},
        "POST /v1/organization/projects/{project_id}/api_keys": {"name": "mine"},
    }


def normalise(answer: HttpResponse, ids: Mapping[str, str]) -> tuple[int, Any, dict[str, str]]:
    """Return the answer with the names of ids in place of ids."""
    text = answer.body.decode()
    for name, value in ids.items():
        text = text.replace(value, f"<{name}>")
    headers = {name: value for name, value in answer.headers.items() if name not in VARYING_HEADERS}
    return answer.status, re.sub(r"req_\w+", "<request>", text), headers


def ask_route(server: LiveServer, route: str, ids: Mapping[str, str]) -> tuple[int, Any, dict[str, str]]:
    method, _, path = route.partition(" ")
    target = re.sub(r"\{(\w+)(\.\.\.)?\}", lambda found: ids[found[1]], path)
    return normalise(send(server, BOB, method, target, make_bodies(ids).get(route)), ids)


def read_all(server: LiveServer, ids: Ids, routes: list[RouteEntry]) -> dict[str, int]:
    """Return the status of every GET route with one id, for the owner."""
    return {
        path: send(server, ADA, "GET", re.sub(r"\{(\w+)\}", lambda found: ids[found[1]], path)).status
        for method, path, *_ in routes
        if method == "GET" and path.count("{") == 1 and "..." not in path and not path.endswith("/content")
    }


def test_foreign_id_answers_like_an_unknown_id_on_every_route(
    server: LiveServer, ids: Ids, routes: list[RouteEntry]
) -> None:
    unknown = make_unknown(ids)
    before = read_all(server, ids, routes)
    assert set(before.values()) == {200}
    checked = 0
    for method, path, *_ in routes:
        if "{" in path and "{model" not in path:
            route = f"{method} {path}"
            foreign = ask_route(server, route, ids)
            assert foreign == ask_route(server, route, unknown), route
            assert foreign[0] == 404, (route, foreign)
            checked += 1
    assert checked >= 40
    assert read_all(server, ids, routes) == before


def test_foreign_part_of_an_own_object_answers_like_an_unknown_one(server: LiveServer, ids: Ids) -> None:
    own = {
        "conversation_id": create(server, "/v1/conversations", {}, BOB)["id"],
        "vector_store_id": create(server, "/v1/vector_stores", {"name": "own"}, BOB)["id"],
        "container_id": create(server, "/v1/containers", {"name": "own"}, BOB)["id"],
        "project_id": "bob",
    }
    unknown = make_unknown(ids)
    for route in (
        "GET /v1/conversations/{conversation_id}/items/{item_id}",
        "DELETE /v1/conversations/{conversation_id}/items/{item_id}",
        "GET /v1/conversations/{conversation_id}/items?after={item_id}",
        "POST /v1/vector_stores/{vector_store_id}/files",
        "POST /v1/vector_stores/{vector_store_id}/file_batches",
        "GET /v1/vector_stores/{vector_store_id}/files/{file_id}",
        "DELETE /v1/vector_stores/{vector_store_id}/files/{file_id}",
        "GET /v1/vector_stores/{vector_store_id}/file_batches/{batch_id}",
        "POST /v1/containers/{container_id}/files",
        "GET /v1/containers/{container_id}/files/{file_id}/content",
        "GET /v1/organization/projects/{project_id}/api_keys/{api_key_id}",
        "DELETE /v1/organization/projects/{project_id}/api_keys/{api_key_id}",
        "GET /v1/files?after={file_id}",
        "GET /v1/vector_stores?after={vector_store_id}",
        "GET /v1/containers?after={container_id}",
    ):
        use_own = {} if "?after" in route and "conversation" not in route else own
        foreign = ask_route(server, route, ids | use_own)
        assert foreign == ask_route(server, route, unknown | use_own), route


def make_requests(ids: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return requests that refer to stored objects."""
    file = {"type": "input_file", "file_id": ids["file_id"]}
    return [
        {"input": "hi", "previous_response_id": ids["response_id"]},
        {"input": "hi", "conversation": ids["conversation_id"]},
        {"input": [{"type": "item_reference", "id": ids["item_id"]}]},
        {"input": "hi", "prompt": {"id": ids["prompt_id"]}},
        {"input": [{"type": "message", "role": "user", "content": [file]}]},
    ]


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("/v1/responses", set()),
        ("/v1/responses/input_tokens", {"prompt"}),
        ("/v1/responses/compact", {"prompt", "conversation"}),
    ],
)
def test_request_with_a_foreign_reference_answers_like_an_unknown_one(
    server: LiveServer, ids: Ids, path: str, ignored: set[str]
) -> None:
    unknown = make_unknown(ids)
    for foreign, missing in zip(make_requests(ids), make_requests(unknown), strict=True):
        if ignored & set(foreign):
            continue
        answers = [
            normalise(send(server, BOB, "POST", path, {"model": "scripted", **request}), names)
            for request, names in ((foreign, ids), (missing, unknown))
        ]
        assert answers[0] == answers[1], foreign
        assert 400 <= answers[0][0] < 500, (foreign, answers[0])


def test_websocket_message_with_a_foreign_reference_answers_like_an_unknown_one(server: LiveServer, ids: Ids) -> None:
    unknown = make_unknown(ids)
    address = f"{server.url.replace('http', 'ws')}/v1/responses"
    with connect(address, additional_headers={"Authorization": f"Bearer {BOB}"}) as socket:
        for foreign, missing in zip(make_requests(ids), make_requests(unknown), strict=True):
            answers = []
            for request, names in ((foreign, ids), (missing, unknown)):
                socket.send(json.dumps({"type": "response.create", "model": "scripted", **request}))
                text = str(socket.recv(TIMEOUT))
                assert json.loads(text)["type"] == "error", text
                for name, value in names.items():
                    text = text.replace(value, f"<{name}>")
                answers.append(text)
            assert answers[0] == answers[1], foreign
