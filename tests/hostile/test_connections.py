"""Connections that send nothing, too little or nonsense, and clients that do not read."""

import json
import re
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.loop_blocks import MAX_BLOCK
from support.victim import TIMEOUT, Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

StartVictim = Callable[..., Victim]
KEYS = [{"key": "sk-ada", "project": "a"}]
AUTHORIZED = {"Authorization": "Bearer sk-ada"}
HOST = b"Host: localhost\r\n"
HANDSHAKE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
LONG = {
    "rules": [
        {"user": "go", "answers": [[{"text": ["x" * 2**18]}, {"delay": 0}] * 64]},
        {"user": "pause", "answers": [[*[{"text": ["x" * 2**17]}] * 32, {"delay": 0.5}]]},
        {"user": "short", "answers": [[{"text": "One "}, {"delay": 0.3}, {"text": "two."}]]},
    ],
    "default": "x" * 6_000_000,
}


def read_all(client: socket.socket) -> bytes:
    received = b""
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def wait_for_end(client: socket.socket) -> None:
    """Wait until the server has closed the connection, without reading anything from it."""
    poll = select.poll()
    poll.register(client, select.POLLHUP | select.POLLERR)
    assert poll.poll(TIMEOUT * 1000), "the server did not close the connection"


@contextmanager
def more_descriptors() -> Iterator[None]:
    """Allow this process to open as many sockets as a test needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_many(server: Victim, count: int, data: bytes, stack: ExitStack) -> list[socket.socket]:
    clients = [stack.enter_context(server.connect()) for _ in range(count)]
    for client in clients:
        client.sendall(data)
    return clients


def wait_until_open(clients: list[socket.socket], limit: int, server: Victim) -> None:
    """Wait until the server has closed all connections but some. Meanwhile it must answer others."""
    ended = time.monotonic() + TIMEOUT
    poll = select.poll()
    for client in clients:
        poll.register(client, select.POLLRDHUP)
    while len(clients) - len(poll.poll(0)) > limit:
        assert time.monotonic() < ended
        assert server.ask("GET", "/healthz").status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST /v1/responses HTTP/1.1\r\n" + HOST + HANDSHAKE + b"\r\n",
        b"POST /v1/responses HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\n{",
    ],
    ids=["silent", "upgrade", "body without a key"],
)
def test_many_connections_without_a_key_leave_room_for_others(victim: StartVictim, data: bytes) -> None:
    server = victim(store="memory:", api_keys=KEYS, max_unauthenticated=100, max_unauthenticated_per_address=50)
    with ExitStack() as stack, more_descriptors():
        clients = open_many(server, 1100, data, stack)
        assert server.ask("GET", "/v1/models", headers=AUTHORIZED).status == 200
        wait_until_open(clients, 50, server)
    assert server.peak_mb() < 150
    assert server.longest_block() < MAX_BLOCK


def test_connections_without_a_key_are_evicted_with_503(victim: StartVictim) -> None:
    server = victim(store="memory:", api_keys=KEYS, max_unauthenticated=1)
    request = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"Authorization: Bearer sk-ada\r\n\r\n"
    with server.send_raw(request) as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        with server.send_raw(b"GET /healthz HT") as first, server.send_raw(b"GET /healthz HT"):
            answer = read_all(first)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 5\r\n" in answer
        assert b'"code":"server_overloaded"' in answer
        client.sendall(request)  # the connection with a key is still open
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert "too many connections: closed 1." in server.log()


@pytest.mark.parametrize("data", [b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n", b"GET /healthz HT"])
def test_limit_of_all_connections_closes_idle_ones_first(victim: StartVictim, data: bytes) -> None:
    """Without keys every complete head counts as authenticated, so only the limit of all connections applies."""
    server = victim(store="memory:", max_connections=20)
    is_complete = data.endswith(b"\r\n\r\n")
    with ExitStack() as stack:
        clients = []
        for _ in range(40):
            clients.append(stack.enter_context(server.send_raw(data)))
            if is_complete:
                assert clients[-1].recv(65536).startswith(b"HTTP/1.1 200 ")
        wait_until_open(clients, 20, server)
        assert server.ask("GET", "/healthz").status == 200


def test_limit_of_all_connections_spares_those_that_are_served(victim: StartVictim) -> None:
    script = {"rules": [{"user": "go", "answers": [[{"text": "One "}, {"wait": "never"}]]}]}
    server = victim(script=script, store="memory:", max_connections=3)
    body = b'{"model":"scripted","input":"go","stream":true}'
    request = b"POST /v1/responses HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(server.send_raw(request))
            received = b""
            while b"One" not in received:
                received += client.recv(65536)
        answer = read_all(stack.enter_context(server.connect()))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: " in answer


def test_low_limit_of_files_is_logged_and_respected(victim: StartVictim) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = victim(store="memory:", max_connections=2**31)
    assert f"this process may open only {hard} files" in server.log()
    limits = Path(f"/proc/{server.pid}/limits").read_text()
    assert re.search(rf"^Max open files\s+{hard}\s", limits, re.MULTILINE)


# Deadlines


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server with short deadlines, for all tests of this module.

    The time for a head is longer than a busy machine delays a client after its connect.
    """
    names = ("body_timeout_seconds", "idle_timeout_seconds", "websocket_first_message_seconds")
    seconds = dict.fromkeys(names, 0.5) | {"head_timeout_seconds": 4}
    server = Victim(tmp_path_factory.mktemp("impatient"), store="memory:", keepalive_seconds=0, **seconds)
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /healthz HT", b"408"),
        (b"POST /v1/responses HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\n", b"408"),
        (b"POST /v1/responses HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", b"408"),
        (b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n", b"200"),
        (b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\n", b"404"),
        (b"POST /v1/responses HTTP/1.1\r\n" + HOST + HANDSHAKE + b"\r\n", b"400"),
        (b"GET /v1/responses HTTP/1.1\r\n" + HOST + HANDSHAKE + b"\r\n", b"101"),
        (b"GET /v1/responses HTTP/1.1\r\n" + HOST + HANDSHAKE + b"\r\n\x81\xfe", b"101"),
    ],
)
def test_every_state_of_a_connection_has_a_deadline(impatient: Victim, data: bytes, status: bytes) -> None:
    with impatient.send_raw(data) as client:
        assert read_all(client).startswith(b"HTTP/1.1 " + status)


