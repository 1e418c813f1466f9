"""Files, uploads and vector stores over HTTP: forms, limits, expiry, errors and the isolation of projects."""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.limits import FileLimits
from antiphon.config.settings import ApiKey
from antiphon.engine.files.loader import FileServiceLoader
from antiphon.store.files.location import FileLocation
from support.crashing_server import wait_until
from support.live_server import HttpResponse, LiveServer, make_settings
from support.postgres_server import EmptySchema

LIMITS = FileLimits(max_file_bytes=1000, max_part_bytes=500, max_upload_bytes=2000, max_project_bytes=5000)
ADA, BOB = {"Authorization": "Bearer ada"}, {"Authorization": "Bearer bob"}
PURPOSE = ("purpose", None, b"batch")


ListContents = Callable[[], set[str]]


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileLocation]:
    if request.param == "sqlite":
        yield FileLocation(tmp_path_factory.mktemp("files") / "store.db-files")
        return
    schema: EmptySchema = request.getfixturevalue("postgres_schema")
    yield FileLocation(url=schema.url)
    schema.clear()


@pytest.fixture
def list_contents(location: FileLocation, request: pytest.FixtureRequest) -> ListContents:
    """A function that returns the ids of all stored contents."""
    if location.folder is not None:
        contents = location.folder / "contents"
        return lambda: {path.name for path in contents.iterdir()}
    schema: EmptySchema = request.getfixturevalue("postgres_schema")

    def list_ids() -> set[str]:
        # Pieces of a refused file are deleted after the response.
        wait_until(lambda: schema.fetch("SELECT count(*) FROM contents WHERE id IS NULL") == [(0,)])
        return {content_id for (content_id,) in schema.fetch("SELECT id FROM contents")}

    return list_ids


@pytest.fixture(scope="module")
def server(location: FileLocation) -> Iterator[LiveServer]:
    keys = (ApiKey("ada", "ada"), ApiKey("bob", "bob"), ApiKey("cleo", "cleo"))
    settings = make_settings(api_keys=keys, files=LIMITS)
    running = LiveServer({}, settings, files=FileServiceLoader(location, limits=LIMITS))
    yield running
    running.stop()


def make_form(*parts: tuple[str, str | None, bytes], end: bytes = b"--X--\r\n") -> bytes:
    body = b""
    for name, filename, content in parts:
        file = "" if filename is None else f'; filename="{filename}"'
        body += f'--X\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
    return body + end


def upload(server: LiveServer, body: bytes, headers: dict[str, str] = ADA, path: str = "/v1/files") -> HttpResponse:
    return server.ask("POST", path, body, headers=headers | {"Content-Type": "multipart/form-data; boundary=X"})


def create(server: LiveServer, content: bytes = b"text", headers: dict[str, str] = ADA) -> str:
    answer = upload(server, make_form(PURPOSE, ("file", "a.txt", content)), headers)
    assert answer.status == 200, answer.body
    file_id: str = answer.json["id"]
    return file_id


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (make_form(PURPOSE), 400, "file", "missing_required_parameter"),
        (make_form(("file", "a.txt", b"x")), 400, "purpose", "missing_required_parameter"),
        (make_form(("purpose", None, b"fun"), ("file", "a.txt", b"x")), 400, "purpose", "invalid_value"),
        (make_form(PURPOSE, ("file", "", b"x")), 400, "file", "missing_required_parameter"),
        (make_form(PURPOSE, ("file", "a", b"x"), ("file", "b", b"y")), 400, "file", "invalid_value"),
        (
            make_form(PURPOSE, ("expires_after[anchor]", None, b"created_at"), ("file", "a", b"x")),
            400,
            "expires_after.seconds",
            "missing_required_parameter",
        ),
        (
            make_form(
                PURPOSE,
                ("expires_after[anchor]", None, b"created_at"),
                ("expires_after[seconds]", None, b"60"),
                ("file", "a", b"x"),
            ),
            400,
            "expires_after.seconds",
            "invalid_value",
        ),
        (make_form(PURPOSE, ("file", "a", b"x" * 1001)), 413, "file", "request_too_large"),
        (make_form(PURPOSE, ("file", "a", b"x"), end=b""), 400, None, "invalid_form"),
        (make_form(("purpose", None, b"x" * 70_000)), 400, "purpose", "string_above_max_length"),
        (b"no form", 400, None, "invalid_form"),
    ],
)
def test_invalid_form_is_refused_and_leaves_no_content(
    server: LiveServer, list_contents: ListContents, body: bytes, status: int, param: str | None, code: str
) -> None:
    create(server)
    before = list_contents()
    answer = upload(server, body)
    error = answer.json["error"]
    assert (answer.status, error["param"], error["code"]) == (status, param, code)
    assert list_contents() == before


