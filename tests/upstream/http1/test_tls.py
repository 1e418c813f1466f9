import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from antiphon.errors import UpstreamError, UpstreamTimeout
from support.certificates import Authority
from support.idle_clock import count_idle_time
from support.raw_server import (
    Peer,
    RawServer,
    count_connections,
    fetch,
    open_session,
    reply,
    reply_always,
    serve_raw,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def trusted(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """The authority, named by SSL_CERT_FILE."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    return authority


def make_url(server: RawServer, host: str) -> str:
    return f"https://{host}:{server.port}/v1"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_certificate_of_trusted_authority_is_accepted(trusted: Authority, host: str) -> None:
    tls = trusted.make_server_context("localhost", "127.0.0.1")
    async with serve_raw(reply_always(OK), tls=tls) as server, open_session(make_url(server, host)) as session:
        assert [await fetch(session) for _ in range(3)] == [b"hello"] * 3
        assert server.connections == 1


async def test_certificate_of_unknown_authority_is_rejected(authority: Authority) -> None:
    tls = authority.make_server_context("localhost")
    async with serve_raw(reply(OK), tls=tls) as server, open_session(make_url(server, "localhost")) as session:
        with pytest.raises(UpstreamError, match=r"^The upstream's TLS certificate is not accepted: ") as raised:
            await fetch(session)
        assert raised.value.code == "upstream_refused"
        assert count_connections(session) == 0


@pytest.mark.parametrize("names", [["other.example"], ["127.0.0.2"], ["*.localhost"]])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_certificate_for_another_name_is_rejected(trusted: Authority, names: list[str], host: str) -> None:
    tls = trusted.make_server_context(*names)
    async with serve_raw(reply(OK), tls=tls) as server, open_session(make_url(server, host)) as session:
        with pytest.raises(UpstreamError, match=r"not accepted: it is for another name\.$"):
            await fetch(session)


async def test_expired_certificate_is_rejected(trusted: Authority) -> None:
    tls = trusted.make_server_context("localhost", expired=True)
    async with serve_raw(reply(OK), tls=tls) as server, open_session(make_url(server, "localhost")) as session:
        with pytest.raises(UpstreamError, match=r"not accepted: certificate has expired\.$"):
            await fetch(session)


async def test_verification_can_be_disabled(authority: Authority) -> None:
    tls = authority.make_server_context("other.example", expired=True)
    async with (
        serve_raw(reply(OK), tls=tls) as server,
        open_session(make_url(server, "localhost"), verify_tls=False) as session,
    ):
        assert await fetch(session) == b"hello"


async def test_server_gets_the_host_name(trusted: Authority) -> None:
    names: list[Any] = []
    tls = trusted.make_server_context("localhost")
    tls.sni_callback = lambda _, name, __: names.append(name)
    async with serve_raw(reply(OK), tls=tls) as server, open_session(make_url(server, "localhost")) as session:
        assert await fetch(session) == b"hello"
    assert names == ["localhost"]


async def test_response_split_at_every_byte_is_read_over_tls(trusted: Authority) -> None:
    tls = trusted.make_server_context("localhost")
    handle = reply(*(OK[at : at + 1] for at in range(len(OK))))
    async with serve_raw(handle, tls=tls) as server, open_session(make_url(server, "localhost")) as session:
        assert await fetch(session) == b"hello"


async def test_large_body_is_sent_and_received_over_tls(trusted: Authority) -> None:
    body = bytes(range(256)) * 16384

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        received = await peer.reader.readexactly(len(body))
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(received) + received)
        await peer.until_closed()

    tls = trusted.make_server_context("localhost")
    async with serve_raw(handle, tls=tls) as server, open_session(make_url(server, "localhost")) as session:
        assert await fetch(session, body=body) == body


async def test_reset_within_body_is_an_error_over_tls(trusted: Authority) -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(OK[:-1])
        peer.reset()

    tls = trusted.make_server_context("localhost")
    async with serve_raw(handle, tls=tls) as server, open_session(make_url(server, "localhost")) as session:
        with pytest.raises(UpstreamError, match="closed before the answer ended"):
            await fetch(session)
        assert count_connections(session) == 0


async def test_server_without_tls_is_reported() -> None:
    async def handle(peer: Peer) -> None:
        await peer.reader.read(1)
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with serve_raw(handle) as server, open_session(make_url(server, "localhost")) as session:
        with pytest.raises(UpstreamError, match=r"^The TLS handshake with the upstream failed\.$"):
            await fetch(session)
        assert count_connections(session) == 0


async def test_server_that_closes_in_the_handshake_is_reported() -> None:
    async def handle(peer: Peer) -> None:
        await peer.reader.read(1)

    async with serve_raw(handle) as server, open_session(make_url(server, "localhost")) as session:
        with pytest.raises(UpstreamError, match=r"^The (upstream cannot be reached|TLS handshake .* failed)\.$"):
            await fetch(session)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_silent_handshake_hits_the_connect_timeout() -> None:
    count_idle_time(asyncio.get_running_loop())

    async def handle(peer: Peer) -> None:
        await peer.until_closed()

    async with (
        serve_raw(handle) as server,
        open_session(make_url(server, "localhost"), connect_timeout=0.05) as session,
    ):
        with pytest.raises(UpstreamTimeout, match=r"^The connection to the upstream timed out\.$"):
            await fetch(session)
        await server.until_closed(1)


async def test_cancelled_handshake_closes_the_socket() -> None:
    shaking = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.reader.read(1)
        shaking.set()
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(make_url(server, "localhost")) as session:
        call = asyncio.create_task(fetch(session))
        await shaking.wait()
        call.cancel()
        await server.until_closed(1)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert count_connections(session) == 0


async def test_closing_the_session_closes_tls_connections(trusted: Authority) -> None:
    tls = trusted.make_server_context("localhost")
    async with serve_raw(reply_always(OK), tls=tls) as server:
        async with open_session(make_url(server, "localhost")) as session:
            assert await fetch(session) == b"hello"
        await server.until_closed(1)


def test_default_context_verifies_names_and_certificates(tmp_path: Path) -> None:
    from antiphon.upstream.http1.connect import make_tls_context

    context = make_tls_context(verify=True)
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