def test_silent_connection_is_closed(impatient: Victim) -> None:
    with impatient.connect() as client:
        assert read_all(client) == b""


def send_slowly(client: socket.socket, parts: list[bytes], seconds: float) -> bool:
    """Send a part each time. Return False if the server has closed the connection."""
    for part in parts:
        time.sleep(seconds)
        try:
            client.sendall(part)
        except OSError:
            return False
        if select.select([client], [], [], 0)[0]:
            return False
    return True


def test_body_below_the_minimum_rate_is_refused(impatient: Victim) -> None:
    head = b"POST /v1/responses HTTP/1.1\r\n" + HOST + b"Content-Length: 100000\r\n\r\n"
    with impatient.send_raw(head) as client:
        assert not send_slowly(client, [b" "] * 100, 0.05)
        assert read_all(client).startswith(b"HTTP/1.1 408 ")


def test_slow_body_above_the_minimum_rate_is_accepted(victim: StartVictim) -> None:
    """A period is longer than a busy machine delays the client, and the body takes longer than a period."""
    server = victim(store="memory:", body_timeout_seconds=4)
    body = b'{"model": "scripted", "input": "' + b"x" * 90_000 + b'"}'
    head = b"POST /v1/responses HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(body)
    with server.send_raw(head) as client:
        parts = [body[index : index + 1000] for index in range(0, len(body), 1000)]
        assert send_slowly(client, parts[:-1], 0.05)
        client.sendall(parts[-1])
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


# Clients that do not read


def create(body: dict[str, Any]) -> bytes:
    data = json.dumps({"model": "scripted", "input": "go"} | body).encode()
    return b"POST /v1/responses HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n%b" % (len(data), data)


