"""Containers and their files over HTTP, with the official client."""

import io
from collections.abc import Callable, Iterator

import openai
import pytest

from antiphon.config.settings import ApiKey
from antiphon.config.tools import CodeInterpreterSettings
from support.live_server import LiveServer, make_settings

Refusal = tuple[int, str | None, str | None]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    keys = (ApiKey("sk-ada", "a"), ApiKey("sk-bob", "b"))
    limits = CodeInterpreterSettings(containers=3, container_files=2, container_bytes=100, project_bytes=150)
    running = LiveServer({}, make_settings(api_keys=keys, code_interpreter=limits))
    yield running
    running.stop()


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """A client whose project has no containers at the end."""
    client = server.client("sk-ada")
    yield client
    for container in client.containers.list():
        client.containers.delete(container.id)


def refuse(call: Callable[[], object]) -> Refusal:
    with pytest.raises(openai.APIStatusError) as refused:
        call()
    error = refused.value
    return error.status_code, error.param, error.code


def test_container_is_created_with_defaults_and_retrieved(client: openai.OpenAI) -> None:
    container = client.containers.create(name="work")
    assert container.id.startswith("cntr_")
    assert len(container.id) <= 64
    assert container.model_dump() == {
        "id": container.id,
        "object": "container",
        "name": "work",
        "status": "running",
        "created_at": container.created_at,
        "last_active_at": container.created_at,
        "expires_after": {"anchor": "last_active_at", "minutes": 20},
        "memory_limit": "1g",
        "network_policy": {"type": "disabled", "allowed_domains": None},
    }
    assert client.containers.retrieve(container.id).id == container.id


def test_container_options_are_stored(client: openai.OpenAI) -> None:
    created = client.containers.create(
        name="work",
        memory_limit="4g",
        expires_after={"anchor": "last_active_at", "minutes": 5},
        network_policy={"type": "disabled"},
    )
    assert created.expires_after is not None
    assert (created.memory_limit, created.expires_after.minutes) == ("4g", 5)


def test_containers_are_listed_in_pages_newest_first(client: openai.OpenAI) -> None:
    ids = [client.containers.create(name=name).id for name in ("one", "two", "one")]
    assert [container.id for container in client.containers.list(limit=2)] == ids[::-1]
    page = client.containers.list(limit=2, order="asc")
    assert ([container.id for container in page.data], page.has_more) == (ids[:2], True)
    assert [container.id for container in client.containers.list(name="one")] == [ids[2], ids[0]]
    assert refuse(lambda: client.containers.list(after="cntr_unknown")) == (400, "after", "invalid_value")


def test_deleted_container_is_unknown(client: openai.OpenAI) -> None:
    container = client.containers.create(name="work")
    client.containers.delete(container.id)
    assert refuse(lambda: client.containers.retrieve(container.id)) == (404, "container_id", "not_found")
    assert refuse(lambda: client.containers.delete(container.id)) == (404, "container_id", "not_found")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"name": ""}, (400, "name", "invalid_value")),
        ({"name": "x", "memory_limit": "2g"}, (400, "memory_limit", "invalid_value")),
        ({"name": "x", "memory_limit": "64g"}, (400, "memory_limit", "invalid_value")),
        ({"name": "x", "expires_after": {"minutes": 0}}, (400, "expires_after.minutes", "invalid_value")),
        ({"name": "x", "network_policy": {"type": "open"}}, (400, "network_policy.type", "invalid_value")),
        (
            {"name": "x", "network_policy": {"type": "allowlist", "allowed_domains": ["a.example"]}},
            (400, "network_policy", "unsupported_parameter"),
        ),
        ({"name": "x", "skills": [{"type": "inline"}]}, (400, "skills", "unsupported_parameter")),
        ({"name": "x", "file_ids": ["file-unknown"]}, (404, "file_ids[0]", None)),
        ({"name": "x", "file_ids": ["f"] * 51}, (400, "file_ids", "invalid_value")),
    ],
)
def test_invalid_options_are_refused_by_name(
    client: openai.OpenAI, options: dict[str, object], refusal: Refusal
) -> None:
    assert refuse(lambda: client.containers.create(name="x", extra_body=options)) == refusal
    assert list(client.containers.list()) == []


def test_container_needs_a_name(server: LiveServer) -> None:
    response = server.ask("POST", "/v1/containers", {}, headers={"authorization": "Bearer sk-ada"})
    assert (response.status, response.json["error"]["param"]) == (400, "name")


def test_number_of_containers_is_limited(client: openai.OpenAI) -> None:
    for _ in range(3):
        client.containers.create(name="work")
    assert refuse(lambda: client.containers.create(name="work")) == (429, None, "container_limit_reached")


def test_uploaded_file_is_listed_and_downloaded(client: openai.OpenAI) -> None:
    container = client.containers.create(name="work")
    file = client.containers.files.create(container.id, file=("data.csv", b"a,b\n1,2\n"))
    assert file.model_dump() == {
        "id": file.id,
        "object": "container.file",
        "bytes": 8,
        "container_id": container.id,
        "created_at": file.created_at,
        "path": "/mnt/data/data.csv",
        "source": "user",
    }
    retrieved = client.containers.files.retrieve(file.id, container_id=container.id)
    assert retrieved.model_dump() == file.model_dump()
    assert [each.id for each in client.containers.files.list(container.id)] == [file.id]
    content = client.containers.files.content.retrieve(file.id, container_id=container.id)
    assert content.read() == b"a,b\n1,2\n"
    client.containers.files.delete(file.id, container_id=container.id)
    assert list(client.containers.files.list(container.id)) == []
    unknown = (404, "file_id", "not_found")
    assert refuse(lambda: client.containers.files.retrieve(file.id, container_id=container.id)) == unknown
    assert refuse(lambda: client.containers.files.content.retrieve(file.id, container_id=container.id)) == unknown
    assert refuse(lambda: client.containers.files.delete(file.id, container_id=container.id)) == unknown


