"""The client for URLs of clients: addresses, redirects and limits."""

import asyncio
import gzip
import socket
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from antiphon.errors import UpstreamError
from antiphon.upstream import outbound
from antiphon.upstream.addresses import OutboundRules
from antiphon.upstream.outbound import AddressRefused, Fetched, OutboundClient, OutboundError, OutboundTimeout, fetch
from support.certificates import Authority
from support.upstream_server import RESET, STALL, Reply, serve

LOOPBACK = OutboundRules.parse(["127.0.0.1"])
LIMITS: Any = {"max_bytes": 100_000, "timeout": 20.0}


def text_of(body: bytes, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(headers={"Content-Type": "text/plain; charset=UTF-8"} | named, body=body)


def redirect_to(url: str, status: int = 302) -> Reply:
    return Reply(status=status, headers={"Location": url})


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """The addresses of host names: each look-up takes the next list, and the last one repeats."""
    answers: dict[str, list[list[str]]] = {}

    async def resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
        lists = answers.get(host)
        if lists is None:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]
        texts = lists.pop(0) if len(lists) > 1 else lists[0]
        return [
            (socket.AF_INET6 if ":" in text else socket.AF_INET, socket.SOCK_STREAM, 0, "", (text, port))
            for text in texts
        ]

    monkeypatch.setattr(outbound, "resolve_host", resolve)
    return answers


async def fetch_refused(url: str, rules: OutboundRules = LOOPBACK) -> str:
    with pytest.raises(OutboundError) as raised:
        await fetch(url, rules=rules, **LIMITS)
    return raised.value.message


async def test_allowed_url_is_fetched() -> None:
    async with serve([text_of(b"hello")]) as server:
        fetched = await fetch(f"{server.url}/a?b=c#d", rules=LOOPBACK, headers={"X-Key": "1"}, **LIMITS)
    assert fetched == Fetched(
        url=f"{server.url}/a?b=c#d", status=200, content_type="text/plain", charset="utf-8", body=b"hello"
    )
    request = server.requests[0]
    assert (request.method, request.path, request.query, request.headers["x-key"]) == ("GET", "/v1/a", {"b": "c"}, "1")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "::",
        "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
        "64:ff9b:1::1", "2002:7f00:1::", "192.0.0.192",
    ],
)  # fmt: skip
async def test_name_with_a_private_address_is_refused(resolved: dict[str, list[list[str]]], address: str) -> None:
    resolved["public.example"] = [[address]]
    with pytest.raises(AddressRefused, match="private network") as raised:
        await fetch("http://public.example/", rules=OutboundRules(), **LIMITS)
    assert "outbound_allow" in raised.value.message
    assert address not in raised.value.message


async def test_private_url_is_refused_without_a_look_up(resolved: dict[str, list[list[str]]]) -> None:
    resolved["localhost"] = [["8.8.8.8"]]
    assert "private network" in await fetch_refused("http://localhost/")
    assert "must start with http" in await fetch_refused("file:///etc/passwd")


async def test_only_checked_addresses_are_connected_to(resolved: dict[str, list[list[str]]]) -> None:
    async with serve([text_of(b"hello")]) as server:
        # The address changes to a private one after the check. It is not looked up again.
        resolved["rebinding.example"] = [["10.0.0.1", "127.0.0.1"], ["10.0.0.1"]]
        fetched = await fetch(f"http://rebinding.example:{server.port}/", rules=LOOPBACK, **LIMITS)
    assert (fetched.body, server.requests[0].headers["host"]) == (b"hello", f"rebinding.example:{server.port}")


async def test_allowed_name_may_have_a_private_address(resolved: dict[str, list[list[str]]]) -> None:
    resolved["files.corp"] = [["127.0.0.1"]]
    async with serve([text_of(b"hello")]) as server:
        fetched = await fetch(f"http://Files.Corp.:{server.port}/", rules=OutboundRules.parse(["files.corp"]), **LIMITS)
    assert fetched.body == b"hello"


async def test_redirect_is_followed_with_its_checks() -> None:
    async with serve([redirect_to("/there?x=1"), text_of(b"hello")]) as server:
        fetched = await fetch(f"{server.url}/here", rules=LOOPBACK, headers={"Authorization": "Bearer k"}, **LIMITS)
    assert (fetched.url, fetched.body) == (f"http://127.0.0.1:{server.port}/there?x=1", b"hello")
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer k"] * 2


@pytest.mark.parametrize(
    "location",
    ["http://10.0.0.1/", "http://localhost:1/", "//169.254.169.254/latest", "http://[::1]/", "file:///etc/passwd"],
)
async def test_redirect_to_a_private_address_is_refused(location: str) -> None:
    async with serve([redirect_to(location)]) as server:
        with pytest.raises(AddressRefused):
            await fetch(server.url, rules=LOOPBACK, **LIMITS)
    assert len(server.requests) == 1


async def test_redirect_to_a_name_with_a_private_address_is_refused(resolved: dict[str, list[list[str]]]) -> None:
    resolved["inside.example"] = [["10.0.0.1"]]
    async with serve([redirect_to("http://inside.example/")]) as server:
        with pytest.raises(AddressRefused):
            await fetch(server.url, rules=LOOPBACK, **LIMITS)


