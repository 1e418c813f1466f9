from typing import Any

import pytest

from antiphon.errors import AntiphonError, BodyTooLarge
from antiphon.server.http import ClientDisconnected
from antiphon.server.request_body import read_body


def chunk(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_body_chunks_are_joined(make_channel: Any) -> None:
    http_request = make_channel(chunk(b"ab", more=True), chunk(b"", more=True), chunk(b"cd")).make_request()
    assert await read_body(http_request, 4) == b"abcd"


async def test_request_without_a_body_has_an_empty_body(make_channel: Any) -> None:
    assert await read_body(make_channel({"type": "http.request"}).make_request(), 4) == b""


async def test_body_with_too_large_content_length_is_not_read(make_channel: Any) -> None:
    http_request = make_channel().make_request(headers={"Content-Length": "5"})
    with pytest.raises(BodyTooLarge, match="at most 4 bytes"):
        await read_body(http_request, 4)


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(b"abcde")],
        [chunk(b"abc", more=True), chunk(b"de")],
        [chunk(b"abc", more=True), chunk(b"de", more=True)],
    ],
)
async def test_growing_body_is_refused_at_the_limit(make_channel: Any, chunks: list[dict[str, Any]]) -> None:
    with pytest.raises(BodyTooLarge):
        await read_body(make_channel(*chunks).make_request(), 4)


async def test_disconnect_while_sending_the_body_is_detected(make_channel: Any) -> None:
    http_request = make_channel(chunk(b"ab", more=True), {"type": "http.disconnect"}).make_request()
    with pytest.raises(ClientDisconnected):
        await read_body(http_request, 4)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content-Type": "application/x-www-form-urlencoded"}, "invalid_content_type"),
        ({"Content-Type": "Multipart/form-data; boundary=x"}, "invalid_content_type"),
        ({"Content-Encoding": "zstd"}, "invalid_content_encoding"),
        ({"Content-Length": "-1"}, "invalid_header"),
    ],
)
async def test_body_that_cannot_be_json_is_refused(make_channel: Any, headers: dict[str, str], code: str) -> None:
    with pytest.raises(AntiphonError) as caught:
        await read_body(make_channel().make_request(headers=headers), 4)
    assert (caught.value.status, caught.value.code) == (400, code)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/json; charset=utf-8"])
async def test_json_with_another_content_type_is_accepted(make_channel: Any, kind: str) -> None:
    assert await read_body(make_channel(chunk(b"{}")).make_request(headers={"Content-Type": kind}), 4) == b"{}"


def send_request(server: Any, head: str, body: bytes) -> bytes:
    with server.connect() as client:
        client.sendall(f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode() + body)
        return bytes(client.recv(12))


def test_too_large_content_length_gets_413_before_the_body_is_sent(guarded: Any) -> None:
    head = "Authorization: Bearer sk-ada\r\nExpect: 100-continue\r\nContent-Length: 1001"
    assert send_request(guarded, head, b"") == b"HTTP/1.1 413"


def test_too_large_chunked_body_gets_413_while_it_is_sent(guarded: Any) -> None:
    head = "Authorization: Bearer sk-ada\r\nTransfer-Encoding: chunked"
    assert send_request(guarded, head, b"3e9\r\n" + b" " * 1001 + b"\r\n") == b"HTTP/1.1 413"


def test_client_that_sends_a_too_large_body_can_read_the_error(guarded: Any) -> None:
    answer = guarded.ask("POST", "/v1/responses", b" " * 4_000_000, headers={"Authorization": "Bearer sk-ada"})
    assert (answer.status, answer.json["error"]) == (
        413,
        {
            "message": "The body is too large: this server accepts at most 1000 bytes.",
            "type": "invalid_request_error",
            "param": None,
            "code": "request_too_large",
        },
    )
