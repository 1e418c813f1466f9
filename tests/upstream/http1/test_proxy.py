import asyncio

import pytest

from antiphon.errors import UpstreamError, UpstreamTimeout
from antiphon.upstream.http1.proxy import find_proxy
from antiphon.upstream.http1.request import parse_origin
from support.certificates import Authority
from support.http_proxy import serve_proxy
from support.idle_clock import count_idle_time
from support.raw_server import Peer, count_connections, fetch, open_session, reply, reply_always, serve_raw

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
BASIC = "Basic dXNlcjpzZWNyZXQ="  # user:secret


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without proxies."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def trusted(authority: Authority, environment: pytest.MonkeyPatch) -> Authority:
    environment.setenv("SSL_CERT_FILE", str(authority.path))
    return authority


async def test_https_goes_through_a_tunnel(trusted: Authority, environment: pytest.MonkeyPatch) -> None:
    tls = trusted.make_server_context("localhost")
    async with serve_raw(reply_always(OK), tls=tls) as server, serve_proxy() as proxy:
        environment.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        async with open_session(f"https://localhost:{server.port}/v1", trust_env=True) as session:
            assert [await fetch(session) for _ in range(3)] == [b"hello"] * 3
    assert proxy.heads == [[f"CONNECT localhost:{server.port} HTTP/1.1", f"Host: localhost:{server.port}"]]


async def test_https_goes_through_a_tls_proxy(trusted: Authority, environment: pytest.MonkeyPatch) -> None:
    tls = trusted.make_server_context("localhost")
    async with serve_raw(reply_always(OK), tls=tls) as server, serve_proxy(tls=tls) as proxy:
        environment.setenv("HTTPS_PROXY", f"https://localhost:{proxy.port}")
        async with open_session(f"https://localhost:{server.port}/v1", trust_env=True) as session:
            assert [await fetch(session) for _ in range(2)] == [b"hello"] * 2
    assert len(proxy.heads) == 1


async def test_http_goes_in_absolute_form(environment: pytest.MonkeyPatch) -> None:
    async with serve_raw(reply(OK)) as server, serve_proxy() as proxy:
        environment.setenv("http_proxy", f"127.0.0.1:{proxy.port}")
        async with open_session(server.url, trust_env=True) as session:
            assert await fetch(session) == b"hello"
    (head,) = proxy.heads
    assert head[:2] == [f"POST {server.url}/chat HTTP/1.1", f"Host: 127.0.0.1:{server.port}"]


async def test_http_goes_through_a_tls_proxy(trusted: Authority, environment: pytest.MonkeyPatch) -> None:
    tls = trusted.make_server_context("localhost")
    async with serve_raw(reply(OK)) as server, serve_proxy(tls=tls) as proxy:
        environment.setenv("HTTP_PROXY", f"https://localhost:{proxy.port}")
        async with open_session(server.url, trust_env=True) as session:
            assert await fetch(session) == b"hello"
    assert len(proxy.heads) == 1


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_user_and_password_authenticate_at_the_proxy(
    scheme: str, trusted: Authority, environment: pytest.MonkeyPatch
) -> None:
    tls = trusted.make_server_context("localhost") if scheme == "https" else None
    seen: list[bytes] = []

    async def handle(peer: Peer) -> None:
        seen.append(await peer.read_request())
        await peer.send(OK)

    async with serve_raw(handle, tls=tls) as server, serve_proxy(authorization=BASIC) as proxy:
        environment.setenv(f"{scheme}_proxy", f"http://user:secret@127.0.0.1:{proxy.port}")
        async with open_session(f"{scheme}://localhost:{server.port}/v1", trust_env=True) as session:
            assert await fetch(session) == b"hello"
    assert b"Proxy-Authorization" not in seen[0]
    assert f"Proxy-Authorization: {BASIC}" in proxy.heads[0]


async def test_tunnel_without_authentication_is_refused(trusted: Authority, environment: pytest.MonkeyPatch) -> None:
    async with serve_proxy(authorization=BASIC) as proxy:
        environment.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        async with open_session("https://localhost:1/v1", trust_env=True) as session:
            with pytest.raises(UpstreamError, match=r"^The proxy refused .* \(status 407\)\.$") as raised:
                await fetch(session)
            assert raised.value.code == "upstream_refused"
            assert count_connections(session) == 0