def test_file_of_a_taken_name_gets_another_one(client: openai.OpenAI) -> None:
    container = client.containers.create(name="work")
    first = client.containers.files.create(container.id, file=("a.txt", b"one"))
    second = client.containers.files.create(container.id, file=("a.txt", b"two"))
    assert first.path == "/mnt/data/a.txt"
    assert second.path.endswith("-a.txt")
    contents = [
        client.containers.files.content.retrieve(file.id, container_id=container.id).read() for file in (first, second)
    ]
    assert contents == [b"one", b"two"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a\\passwd"])
def test_folders_of_a_file_name_are_ignored(client: openai.OpenAI, name: str) -> None:
    container = client.containers.create(name="work")
    assert client.containers.files.create(container.id, file=(name, b"x")).path == "/mnt/data/passwd"


@pytest.mark.parametrize("name", ["..", "a/..", "x" * 250])
def test_impossible_file_name_is_refused(client: openai.OpenAI, name: str) -> None:
    container = client.containers.create(name="work")
    refusal = refuse(lambda: client.containers.files.create(container.id, file=(name, b"x")))
    assert refusal == (400, "file", "invalid_value")
    assert list(client.containers.files.list(container.id)) == []


def test_files_beyond_the_limits_are_refused(client: openai.OpenAI) -> None:
    first, second = (client.containers.create(name="work").id for _ in range(2))
    client.containers.files.create(first, file=("a", b"x" * 60))
    limit = (400, "file", "container_limit_reached")
    assert refuse(lambda: client.containers.files.create(first, file=("b", b"x" * 41))) == limit
    assert refuse(lambda: client.containers.files.create(first, file=("b", b"x" * 101)))[0] == 413
    client.containers.files.create(first, file=("b", b"x" * 40))
    assert refuse(lambda: client.containers.files.create(first, file=("c", b""))) == limit
    assert refuse(lambda: client.containers.files.create(second, file=("a", b"x" * 51))) == limit
    client.containers.files.create(second, file=("a", b"x" * 50))


def test_file_is_copied_by_its_id_once(client: openai.OpenAI) -> None:
    source = client.files.create(file=("notes.txt", io.BytesIO(b"text")), purpose="user_data")
    container = client.containers.create(name="work", file_ids=[source.id])
    (copy,) = client.containers.files.list(container.id)
    assert (copy.path, copy.bytes, copy.source) == ("/mnt/data/notes.txt", 4, "user")
    assert client.containers.files.create(container.id, file_id=source.id).id == copy.id
    client.files.delete(source.id)
    content = client.containers.files.content.retrieve(copy.id, container_id=container.id)
    assert content.read() == b"text"
    refusal = refuse(lambda: client.containers.files.create(container.id, file_id="file-unknown"))
    assert refusal == (404, "file_id", None)


def test_container_whose_files_cannot_be_copied_is_not_created(client: openai.OpenAI) -> None:
    file_ids = [client.files.create(file=("a.txt", b"x" * 60), purpose="user_data").id for _ in range(2)]
    refused = refuse(lambda: client.containers.create(name="work", file_ids=file_ids))
    assert refused == (400, "file", "container_limit_reached")
    assert list(client.containers.list()) == []


def test_file_needs_a_form_or_an_id(server: LiveServer, client: openai.OpenAI) -> None:
    container = client.containers.create(name="work")
    headers = {"authorization": "Bearer sk-ada", "content-type": "application/json"}
    response = server.ask("POST", f"/v1/containers/{container.id}/files", {}, headers=headers)
    assert (response.status, response.json["error"]["param"]) == (400, "file_id")


def test_other_project_sees_containers_as_unknown(server: LiveServer, client: openai.OpenAI) -> None:
    container = client.containers.create(name="work")
    file = client.containers.files.create(container.id, file=("a.txt", b"secret"))
    other = server.client("sk-bob")
    files = other.containers.files
    calls: list[Callable[[], object]] = [
        lambda: other.containers.retrieve(container.id),
        lambda: other.containers.delete(container.id),
        lambda: files.list(container.id),
        lambda: files.create(container.id, file=("b", b"x")),
        lambda: files.retrieve(file.id, container_id=container.id),
        lambda: files.content.retrieve(file.id, container_id=container.id),
        lambda: files.delete(file.id, container_id=container.id),
    ]
    assert [refuse(call) for call in calls] == [(404, "container_id", "not_found")] * len(calls)
    assert list(other.containers.list()) == []
    own = other.containers.create(name="own")
    unknown = (404, "file_id", "not_found")
    assert refuse(lambda: files.content.retrieve(file.id, container_id=own.id)) == unknown
    other.containers.delete(own.id)
    content = client.containers.files.content.retrieve(file.id, container_id=container.id)
    assert content.read() == b"secret"