async def test_other_server_of_a_redirect_gets_no_credentials(resolved: dict[str, list[list[str]]]) -> None:
    resolved["other.example"] = [["127.0.0.1"]]
    headers = {"Authorization": "Bearer k", "Cookie": "a=b", "X-Api-Key": "k", "Accept": "text/html"}
    async with serve([text_of(b"hello")]) as other:
        location = f"http://user:secret@other.example:{other.port}/x"
        async with serve([redirect_to(location)]) as server:
            url = server.url.replace("://", "://me:mine@")
            fetched = await fetch(url, rules=LOOPBACK, headers=headers, **LIMITS)
    assert server.requests[0].headers["authorization"] == "Bearer k"
    received = other.requests[0].headers
    assert received.keys().isdisjoint({"authorization", "cookie", "x-api-key"})
    assert (received["accept"], fetched.url) == ("text/html", f"http://other.example:{other.port}/x")


async def test_too_many_redirects_are_an_error() -> None:
    async with serve([redirect_to("/next") for _ in range(6)]) as server:
        assert await fetch_refused(server.url) == "The URL has more than 5 redirects."
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    "reply",
    [
        text_of(b"x" * 100_001),
        Reply(pieces=[b"x" * 50_000] * 3),
        text_of(gzip.compress(b"x" * 100_001), Content_Encoding="gzip"),
    ],
)
async def test_too_large_content_is_an_error(reply: Reply) -> None:
    async with serve([reply]) as server:
        assert await fetch_refused(server.url) == "The content of the URL is larger than 100000 bytes."


async def test_strong_compression_is_an_error() -> None:
    bomb = zlib.compress(bytes(20_000_000), 9)
    async with serve([text_of(bomb, Content_Encoding="deflate")]) as server:
        with pytest.raises(OutboundError, match="compressed too strongly"):
            await fetch(server.url, rules=LOOPBACK, max_bytes=50_000_000, timeout=20.0)


async def test_compressed_content_is_decoded() -> None:
    async with serve([text_of(gzip.compress(b"hello"), Content_Encoding="gzip")]) as server:
        assert (await fetch(server.url, rules=LOOPBACK, **LIMITS)).body == b"hello"


@pytest.mark.parametrize("reply", [Reply(raw=STALL), Reply(pieces=[b"x", STALL])])
async def test_timeout_includes_the_body(reply: Reply) -> None:
    async with serve([reply]) as server:
        with pytest.raises(OutboundTimeout):
            await fetch(server.url, rules=LOOPBACK, max_bytes=100, timeout=0.05)


async def test_error_status_is_returned() -> None:
    async with serve([Reply(status=404, body=b"no")]) as server:
        fetched = await fetch(server.url, rules=LOOPBACK, **LIMITS)
    assert (fetched.status, fetched.content_type, fetched.charset) == (404, "", None)


async def test_unreachable_server_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert await fetch_refused(f"http://127.0.0.1:{port}/") == "The server refuses connections."


async def test_tls_is_verified_for_the_name(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, resolved: dict[str, list[list[str]]]
) -> None:
    resolved |= {"good.example": [["127.0.0.1"]], "bad.example": [["127.0.0.1"]]}
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    outbound.get_tls_context.cache_clear()
    tls = authority.make_server_context("good.example")
    try:
        async with serve([text_of(b"hello"), text_of(b"hello")], tls=tls) as server:
            fetched = await fetch(f"https://good.example:{server.port}/", rules=LOOPBACK, **LIMITS)
            message = await fetch_refused(f"https://bad.example:{server.port}/")
    finally:
        outbound.get_tls_context.cache_clear()
    assert fetched.body == b"hello"
    assert message == "The server's TLS certificate is not accepted: it is for another name."


async def test_connections_are_reused_by_one_client() -> None:
    async with serve([text_of(b"a"), text_of(b"b")]) as server, OutboundClient(LOOPBACK) as client:
        bodies = [(await client.fetch(server.url, **LIMITS)).body for _ in range(2)]
        response = await asyncio.wait_for(client.send("POST", server.url, body=b"{}"), 20)
        response.close()
    assert (bodies, server.connections) == ([b"a", b"b"], 1)
    assert (server.requests[2].method, server.requests[2].body) == ("POST", b"{}")
    assert issubclass(OutboundError, UpstreamError)


@pytest.mark.parametrize(("method", "count"), [("GET", 3), ("POST", 2)])
async def test_post_on_a_connection_that_is_lost_is_not_repeated(method: str, count: int) -> None:
    async with serve([text_of(b"a"), Reply(raw=RESET), text_of(b"b")]) as server, OutboundClient(LOOPBACK) as client:
        await client.fetch(server.url, **LIMITS)
        try:
            (await client.send(method, server.url)).close()
            is_lost = False
        except OutboundError:
            is_lost = True
    assert (len(server.requests), is_lost) == (count, method == "POST")