async def test_request_without_authentication_is_refused(environment: pytest.MonkeyPatch) -> None:
    async with serve_proxy(authorization=BASIC) as proxy:
        environment.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        async with open_session("http://localhost:1/v1", trust_env=True) as session:
            with pytest.raises(UpstreamError, match=r"^status 407: auth$"):
                await fetch(session)


async def test_certificate_is_verified_through_a_tunnel(trusted: Authority, environment: pytest.MonkeyPatch) -> None:
    tls = trusted.make_server_context("other.example")
    async with serve_raw(reply(OK), tls=tls) as server, serve_proxy() as proxy:
        environment.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        async with open_session(f"https://localhost:{server.port}/v1", trust_env=True) as session:
            with pytest.raises(UpstreamError, match=r"not accepted: it is for another name\.$"):
                await fetch(session)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nsurplus", "not valid HTTP"),
        (b"nonsense\r\n\r\n", "not valid HTTP"),
        (b"HTTP/1.1 20\r\n\r\n", "not valid HTTP"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "status 101"),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", "status 302"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, "not valid HTTP"),
        (b"HTTP/1.1 200 O", "closed the connection"),
        (b"", "closed the connection"),
    ],
)
async def test_invalid_answer_of_the_proxy_is_an_error(
    answer: bytes, message: str, trusted: Authority, environment: pytest.MonkeyPatch
) -> None:
    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(answer)

    async with serve_raw(handle) as proxy:
        environment.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        async with open_session("https://localhost:1/v1", trust_env=True) as session:
            with pytest.raises(UpstreamError, match=message):
                await fetch(session)
            assert count_connections(session) == 0


async def test_tunnel_answer_split_at_every_byte_is_read(trusted: Authority, environment: pytest.MonkeyPatch) -> None:
    tls = trusted.make_server_context("localhost")
    answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX: y\r\n\r\n"
    async with serve_raw(reply(OK), tls=tls) as server, serve_proxy(answer=answer) as proxy:
        environment.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        async with open_session(f"https://localhost:{server.port}/v1", trust_env=True) as session:
            assert await fetch(session) == b"hello"


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_silent_proxy_hits_the_connect_timeout(environment: pytest.MonkeyPatch) -> None:
    count_idle_time(asyncio.get_running_loop())

    async def handle(peer: Peer) -> None:
        await peer.until_closed()

    async with serve_raw(handle) as proxy:
        environment.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        async with open_session("https://localhost:1/v1", trust_env=True, connect_timeout=0.05) as session:
            with pytest.raises(UpstreamTimeout, match="timed out"):
                await fetch(session)
            await proxy.until_closed(1)


async def test_environment_is_not_trusted_by_default(environment: pytest.MonkeyPatch) -> None:
    async with serve_raw(reply(OK)) as server, serve_proxy() as proxy:
        environment.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        async with open_session(server.url) as session:
            assert await fetch(session) == b"hello"
    assert proxy.heads == []


@pytest.mark.parametrize(
    ("excluded", "url", "is_used"),
    [
        ("", "http://a.example/v1", True),
        ("a.example", "http://a.example/v1", False),
        ("example", "http://a.example/v1", False),
        ("b.example", "http://a.example/v1", True),
        ("a.example:8080", "http://a.example:8080/v1", False),
        ("a.example:8080", "http://a.example:8081/v1", True),
        ("*", "http://a.example/v1", False),
        ("::1", "http://[::1]:8000/v1", False),
        ("localhost,127.0.0.1", "http://127.0.0.1:8000/v1", False),
        ("", "https://a.example/v1", False),  # HTTP_PROXY is not for https
    ],
)
def test_no_proxy_excludes_hosts(excluded: str, url: str, is_used: bool, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HTTP_PROXY", "http://proxy.example:3128")
    environment.setenv("ALL_PROXY", "http://other.example:3128")
    environment.setenv("NO_PROXY", excluded)
    proxy = find_proxy(parse_origin(url))
    assert (proxy.origin.authority if proxy is not None else None) == ("proxy.example:3128" if is_used else None)


async def test_invalid_proxy_address_is_reported(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HTTP_PROXY", "socks5://127.0.0.1:1080")
    async with open_session("http://localhost:1/v1", trust_env=True) as session:
        with pytest.raises(UpstreamError, match="not a valid URL"):
            await fetch(session)
