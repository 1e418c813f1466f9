from typing import Any

import pytest

from antiphon.config import ApiKey
from antiphon.errors import InvalidApiKey, OriginNotAllowed
from antiphon.server.auth import Authenticator

KEYS = (ApiKey("sk-ada", "a"), ApiKey("sk-bob", "b"), ApiKey("schlüssel", "c"))


@pytest.mark.parametrize("headers", [{}, {b"authorization": b"Bearer whatever"}])
def test_without_keys_requests_use_the_default_project(headers: dict[bytes, bytes]) -> None:
    assert Authenticator(()).authenticate(headers) == "default"


@pytest.mark.parametrize("origin", [b"http://localhost:8484", b"https://LOCALHOST:8484"])
def test_without_keys_same_origin_page_is_allowed(origin: bytes) -> None:
    assert Authenticator(()).authenticate({b"host": b"localhost:8484", b"origin": origin}) == "default"


@pytest.mark.parametrize("origin", [b"http://evil.example", b"http://localhost:3000", b"null", b"localhost:8484", b""])
def test_without_keys_other_origin_page_is_refused(origin: bytes) -> None:
    with pytest.raises(OriginNotAllowed, match="set api_keys"):
        Authenticator(()).authenticate({b"host": b"localhost:8484", b"origin": origin})
    assert Authenticator(KEYS).authenticate({b"origin": origin, b"authorization": b"Bearer sk-ada"}) == "a"


@pytest.mark.parametrize(
    ("header", "project"),
    [
        ("Bearer sk-ada", "a"),
        ("bearer sk-bob", "b"),
        ("Bearer   sk-bob ", "b"),
        ("Bearer schlüssel", "c"),
    ],
)
def test_key_selects_its_project(header: str, project: str) -> None:
    assert Authenticator(KEYS).authenticate({b"authorization": header.encode()}) == project


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "sk-ada", "Basic sk-ada"])
def test_missing_key_error_explains_the_header(header: str) -> None:
    with pytest.raises(InvalidApiKey, match="Authorization: Bearer KEY"):
        Authenticator(KEYS).authenticate({b"authorization": header.encode()})


@pytest.mark.parametrize("key", ["sk-adas", "sk-ad", "SK-ADA", "sk-ada sk-bob", "\x00"])
def test_unknown_key_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(InvalidApiKey) as caught:
        Authenticator(KEYS).authenticate({b"authorization": f"Bearer {key}".encode()})
    assert caught.value.message == "The API key is not valid."


def test_wrong_key_gets_401_with_a_challenge(guarded: Any) -> None:
    answer = guarded.ask("GET", "/v1/models", headers={"Authorization": "Bearer wrong"})
    assert (answer.status, answer.headers["www-authenticate"], answer.json) == (
        401,
        'Bearer realm="antiphon"',
        {
            "error": {
                "message": "The API key is not valid.",
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
