"""DNS rebinding against a server without keys, and malformed heads of requests."""

import sys
from collections.abc import Callable, Iterator

import pytest

from support.loop_blocks import MAX_BLOCK
from support.victim import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

StartVictim = Callable[..., Victim]
HOST = "Host: localhost\r\n"
HANDSHAKE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    server = Victim(
        tmp_path_factory.mktemp("keyless"),
        script={"default": "Hello."},
        store="memory:",
        allowed_hosts=["models.example", "*.lan"],
    )
    yield server
    server.stop()


def ask(server: Victim, head: str) -> bytes:
    with server.send_raw(head.encode("latin-1")) as client:
        return client.recv(65536)


def read_status(answer: bytes) -> int:
    return int(answer.split()[1])


ROUTES = ["GET /healthz", "GET /", "GET /v1/models", "POST /v1/responses", "GET /openapi.json", "GET /nowhere"]
FORGED = [
    "evil.example",
    "evil.example:8484",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil-localhost",
    "192.168.1.7:8484",
    "0.0.0.0",
    "[2001:db8::1]:8484",
    "host.docker.internal",
    "models.example.evil.example",
    "evilmodels.example",
    "lan",
]


@pytest.mark.parametrize("route", ROUTES)
def test_forged_host_is_refused_on_every_route(keyless: Victim, route: str) -> None:
    answer = ask(keyless, f"{route} HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n\r\n")
    assert read_status(answer) == 403
    assert b'"code":"host_not_allowed"' in answer
    assert b"'evil.example' is not allowed" in answer
    assert b"allowed_hosts" in answer


