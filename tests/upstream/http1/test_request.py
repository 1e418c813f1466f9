from typing import Any

import pytest

from antiphon.errors import UpstreamError
from antiphon.upstream.http1.errors import InvalidHeader, InvalidUrl
from antiphon.upstream.http1.request import encode_head, parse_origin, parse_target
from support.raw_server import Peer, fetch, open_session, serve_raw

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


async def send(method: str = "POST", path: str = "/chat", body: bytes | None = b"{}", **options: Any) -> list[str]:
    """Return the head of a request as the server gets it, line by line, without the address of the server."""
    heads: list[bytes] = []
    headers, trace = options.pop("own_headers", None), options.pop("trace", b"")

    async def handle(peer: Peer) -> None:
        heads.append(await peer.read_head())
        await peer.send(OK)
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url, **options) as session:
        (await session.send(method, path, body, headers, trace=trace)).close()
    return heads[0].decode().replace(f":{server.port}", "").split("\r\n")[:-2]


async def test_head_has_default_and_given_headers() -> None:
    assert await send(headers={"Authorization": "Bearer k", "user-agent": "mine"}, own_headers={"X-Turn": "ä"}) == [
        "POST /v1/chat HTTP/1.1",
        "Host: 127.0.0.1",
        "Accept: */*",
        "Accept-Encoding: identity",
        "user-agent: mine",
        "Authorization: Bearer k",
        "Content-Type: application/json",
        "X-Turn: ä",
        "Content-Length: 2",
    ]


async def test_headers_of_a_request_replace_those_of_the_session() -> None:
    head = await send(headers={"X-Team": "a", "Host": "b"}, own_headers={"x-team": "c", "content-type": "text/plain"})
    assert [line for line in head if line.lower().startswith(("x-team", "host", "content-type"))] == [
        "Host: b",
        "x-team: c",
        "content-type: text/plain",
    ]


@pytest.mark.parametrize(("method", "last"), [("GET", "User-Agent: antiphon"), ("DELETE", "Content-Length: 0")])
async def test_request_without_body_has_no_content_type(method: str, last: str) -> None:
    head = await send(method, body=None)
    assert head[-1] == last
    assert not any(line.startswith("Content-Type") for line in head)


async def test_empty_body_has_a_length() -> None:
    assert (await send(body=b""))[-1] == "Content-Length: 0"


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Team": "a\r\nX-Evil: 1"},
        {"X-Team": "a\nX-Evil: 1"},
        {"X-Team": "a\rb"},
        {"X-Team": "a\x00b"},
        {"X-Team\r\nX-Evil": "1"},
        {"X Team": "1"},
        {"X-Team:": "1"},
        {"": "1"},
        {"ä": "1"},
        {"Content-Length": "3"},
        {"transfer-encoding": "chunked"},
    ],
)
async def test_header_that_changes_the_request_is_refused(headers: dict[str, str]) -> None:
    for options in ({"headers": headers}, {"own_headers": headers}):
        with pytest.raises(UpstreamError, match=r"^The request to the upstream has an invalid header\.$") as raised:
            await send(**options)
        assert raised.value.code == "upstream_refused"


@pytest.mark.parametrize("method", ["GET /x HTTP/1.1\r\nX:", "", "G T"])
def test_invalid_method_is_refused(method: str) -> None:
    with pytest.raises(InvalidHeader):
        encode_head(method, "/", [])


@pytest.mark.parametrize("path", ["/a\r\nX-Evil: 1", "/a\nb", "/a\tb", "/a\x00", "@evil.example/x", ":1/x"])
async def test_path_that_changes_the_request_is_refused(path: str) -> None:
    async with open_session("http://127.0.0.1:1") as session:
        with pytest.raises(UpstreamError, match="not a valid URL"):
            await session.send("GET", path)