def test_json_body_is_no_form(server: LiveServer) -> None:
    answer = server.ask("POST", "/v1/files", {"purpose": "batch"}, headers=ADA)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_content_type")


def test_declared_length_beyond_the_limit_is_refused_at_once(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ada\r\n"
            b"Content-Type: multipart/form-data; boundary=X\r\nContent-Length: 99999999\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_unknown_field_is_ignored_with_a_warning(server: LiveServer) -> None:
    answer = upload(server, make_form(PURPOSE, ("extra", None, b"1"), ("file", "a", b"x")))
    assert answer.headers["x-antiphon-warnings"] == "ignored: extra"


def test_quota_of_a_project_is_enforced(server: LiveServer) -> None:
    headers = BOB
    created = []
    while True:
        answer = upload(server, make_form(PURPOSE, ("file", "a", b"x" * 1000)), headers)
        if answer.status != 200:
            break
        created.append(answer.json["id"])
    assert (len(created), answer.json["error"]["code"]) == (5, "file_quota_exceeded")
    for file_id in created:
        assert server.ask("DELETE", f"/v1/files/{file_id}", headers=headers).status == 200


def make_newer(folder: Path) -> None:
    folder.mkdir()
    with closing(sqlite3.connect(folder / "files.db")) as connection:
        connection.execute("PRAGMA user_version = 999")


def make_junk(folder: Path) -> None:
    folder.mkdir()
    (folder / "files.db").write_bytes(b"no database " * 100)


@pytest.mark.parametrize(
    ("obstruct", "part"), [(make_newer, "database"), (make_junk, "database"), (Path.touch, "folder")]
)
def test_files_that_cannot_be_opened_are_unavailable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, obstruct: Callable[[Path], None], part: str
) -> None:
    folder = tmp_path / "store.db-files"
    obstruct(folder)
    running = LiveServer({}, make_settings(), files=FileServiceLoader(FileLocation(folder), limits=LIMITS))
    try:
        refused = [upload(running, make_form(PURPOSE, ("file", "a.txt", b"text"))), running.ask("GET", "/v1/files")]
        folder.rename(tmp_path / "other")
        accepted = running.ask("GET", "/v1/files")
    finally:
        running.stop()
    error = {
        "message": f"The {part} of files cannot be opened. See the server's log.",
        "type": "server_error",
        "param": None,
        "code": "store_unavailable",
    }
    assert [(each.status, each.headers["retry-after"], each.json) for each in refused] == [
        (503, "1", {"error": error})
    ] * 2
    assert accepted.status == 200
    assert sum(message.startswith(f"the {part} of files cannot be opened: ") for message in caplog.messages) == 1
    assert not any(record.exc_info for record in caplog.records)


def test_shared_folder_that_cannot_be_opened_is_named(tmp_path: Path, postgres_schema: EmptySchema) -> None:
    (tmp_path / "shared").touch()
    location = FileLocation(tmp_path / "shared", postgres_schema.url)
    running = LiveServer({}, make_settings(), files=FileServiceLoader(location, limits=LIMITS))
    try:
        refused = running.ask("GET", "/v1/files")
    finally:
        running.stop()
    assert (refused.status, refused.json["error"]["message"]) == (
        503,
        "The folder of files cannot be opened. See the server's log.",
    )


def test_deleted_file_has_no_content_on_disk(server: LiveServer, list_contents: ListContents) -> None:
    file_id = create(server)
    assert file_id in list_contents()
    server.ask("DELETE", f"/v1/files/{file_id}", headers=ADA)
    assert file_id not in list_contents()