@pytest.mark.parametrize("host", FORGED)
def test_forged_host_is_refused(keyless: Victim, host: str) -> None:
    assert read_status(ask(keyless, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n")) == 403
    assert read_status(ask(keyless, f"GET /v1/responses HTTP/1.1\r\nHost: {host}\r\n{HANDSHAKE}\r\n")) == 403
    # The host of the target has precedence.
    assert read_status(ask(keyless, f"GET http://{host}/v1/models HTTP/1.1\r\n{HOST}\r\n")) == 403


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "localhost.",
        "127.0.0.1:8484",
        "127.8.9.1",
        "[::1]:8484",
        "models.example:80",
        "Models.Example",
        "a.lan",
        "a.b.lan:9",
    ],
)
def test_loopback_and_configured_names_are_accepted(keyless: Victim, host: str) -> None:
    assert read_status(ask(keyless, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n")) == 200
    assert read_status(ask(keyless, f"GET /v1/responses HTTP/1.1\r\nHost: {host}\r\n{HANDSHAKE}\r\n")) == 101


def test_page_of_the_server_itself_is_accepted(keyless: Victim) -> None:
    head = "GET /v1/models HTTP/1.1\r\nHost: localhost:8484\r\nOrigin: http://{}\r\n\r\n"
    assert read_status(ask(keyless, head.format("localhost:8484"))) == 200
    assert read_status(ask(keyless, head.format("localhost:3000"))) == 403


def test_every_host_is_accepted_with_a_key(victim: StartVictim) -> None:
    server = victim(store="memory:", api_keys=[{"key": "sk-ada"}])
    head = "GET /v1/models HTTP/1.1\r\nHost: any.example\r\nAuthorization: Bearer {}\r\n\r\n"
    assert [read_status(ask(server, head.format(key))) for key in ("sk-ada", "wrong")] == [200, 401]


def test_server_on_all_addresses_accepts_addresses_but_no_names(victim: StartVictim) -> None:
    server = victim(store="memory:", host="0.0.0.0", insecure=True)
    hosts = ("192.168.1.7:8484", "[2001:db8::1]", "0.0.0.0:8484", "localhost", "evil.example", "host.docker.internal")
    answers = [ask(server, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n") for host in hosts]
    assert list(map(read_status, answers)) == [200, 200, 200, 200, 403, 403]


# Malformed heads


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /healthz HTTP/1.1\r\n\r\n", 400),
        ("GET /healthz HTTP/1.0\r\n\r\n", 200),
        (f"GET /healthz HTTP/1.1\r\n{HOST}{HOST}\r\n", 400),
        (f"GET /healthz HTTP/1.1\r\n{HOST}Host: evil.example\r\n\r\n", 400),
        (f"GET /healthz HTTP/1.0\r\n{HOST}{HOST}\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost:\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: local host\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: localhost@evil.example\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: localhost/evil\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: localhost, evil.example\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: localhost:port\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: [::1\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: b\xfccher.example\r\n\r\n", 400),
        (f"GET /v1/responses HTTP/1.1\r\n{HANDSHAKE}\r\n", 400),
        (f"GET /v1/responses HTTP/1.1\r\n{HOST}{HOST}{HANDSHAKE}\r\n", 400),
        (f"POST /v1/responses HTTP/1.1\r\n{HOST}{HANDSHAKE}\r\n", 400),
        (f"POST /v1/responses HTTP/1.1\r\n{HOST}{HANDSHAKE}Content-Length: 2\r\n\r\n{{}}", 400),
        (f"DELETE /v1/responses HTTP/1.1\r\n{HOST}{HANDSHAKE}\r\n", 400),
        (f"GET /v1/responses HTTP/1.1\r\n{HOST}{HANDSHAKE}Content-Length: 2\r\n\r\n{{}}", 400),
        (f"GET /v1/responses HTTP/1.0\r\n{HOST}{HANDSHAKE}\r\n", 400),
        (f"GET /v1/responses HTTP/1.1\r\n{HOST}{HANDSHAKE.replace('13', '12')}\r\n", 400),
        (f"GET /v1/responses HTTP/1.1\r\n{HOST}{HANDSHAKE.replace('==', '')}\r\n", 400),
        (f"GET /v1/responses HTTP/1.1\r\n{HOST}{HANDSHAKE}{'X: y' * 5000}\r\n\r\n", 400),
        (f"GET /v1/responses HTTP/1.1\r\n{HOST}{HANDSHAKE}" + "X: y\r\n" * 200 + "\r\n", 400),
        (f"GET /healthz HTTP/1.1\r\n{HOST}Connection: Upgrade\r\nUpgrade: other\r\n\r\n", 200),
        (
            f"POST /v1/responses HTTP/1.1\r\n{HOST}Connection: Upgrade\r\nUpgrade: other\r\nContent-Length: 1\r\n\r\n1",
            400,
        ),
        (f"POST /v1/responses HTTP/1.0\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n", 400),
        (
            f"POST /v1/responses HTTP/1.1\r\n{HOST}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n",
            400,
        ),
        (
            f"POST /v1/responses HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n1\r\n1\r\n",
            400,
        ),
        (f"POST /v1/responses HTTP/1.1\r\n{HOST}Content-Length: 2\r\nContent-Length: 2\r\n\r\n{{}}", 400),
        (f"POST /v1/responses HTTP/1.1\r\n{HOST}Content-Length: +2\r\n\r\n{{}}", 400),
        (f"POST /v1/responses HTTP/1.1\r\n{HOST}Content-Length: {'9' * 5000}\r\n\r\n", 400),
        (f"POST /v1/responses HTTP/1.1\r\n{HOST}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (f"GET /healthz HTTP/1.1\r\n{HOST}X-A: b\r\n c\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\nHost: localhost\n\n", 400),
        (f"GET /healthz HTTP/1.1\r\n{HOST}X: a\nY: b\r\n\r\n", 400),
        (f"GET /healthz HTTP/1.1\r\n{HOST}X: a\rY: b\r\n\r\n", 400),
        (f"GET /healthz HTTP/1.1\r\n{HOST}X: a\0b\r\n\r\n", 400),
        (f"GET /healthz HTTP/1.1\r\n{HOST}X\0: b\r\n\r\n", 400),
        (f"GET /health\0z HTTP/1.1\r\n{HOST}\r\n", 400),
        (f"GET /healthz HTTP/2.0\r\n{HOST}\r\n", 505),
        (f"GET /healthz HTTP/1.1\r\n{HOST}" + "X: y\r\n" * 300 + "\r\n", 431),
        (f"GET /healthz HTTP/1.1\r\n{HOST}" + "X:\r\n" * 50_000 + "\r\n", 431),
    ],
)
def test_malformed_head_gets_its_status(keyless: Victim, head: str, status: int) -> None:
    assert read_status(ask(keyless, head)) == status


def test_response_to_http_1_0_is_not_chunked(keyless: Victim) -> None:
    body = '{"model": "scripted", "input": "go", "stream": true}'
    with keyless.send_raw(
        f"POST /v1/responses HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    ) as client:
        received = b""
        while part := client.recv(65536):
            received += part
    head, _, stream = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    assert stream.startswith(b"event: response.created\n")
    assert stream.endswith(b"data: [DONE]\n\n")


def test_malformed_heads_take_no_time_and_no_memory(keyless: Victim) -> None:
    """Runs after the tests above, on the same server."""
    assert keyless.peak_mb() < 150
    assert keyless.longest_block() < MAX_BLOCK
