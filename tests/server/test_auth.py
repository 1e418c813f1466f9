import socket
from typing import Any

import pytest

from antiphon.config.settings import ApiKey
from antiphon.errors import HostNotAllowed, InvalidApiKey, OriginNotAllowed
from antiphon.server.auth import Authenticator

KEYS = (ApiKey("sk-ada", "a"), ApiKey("sk-bob", "b"), ApiKey("schlüssel", "c"))


async def find_project(authenticator: Authenticator, headers: dict[bytes, bytes]) -> str:
    return (await authenticator.authenticate(headers)).project


@pytest.mark.parametrize("headers", [{}, {b"authorization": b"Bearer whatever"}])
async def test_without_keys_requests_use_the_default_project(headers: dict[bytes, bytes]) -> None:
    assert await find_project(Authenticator(()), headers) == "default"


@pytest.mark.parametrize("origin", [b"http://localhost:8484", b"https://LOCALHOST:8484"])
async def test_without_keys_same_origin_page_is_allowed(origin: bytes) -> None:
    assert await find_project(Authenticator(()), {b"host": b"localhost:8484", b"origin": origin}) == "default"


@pytest.mark.parametrize("origin", [b"http://evil.example", b"http://localhost:3000", b"null", b"localhost:8484", b""])
async def test_without_keys_other_origin_page_is_refused(origin: bytes) -> None:
    with pytest.raises(OriginNotAllowed, match="set api_keys"):
        await Authenticator(()).authenticate({b"host": b"localhost:8484", b"origin": origin})
    assert await find_project(Authenticator(KEYS), {b"origin": origin, b"authorization": b"Bearer sk-ada"}) == "a"


@pytest.mark.parametrize("host", [b"localhost", b"LocalHost:8484", b"127.0.0.1", b"[::1]:80", b"[::ffff:127.0.0.1]"])
def test_without_keys_loopback_host_is_allowed(host: bytes) -> None:
    authenticator = Authenticator(())
    for _ in range(2):  # also from memory
        authenticator.check_host({b"host": host})
    authenticator.check_host({})


@pytest.mark.parametrize(
    "host", [b"evil.example", b"10.0.0.1", b"localhost.evil", b"\xff", b"", b"[::2]", b"[", b":80"]
)
def test_without_keys_other_host_is_refused(host: bytes) -> None:
    authenticator = Authenticator((), allowed_hosts=("other.example",))
    for _ in range(2):
        with pytest.raises(HostNotAllowed, match="allowed_hosts"):
            authenticator.check_host({b"host": host})
    Authenticator(KEYS).check_host({b"host": host})


def test_refused_host_is_repeated_only_in_part() -> None:
    with pytest.raises(HostNotAllowed) as caught:
        Authenticator(()).check_host({b"host": b"x" * 10_000})
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("allowed", "host", "accepted"),
    [
        ("models.example", b"models.example:8484", True),
        ("Models.Example.", b"models.example", True),
        ("models.example", b"a.models.example", False),
        ("*.example", b"a.b.example", True),
        ("*.example", b"example", False),
        ("*.example", b"evilexample", False),
        ("*", b"anything.example", True),
        ("10.0.0.7", b"10.0.0.7:80", True),
        ("[2001:db8::1]", b"[2001:db8::1]:80", True),
        ("2001:db8::1", b"[2001:db8::1]", True),
    ],
)
def test_allowed_hosts_are_names_and_suffixes(allowed: str, host: bytes, accepted: bool) -> None:
    authenticator = Authenticator((), allowed_hosts=(allowed,))
    if accepted:
        authenticator.check_host({b"host": host})
    else:
        with pytest.raises(HostNotAllowed):
            authenticator.check_host({b"host": host})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "server.lan"])
def test_server_on_other_addresses_accepts_addresses_and_its_own_names(host: str) -> None:
    authenticator = Authenticator((), host=host)
    machine = socket.gethostname()
    for name in ("10.1.2.3:80", "[2001:db8::1]", "localhost", machine, f"{machine.upper()}.local:80"):
        authenticator.check_host({b"host": name.encode()})
    if host == "server.lan":
        authenticator.check_host({b"host": b"server.lan:8484"})
    with pytest.raises(HostNotAllowed):
        authenticator.check_host({b"host": b"evil.example"})


@pytest.mark.parametrize(
    ("header", "project"),
    [
        ("Bearer sk-ada", "a"),
        ("bearer sk-bob", "b"),
        ("Bearer   sk-bob ", "b"),
        ("Bearer schlüssel", "c"),
    ],
)
async def test_key_selects_its_project(header: str, project: str) -> None:
    assert await find_project(Authenticator(KEYS), {b"authorization": header.encode()}) == project


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "sk-ada", "Basic sk-ada"])
async def test_missing_key_error_explains_the_header(header: str) -> None:
    with pytest.raises(InvalidApiKey, match="Authorization: Bearer KEY"):
        await Authenticator(KEYS).authenticate({b"authorization": header.encode()})


@pytest.mark.parametrize("key", ["sk-adas", "sk-ad", "SK-ADA", "sk-ada sk-bob", "\x00"])
async def test_unknown_key_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(InvalidApiKey) as caught:
        await Authenticator(KEYS).authenticate({b"authorization": f"Bearer {key}".encode()})
    assert caught.value.message == "Incorrect API key provided: this server does not know it."


def test_wrong_key_gets_401_with_a_challenge(guarded: Any) -> None:
    answer = guarded.ask("GET", "/v1/models", headers={"Authorization": "Bearer wrong"})
    assert (answer.status, answer.headers["www-authenticate"], answer.json) == (
        401,
        'Bearer realm="antiphon"',
        {
            "error": {
                "message": "Incorrect API key provided: this server does not know it.",
                "type": "invalid_request_error",
                "param": None,
                "code": "invalid_api_key",
            }
        },
    )


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/"])
def test_health_needs_no_key(guarded: Any, path: str) -> None:
    assert guarded.ask("GET", path).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/v1/conversations"),
        ("GET", "/v1/conversations/conv_1"),
        ("POST", "/v1/conversations/conv_1"),
        ("DELETE", "/v1/conversations/conv_1"),
        ("POST", "/v1/conversations/conv_1/items"),
        ("GET", "/v1/conversations/conv_1/items"),
        ("GET", "/v1/conversations/conv_1/items/msg_1"),
        ("DELETE", "/v1/conversations/conv_1/items/msg_1"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/scripted"),
    ],
)
def test_all_other_paths_need_a_key(guarded: Any, method: str, path: str) -> None:
    assert guarded.ask(method, path).status == 401


def test_response_is_hidden_from_another_project(guarded: Any) -> None:
    ada, bob = guarded.client("sk-ada"), guarded.client("sk-bob")
    response = ada.responses.create(model="scripted", input="hi")
    assert guarded.ask("GET", f"/v1/responses/{response.id}", headers={"Authorization": "Bearer sk-bob"}).status == 404
    assert ada.responses.retrieve(response.id) == response
    ada.close()
    bob.close()