@pytest.mark.parametrize(
    ("url", "query", "target"),
    [
        ("http://a/v1/chat", None, "/v1/chat"),
        ("http://a", None, "/"),
        ("http://a?b=c", None, "/?b=c"),
        ("http://a/b c/ä?d=e f", None, "/b%20c/%C3%A4?d=e%20f"),
        ("http://a/b%20c%2fd%", None, "/b%20c%2fd%25"),
        ("http://a/b#fragment", None, "/b"),
        ("http://a/b?c=1&d=2", {"c": "3", "e": "f g&h"}, "/b?d=2&c=3&e=f+g%26h"),
        ("http://a/b?c", {"d": "1"}, "/b?c=&d=1"),
    ],
)
def test_target_is_quoted_and_has_the_query(url: str, query: dict[str, str] | None, target: str) -> None:
    assert parse_target(url, query) == target


@pytest.mark.parametrize(
    ("url", "host", "port", "header"),
    [
        ("http://a.example/v1", "a.example", 80, "a.example"),
        ("https://A.example", "a.example", 443, "a.example"),
        ("http://a.example:443", "a.example", 443, "a.example:443"),
        ("http://[::1]:8000/v1", "::1", 8000, "[::1]:8000"),
        ("http://bücher.example", "xn--bcher-kva.example", 80, "xn--bcher-kva.example"),
    ],
)
def test_origin_is_parsed(url: str, host: str, port: int, header: str) -> None:
    origin = parse_origin(url)
    assert (origin.host, origin.port, origin.host_header) == (host, port, header)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a.example/v1",
        "ftp://a",
        "http://",
        "http://[::1",
        "http://a:x",
        "http://a:0",
        "http://a b/",
        "http://a:99999",
    ],
)
async def test_invalid_url_is_reported(url: str) -> None:
    with pytest.raises(InvalidUrl):
        parse_origin(url)
    async with open_session(url) as session:
        with pytest.raises(UpstreamError, match=r"^The address of the upstream is not a valid URL\.$"):
            await fetch(session)


async def test_user_and_password_of_the_url_are_sent() -> None:
    heads: list[bytes] = []

    async def handle(peer: Peer) -> None:
        heads.append(await peer.read_head())
        await peer.send(OK)

    async with serve_raw(handle) as server, open_session(server.url.replace("//", "//us%40er:secret@")) as session:
        (await session.send("GET", "/models")).close()
    assert b"\r\nAuthorization: Basic dXNAZXI6c2VjcmV0\r\n" in heads[0]
    assert b"\r\nHost: 127.0.0.1:%d\r\n" % server.port in heads[0]


async def test_cached_heads_are_bounded() -> None:
    async def handle(peer: Peer) -> None:
        while True:
            await peer.answer(OK)

    async with serve_raw(handle) as server, open_session(server.url) as session:
        for number in range(100):
            (await session.send("GET", f"/models/{number}")).close()
        assert len(session._heads) <= 64
        assert server.connections == 1


async def test_each_request_has_its_own_headers() -> None:
    heads: list[bytes] = []

    async def handle(peer: Peer) -> None:
        while True:
            heads.append(await peer.read_head())
            await peer.send(OK)

    given: list[dict[str, str] | None] = [{"X-Turn": "1"}, {"X-Turn": "2"}, None, {"X-Turn": "1"}, {"X-Lane": "1"}]
    async with serve_raw(handle) as server, open_session(server.url) as session:
        for headers in given:
            (await session.send("GET", "/models", None, headers)).close()
    shown = [{line for line in head.split(b"\r\n") if line.startswith(b"X-")} for head in heads]
    assert shown == [{b"X-Turn: 1"}, {b"X-Turn: 2"}, set(), {b"X-Turn: 1"}, {b"X-Lane: 1"}]


async def test_headers_of_the_trace_replace_configured_ones() -> None:
    trace = b"traceparent: 00-1-2-01\r\n"
    lines = await send(headers={"Traceparent": "fixed", "tracestate": "a=1", "x-kept": "yes"}, trace=trace)
    found = {line.split(":")[0].lower(): line for line in lines[1:] if line}
    assert found["traceparent"] == "traceparent: 00-1-2-01"
    assert "tracestate" not in found
    assert found["x-kept"] == "x-kept: yes"