def connect_with_window(server: Victim, size: int) -> socket.socket:
    """Return a connection with a small receive buffer. Its size must be set before the connect."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    client.settimeout(TIMEOUT)
    client.connect(("127.0.0.1", server.port))
    return client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server with a short write timeout, for all tests of this module."""
    started = Victim(tmp_path_factory.mktemp("writes"), script=LONG, store="memory:", write_timeout_seconds=0.8)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def tolerant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server whose write timeout is longer than a busy machine delays a client."""
    started = Victim(tmp_path_factory.mktemp("tolerant"), script=LONG, store="memory:", write_timeout_seconds=4)
    yield started
    started.stop()


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_reads_nothing_is_disconnected(server: Victim, stream: bool) -> None:
    server.reset_peak()
    with ExitStack() as stack:
        clients = [stack.enter_context(server.send_raw(create({"stream": stream, "store": False}))) for _ in range(4)]
        for client in clients:
            wait_for_end(client)
    assert server.ask("GET", "/healthz").status == 200
    assert server.peak_mb() < (300 if stream else 1200)


def test_client_that_reads_too_slowly_is_disconnected(victim: StartVictim) -> None:
    server = victim(script=LONG, store="memory:", write_timeout_seconds=0.8, min_bytes_per_second=2**30)
    with server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(create({"stream": True, "store": False}))
        poll = select.poll()
        poll.register(client, select.POLLHUP | select.POLLERR)
        ended = time.monotonic() + TIMEOUT
        while not poll.poll(20):
            assert time.monotonic() < ended
            client.recv(1000)


def test_slow_reader_above_the_minimum_rate_is_served(tolerant: Victim) -> None:
    """The buffers of the kernel hide the progress of a slow reader for longer than the timeout."""
    with connect_with_window(tolerant, 4096) as client:
        client.sendall(create({"stream": True, "store": False}))
        for _ in range(600):
            time.sleep(0.01)
            assert client.recv(1000)


def test_idle_client_with_unread_response_is_disconnected(server: Victim) -> None:
    """A close waits until the client has read everything. A client that never reads must not hold the connection."""
    request = create({"input": "hi", "store": False})
    with server.send_raw(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)) as client:
        wait_for_end(client)
    assert server.ask("GET", "/healthz").status == 200


def test_reader_that_stops_before_the_closing_events_holds_one_of_them(tolerant: Victim) -> None:
    """Four closing events repeat the output of 4 MB. The server holds the output itself, and one event of it."""
    tolerant.reset_peak()
    before = tolerant.rss_mb()
    with ExitStack() as stack:
        clients = []
        for _ in range(10):
            client = stack.enter_context(connect_with_window(tolerant, 65536))
            client.sendall(create({"input": "pause", "stream": True, "store": False}))
            unread = 32 * 2**17
            while unread > 0:
                part = client.recv(65536)
                assert part
                unread -= len(part)
            clients.append(client)
        for client in clients:
            wait_for_end(client)
    assert tolerant.peak_mb() < before + 10 * 12 + 20


# Pipelining


def test_pipelined_requests_are_limited(victim: StartVictim) -> None:
    server = victim(store="memory:")
    with server.connect() as client:
        client.sendall((b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n") * 2000)
        answers = read_all(client)
    assert 1 <= answers.count(b"HTTP/1.1 200 OK") < 2000
    assert server.peak_mb() < 100
    assert server.longest_block() < MAX_BLOCK


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\ngarbage\r\n\r\n",
        b"POST /v1/responses HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/responses HTTP/1.1\r\n" + HOST + HANDSHAKE + b"\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 300_000,
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_invalid_data_never_enters_a_running_response(tolerant: Victim, garbage: bytes, at_once: bool) -> None:
    request = create({"input": "short", "stream": True})
    with tolerant.send_raw(request + garbage if at_once else request) as client:
        received = b""
        if not at_once:
            while b"One" not in received:
                received += client.recv(65536)
            client.sendall(garbage)
        received += read_all(client)
    first, marker, rest = received.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert marker, received[-500:]
    assert first.count(b"HTTP/1.1 ") == 1
    assert rest.count(b"HTTP/1.1 400 ") + rest.count(b"HTTP/1.1 431 ") == 1
    assert rest.count(b"HTTP/1.1 ") == 1 + (b"/healthz" in garbage and b"garbage" in garbage)
