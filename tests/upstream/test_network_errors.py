import asyncio
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from antiphon.errors import UpstreamError, UpstreamTimeout
from antiphon.upstream.client import UpstreamClient
from antiphon.upstream.http1.errors import (
    CertificateError,
    ConnectError,
    ConnectTimeout,
    DeadlineExceeded,
    Disconnected,
    HttpError,
    IdleTimeout,
    IncompleteBody,
    InvalidHeader,
    InvalidResponse,
    InvalidUrl,
    ProxyRefused,
    ResolveError,
    TlsError,
)
from antiphon.upstream.network_errors import map_network_error
from antiphon.upstream.options import UpstreamOptions
from support.upstream_server import json_of, serve


async def fetch(url: str, **options: Any) -> Any:
    upstream = UpstreamClient("there", UpstreamOptions(base_url=url, **options), headers={})
    await upstream.start()
    try:
        return await upstream.get_json("/models")
    finally:
        await upstream.close()


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """A server's, with a certificate that nobody has signed but itself."""
    folder: Path = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "private.example")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "chain.pem").write_bytes(key.private_bytes(pem, *plain) + certificate.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "chain.pem")
    return context


async def test_self_signed_certificate_is_rejected(tls: ssl.SSLContext) -> None:
    async with serve([json_of({})], tls=tls) as server:
        with pytest.raises(UpstreamError) as raised:
            await fetch(server.url)
    assert (raised.value.message, raised.value.code) == (
        "The upstream's TLS certificate is not accepted: self-signed certificate.",
        "upstream_refused",
    )


async def test_tls_verification_can_be_disabled(tls: ssl.SSLContext) -> None:
    async with serve([json_of({"data": []})], tls=tls) as server:
        assert await fetch(server.url, verify_tls=False) == {"data": []}


async def test_missing_tls_is_reported() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UpstreamError, match=r"^The TLS handshake with the upstream failed\.$"):
            await fetch(f"https://127.0.0.1:{port}/v1")


async def test_refused_connection_is_reported() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(UpstreamError, match=r"^The upstream refuses connections\.$"):
            await fetch(f"http://127.0.0.1:{unused.getsockname()[1]}/v1")


async def test_connect_timeout_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        # The queue takes one more than it should; the third waits for an answer that does not come.
        with socket.create_connection(address), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(address)
            with pytest.raises(UpstreamTimeout, match=r"^The connection to the upstream timed out\.$"):
                await fetch(f"http://127.0.0.1:{address[1]}/v1", connect_timeout=0.05)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ResolveError(OSError(-2, "Name or service not known: private.example")),
            "The upstream's host name could not be resolved.",
        ),
        (ConnectError(OSError(113, "No route to host private.example")), "The upstream cannot be reached."),
        (ConnectError(ConnectionRefusedError(111, "private.example")), "The upstream refuses connections."),
        (ConnectTimeout(), "The connection to the upstream timed out."),
        (InvalidUrl("http://private.example:x"), "The address of the upstream is not a valid URL."),
        (InvalidHeader("private.example"), "The request to the upstream has an invalid header."),
        (InvalidResponse(), "The upstream's answer is not valid HTTP."),
        (IncompleteBody(), "The connection to the upstream was closed before the answer ended."),
        (IdleTimeout(), "The upstream stopped sending before its answer ended."),
        (ProxyRefused(407), "The proxy refused to connect to the upstream (status 407)."),
        (TlsError(ssl.SSLError(1, "private.example")), "The TLS handshake with the upstream failed."),
        (Disconnected(), "The upstream closed the connection."),
        (DeadlineExceeded(), "The upstream did not answer in time."),
        (
            CertificateError(ssl.SSLCertVerificationError(1, "mismatch")),
            "The upstream's TLS certificate is not accepted: it cannot be verified.",
        ),
    ],
)
def test_network_errors_have_messages_without_the_host(error: HttpError, message: str) -> None:
    mapped_network_errors = map_network_error(error)
    assert mapped_network_errors.message == message
    assert "private.example" not in message


def test_certificate_mismatch_hides_the_host() -> None:
    reason = ssl.SSLCertVerificationError(1, "failed")
    reason.verify_message = "Hostname mismatch, certificate is not valid for 'private.example'."
    mapped_network_errors = map_network_error(CertificateError(reason))
    assert mapped_network_errors.message == "The upstream's TLS certificate is not accepted: it is for another name."