def test_upload_limits_are_enforced(server: LiveServer) -> None:
    body = {"bytes": 2001, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
    answer = server.ask("POST", "/v1/uploads", body, headers=ADA)
    assert (answer.status, answer.json["error"]["param"]) == (413, "bytes")
    created = server.ask("POST", "/v1/uploads", body | {"bytes": 600}, headers=ADA).json
    path = f"/v1/uploads/{created['id']}/parts"
    assert upload(server, make_form(("data", "upload", b"x" * 501)), path=path).status == 413
    assert upload(server, make_form(("other", "upload", b"x")), path=path).json["error"]["param"] == "data"


def test_parts_of_an_upload_are_limited_together(server: LiveServer, list_contents: ListContents) -> None:
    body = {"bytes": 1, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
    headers = {"Authorization": "Bearer cleo"}
    part = make_form(("data", "upload", b"x" * 500))
    paths = [
        f"/v1/uploads/{server.ask('POST', '/v1/uploads', body, headers=headers).json['id']}/parts" for _ in range(3)
    ]
    assert [upload(server, part, headers, path=paths[0]).status for _ in range(5)] == [200] * 4 + [413]
    assert [upload(server, part, headers, path=paths[1]).status for _ in range(4)] == [200] * 4
    before = list_contents()
    assert [upload(server, part, headers, path=paths[2]).status for _ in range(2)] == [200] * 2
    refused = upload(server, part, headers, path=paths[2])
    assert (refused.status, refused.json["error"]["code"]) == (400, "file_quota_exceeded")
    assert len(list_contents()) == len(before) + 2


def test_expired_files_are_hidden_and_deleted(
    server: LiveServer, list_contents: ListContents, monkeypatch: Any
) -> None:
    expiry = (("expires_after[anchor]", None, b"created_at"), ("expires_after[seconds]", None, b"3600"))
    file_id = upload(server, make_form(PURPOSE, *expiry, ("file", "a", b"x"))).json["id"]
    created = server.ask(
        "POST", "/v1/uploads", {"bytes": 3, "filename": "a", "mime_type": "a/b", "purpose": "batch"}, headers=ADA
    ).json
    part = upload(server, make_form(("data", "upload", b"abc")), path=f"/v1/uploads/{created['id']}/parts").json["id"]
    storage = server.engine.file_service._storage
    now = time.time() + 3601
    monkeypatch.setattr(storage, "now", lambda: now)
    monkeypatch.setattr(storage._database, "_now", lambda: now)
    monkeypatch.setattr(storage._database, "_clock", lambda: now, raising=False)  # instead of PostgreSQL's
    assert server.ask("GET", f"/v1/files/{file_id}", headers=ADA).status == 404
    assert file_id not in [each["id"] for each in server.ask("GET", "/v1/files", headers=ADA).json["data"]]
    refused = server.ask("POST", f"/v1/uploads/{created['id']}/complete", {"part_ids": [part]}, headers=ADA)
    assert "expired" in refused.json["error"]["message"]
    assert {file_id, part} <= list_contents()
    server.wait_for(server.engine.file_service.sweep)
    assert not {file_id, part} & list_contents()


def test_head_of_a_content_has_its_length(server: LiveServer) -> None:
    answer = server.ask("HEAD", f"/v1/files/{create(server, b'12345')}/content", headers=ADA)
    assert (answer.status, answer.headers["content-length"], answer.body) == (200, "5", b"")


def test_vector_store_paths_refuse_ids_of_another_form(server: LiveServer) -> None:
    pytest.importorskip("numpy")
    error = server.ask("GET", "/v1/vector_stores/nonsense", headers=ADA).json["error"]
    assert (error["param"], error["code"]) == ("vector_store_id", "invalid_value")


def test_missing_packages_are_named(server: LiveServer, monkeypatch: Any) -> None:
    monkeypatch.setattr("antiphon.retrieval.process.find_spec", lambda name: None)
    answer = server.ask("POST", "/v1/vector_stores", {}, headers=ADA)
    error = answer.json["error"]
    assert (answer.status, error["code"]) == (400, "missing_extra")
    assert "pip install 'antiphon[search]'" in error["message"]
    assert create(server)


# Every path with an id, with `{}` for the ids of Ada.
FILE_PATHS = ("GET {file}", "GET {file}/content", "DELETE {file}")
UPLOAD_PATHS = ("POST {upload}/parts", "POST {upload}/complete", "POST {upload}/cancel")
STORE_PATHS = (
    "GET {store}",
    "POST {store}",
    "POST {store}/search",
    "POST {store}/files",
    "GET {store}/files",
    "GET {store}/files/{file_id}",
    "POST {store}/files/{file_id}",
    "GET {store}/files/{file_id}/content",
    "DELETE {store}/files/{file_id}",
    "POST {store}/file_batches",
    "GET {store}/file_batches/{batch_id}",
    "POST {store}/file_batches/{batch_id}/cancel",
    "GET {store}/file_batches/{batch_id}/files",
    "DELETE {store}",
)


@pytest.fixture(scope="module")
def owned(server: LiveServer) -> dict[str, str]:
    """Objects of the project `ada`."""
    file_id = create(server)
    body = {"bytes": 3, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
    upload_id = server.ask("POST", "/v1/uploads", body, headers=ADA).json["id"]
    ids = {"file": f"/v1/files/{file_id}", "upload": f"/v1/uploads/{upload_id}", "file_id": file_id}
    store = server.ask("POST", "/v1/vector_stores", {"name": "s"}, headers=ADA).json
    if "id" in store:
        batch = server.ask(
            "POST", f"/v1/vector_stores/{store['id']}/file_batches", {"file_ids": [file_id]}, headers=ADA
        ).json
        ids |= {"store": f"/v1/vector_stores/{store['id']}", "batch_id": batch["id"]}
    return ids


def ask_as(server: LiveServer, headers: dict[str, str], route: str, ids: dict[str, str]) -> tuple[int, Any]:
    method, path = route.format(**ids).split(" ")
    if path.endswith("/parts"):
        answer = upload(server, make_form(("data", "upload", b"abc")), headers, path)
    else:
        bodies = {
            "complete": {"part_ids": ["part_1"]},
            "search": {"query": "x"},
            "files": {"file_id": ids["file_id"]},
            "file_batches": {"file_ids": [ids["file_id"]]},
        }
        body = bodies.get(path.rpartition("/")[2], {"attributes": {}}) if method == "POST" else None
        answer = server.ask(method, path, body, headers=headers)
    return answer.status, answer.json


@pytest.mark.parametrize("route", [*FILE_PATHS, *UPLOAD_PATHS, *STORE_PATHS])
def test_objects_of_another_project_are_unknown(server: LiveServer, owned: dict[str, str], route: str) -> None:
    if "{store}" in route:
        pytest.importorskip("onnxruntime")
    foreign = ask_as(server, BOB, route, owned)
    # The same ids with another last character exist in no project.
    unknown = {name: value[:-1] + ("0" if value[-1] != "0" else "1") for name, value in owned.items()}
    status, error = ask_as(server, BOB, route, unknown)
    text = json.dumps(error)
    for name, value in owned.items():
        text = text.replace(unknown[name].rpartition("/")[2], value.rpartition("/")[2])
    assert foreign == (status, json.loads(text))
    assert status == 404


def test_lists_have_only_objects_of_the_project(server: LiveServer, owned: dict[str, str]) -> None:
    assert server.ask("GET", "/v1/files", headers=BOB).json["data"] == []
    if "store" in owned:
        assert server.ask("GET", "/v1/vector_stores", headers=BOB).json["data"] == []
        mine = server.ask("POST", "/v1/vector_stores", {"file_ids": [owned["file_id"]]}, headers=BOB)
        assert (mine.status, mine.json["error"]["param"]) == (404, "file_ids[0]")
        cursor = owned["store"].rpartition("/")[2]
        assert server.ask("GET", f"/v1/vector_stores?after={cursor}", headers=BOB).status == 400


@pytest.mark.parametrize(
    ("query", "param"), [(["x"] * 101, "query"), (["x" * 16_385], "query[0]"), ("x" * 16_385, "query")]
)
def test_queries_of_a_search_are_limited(server: LiveServer, query: Any, param: str) -> None:
    answer = server.ask("POST", "/v1/vector_stores/vs_1/search", {"query": query}, headers=ADA)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
