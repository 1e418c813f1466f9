"""API keys of the store: checks, cache, revocation, expiry, last use and scopes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from antiphon.cli.main import main
from antiphon.config.settings import ApiKey
from antiphon.errors import HostNotAllowed, InvalidApiKey, StoreUnavailable
from antiphon.server.auth import Authenticator
from antiphon.server.scopes import ADMIN, INFERENCE, READ
from antiphon.store.keys import StoredKey, compute_digest
from antiphon.store.location import locate_store
from antiphon.store.memory.store import MemoryStore
from support.live_server import TIMEOUT, LiveServer

KEY = "sk-antiphon-one"
HEADERS = {b"authorization": f"Bearer {KEY}".encode()}
STORED = StoredKey("key_1", compute_digest(KEY.encode()), "p", "", ("inference",), 1)


class Clock:
    """A clock that stands still until a test sets it."""

    time = 1000.0

    def __call__(self) -> float:
        return self.time


class CountingStore(MemoryStore):
    """Counts the reads of keys. With `is_down` they fail."""

    reads = 0
    is_down = False

    async def find_key(self, digest: bytes) -> StoredKey | None:
        self.reads += 1
        if self.is_down:
            raise StoreUnavailable("The store is down.")
        return await super().find_key(digest)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store() -> CountingStore:
    store = CountingStore()
    await store.open()
    return store


@pytest.fixture
def authenticator(store: CountingStore, clock: Clock) -> Authenticator:
    made = Authenticator((), store=store, now=clock, monotonic=clock)
    made.require_keys()
    return made


async def refuse(authenticator: Authenticator, headers: dict[bytes, bytes] = HEADERS) -> str:
    with pytest.raises(InvalidApiKey) as refused:
        await authenticator.authenticate(headers)
    return refused.value.message


@pytest.mark.parametrize(
    ("scopes", "scope"), [(("read",), READ), (("inference", "read"), INFERENCE), (("admin", "read"), ADMIN)]
)
async def test_stored_key_gives_its_project_and_highest_scope(
    authenticator: Authenticator, store: CountingStore, scopes: tuple[str, ...], scope: int
) -> None:
    await store.save_key(STORED._replace(scopes=scopes))
    assert (await authenticator.authenticate(HEADERS))[:2] == ("p", scope)


async def test_key_with_unknown_scopes_only_is_refused(authenticator: Authenticator, store: CountingStore) -> None:
    await store.save_key(STORED._replace(scopes=("future",)))
    assert await refuse(authenticator) == "The API key has no scope that this server knows."


async def test_verified_key_is_read_again_only_after_the_check_time(
    authenticator: Authenticator, store: CountingStore, clock: Clock
) -> None:
    await store.save_key(STORED)
    for clock.time in (1000.0, 1004.9, 1005.0, 1009.9):
        await authenticator.authenticate(HEADERS)
    assert store.reads == 2


async def test_revoked_key_is_refused_after_the_check_time(
    authenticator: Authenticator, store: CountingStore, clock: Clock
) -> None:
    await store.save_key(STORED)
    await authenticator.authenticate(HEADERS)
    await store.revoke_key("key_1", 1000)
    clock.time += 4.9
    await authenticator.authenticate(HEADERS)
    clock.time += 0.1
    assert [await refuse(authenticator) for _ in range(2)] == ["Incorrect API key provided: it was revoked."] * 2


async def test_rotation_replaces_the_key(authenticator: Authenticator, store: CountingStore, clock: Clock) -> None:
    await store.save_key(STORED)
    await authenticator.authenticate(HEADERS)
    await store.rotate_key("key_1", compute_digest(b"sk-antiphon-two"), None)
    assert (await authenticator.authenticate({b"authorization": b"Bearer sk-antiphon-two"})).project == "p"
    clock.time += 5
    assert await refuse(authenticator) == "Incorrect API key provided: this server does not know it."


async def test_key_expires_without_a_delay(authenticator: Authenticator, store: CountingStore, clock: Clock) -> None:
    await store.save_key(STORED._replace(expires_at=1002))
    clock.time = 1001.9
    await authenticator.authenticate(HEADERS)
    clock.time = 1002.0
    assert await refuse(authenticator) == "Incorrect API key provided: it has expired."


async def test_store_failure_after_the_check_time_refuses_the_request(
    authenticator: Authenticator, store: CountingStore, clock: Clock
) -> None:
    await store.save_key(STORED)
    await authenticator.authenticate(HEADERS)
    store.is_down = True
    await authenticator.authenticate(HEADERS)
    clock.time += 5
    with pytest.raises(StoreUnavailable):
        await authenticator.authenticate(HEADERS)
    store.is_down = False
    assert (await authenticator.authenticate(HEADERS)).project == "p"


async def test_last_use_is_recorded_once_a_minute(
    authenticator: Authenticator, store: CountingStore, clock: Clock
) -> None:
    await store.save_key(STORED)
    seen = []
    for clock.time in (1000.0, 1006.0, 1059.0, 1065.0):
        await authenticator.authenticate(HEADERS)
        await authenticator.close()
        seen.append((await store.list_keys())[0].last_used_at)
    assert seen == [1000, 1000, 1000, 1065]


async def test_static_keys_have_all_scopes_beside_stored_keys(store: CountingStore) -> None:
    await store.save_key(STORED)
    authenticator = Authenticator((ApiKey("static", "s"),), store=store)
    static = await authenticator.authenticate({b"authorization": b"Bearer static"})
    stored = await authenticator.authenticate(HEADERS)
    assert (static[:2], stored[:2]) == (("s", ADMIN), ("p", INFERENCE))


async def test_first_key_of_a_store_is_required_after_the_check_time(store: CountingStore, clock: Clock) -> None:
    calls: list[str] = []
    authenticator = Authenticator((), store=store, now=clock, monotonic=clock)
    authenticator.on_keys_required = lambda: calls.append("required")
    await store.save_key(STORED)
    await store.revoke_key("key_1", 1000)  # a revoked key still closes the server
    await authenticator.look_for_keys({})
    assert (await authenticator.authenticate({})).project == "default"
    with pytest.raises(HostNotAllowed):
        authenticator.check_host({b"host": b"models.example"})
    clock.time += 5
    await authenticator.look_for_keys({})
    authenticator.check_host({b"host": b"models.example"})
    assert "No API key was given" in await refuse(authenticator, {})
    assert calls == ["required"]


async def test_stored_key_on_an_open_server_is_checked_at_once(store: CountingStore, clock: Clock) -> None:
    authenticator = Authenticator((), store=store, now=clock, monotonic=clock)
    await store.save_key(STORED)
    await authenticator.look_for_keys(HEADERS)
    assert (await authenticator.authenticate(HEADERS)).project == "p"


async def test_open_connection_without_a_key_is_refused_once_the_store_has_one(
    store: CountingStore, clock: Clock
) -> None:
    authenticator = Authenticator((), store=store, now=clock, monotonic=clock)
    await authenticator.check_again({})
    await store.save_key(STORED)
    clock.time += 5
    with pytest.raises(InvalidApiKey, match="No API key was given"):
        await authenticator.check_again({})
    await authenticator.check_again(HEADERS)


# With a server, and keys from the command line


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def create(url: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(*options: str) -> dict[str, Any]:
        assert main(["keys", "create", "--project", "p", "--json", "--store", url, *options]) == 0
        created: dict[str, Any] = json.loads(capsys.readouterr().out)
        return created

    return run


@pytest.fixture
def start(serve: Callable[..., LiveServer], url: str) -> Callable[[], LiveServer]:
    return lambda: serve(store=locate_store(url))


def ask(server: LiveServer, key: str | None, method: str = "GET", path: str = "/v1/models", body: Any = None) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.ask(method, path, body, headers=headers)


def test_server_requires_a_key_if_its_store_has_one(
    create: Callable[..., dict[str, Any]], start: Callable[[], LiveServer]
) -> None:
    created = create()
    server = start()
    statuses = [ask(server, key).status for key in (None, "sk-antiphon-wrong", created["key"])]
    assert statuses == [401, 401, 200]
    security = ask(server, None, path="/openapi.json").json["paths"]["/v1/models"]["get"]["security"]
    assert security == [{"bearer": []}]
    response = server.client(created["key"]).responses.create(model="scripted", input="hi")
    assert response.status == "completed"


def test_read_key_cannot_create_a_response(
    create: Callable[..., dict[str, Any]], start: Callable[[], LiveServer]
) -> None:
    key = create("--scope", "read")["key"]
    server = start()
    answer = ask(server, key, "POST", "/v1/responses", {"model": "scripted", "input": "hi"})
    assert (answer.status, answer.json) == (
        403,
        {
            "error": {
                "message": "The API key has the scope 'read', but this request needs 'inference'. "
                "Use another key, or create one with 'antiphon keys create --scope'.",
                "type": "invalid_request_error",
                "param": None,
                "code": "insufficient_scope",
            }
        },
    )
    assert [ask(server, key, method).status for method in ("GET", "HEAD", "OPTIONS")] == [200, 200, 204]


def test_websocket_with_a_revoked_key_gets_an_error_and_closes(
    create: Callable[..., dict[str, Any]], start: Callable[[], LiveServer], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.server.auth.CHECK_SECONDS", 0)
    created = create()
    server = start()
    address = f"{server.url.replace('http', 'ws')}/v1/responses"
    headers = {"Authorization": f"Bearer {created['key']}"}
    request = json.dumps({"type": "response.create", "model": "scripted", "input": "hi"})
    with connect(address, additional_headers=headers) as socket:
        socket.send(request)
        while json.loads(socket.recv(TIMEOUT))["type"] != "response.completed":
            pass
        assert main(["keys", "revoke", created["id"], "--store", url]) == 0
        socket.send(request)
        error = json.loads(socket.recv(TIMEOUT))
        assert (error["type"], error["status"], error["error"]["code"]) == ("error", 401, "invalid_api_key")
        with pytest.raises(ConnectionClosed):
            socket.recv(TIMEOUT)


def test_running_stream_ends_normally_after_its_key_is_revoked(
    create: Callable[..., dict[str, Any]],
    serve: Callable[..., LiveServer],
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("antiphon.server.auth.CHECK_SECONDS", 0)
    created = create()
    script = {"rules": [{"user": "slowly", "answers": [[{"text": "One "}, {"wait": "gate"}, {"text": "two."}]]}]}
    server = serve(script, store=locate_store(url))
    stream = server.client(created["key"]).responses.create(model="scripted", input="slowly", stream=True)
    events = iter(stream)
    while next(events).type != "response.output_text.delta":
        pass
    assert main(["keys", "revoke", created["id"], "--store", url]) == 0
    assert ask(server, created["key"]).status == 401
    server.do(lambda: server.backend.release("gate"))
    assert [event.type for event in events][-1] == "response.completed"


@pytest.mark.parametrize("command", ["revoke", "rotate"])
def test_background_run_completes_after_its_key_is_gone(
    create: Callable[..., dict[str, Any]],
    serve: Callable[..., LiveServer],
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setattr("antiphon.server.auth.CHECK_SECONDS", 0)
    created, other = create(), create()
    script = {"rules": [{"user": "slowly", "answers": [[{"wait": "gate"}, {"text": "Done."}]]}]}
    server = serve(script, store=locate_store(url))
    queued = server.client(created["key"]).responses.create(model="scripted", input="slowly", background=True)
    follower = iter(server.client(created["key"]).responses.retrieve(queued.id, stream=True))
    assert next(follower).type == "response.created"
    server.wait_for(lambda: server.backend.reached("gate"))
    assert main(["keys", command, created["id"], "--store", url]) == 0
    assert ask(server, created["key"], path=f"/v1/responses/{queued.id}").status == 401
    server.do(lambda: server.backend.release("gate"))
    assert [event.type for event in follower][-1] == "response.completed"
    assert server.client(other["key"]).responses.retrieve(queued.id).output_text == "Done."


def test_last_use_of_a_key_is_listed(
    create: Callable[..., dict[str, Any]],
    start: Callable[[], LiveServer],
    url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    created = create()
    server = start()
    assert ask(server, created["key"]).status == 200
    server.stop()  # writes what is pending
    assert main(["keys", "list", "--json", "--store", url]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["last_used_at"] >= listed["created_at"]
