"""Many idle streams and slow readers on one server: memory is bounded for each of them, and others are served.

ANTIPHON_TEST_STREAMS is the number of idle streams. `make test` has few of them, `make test-slow` has 2,000.
"""

import json
import os
import resource
import select
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import randrange

import pytest

from support.victim import TIMEOUT, Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

IDLE = int(os.environ.get("ANTIPHON_TEST_STREAMS", "200"))
SLOW, SOCKETS = IDLE // 4, IDLE // 20
# Memory for one idle stream, and for one reader of an answer of 1 MB: the answer, and one event that repeats it.
MAX_IDLE_MB, MAX_SLOW_MB = 0.06, 2.2
# Hundreds of clients can be ready at the same moment. The loop serves all of them in one pass.
MAX_BLOCK = 1.0
SCRIPT = {
    "rules": [
        {"user": "idle", "answers": [[{"text": "a"}, {"delay": 3600}]]},
        {"user": "long", "answers": [[{"text": ["x" * 5000] * 200}]]},
    ],
    "default": "Hello.",
}
HEAD = "Host: localhost\r\nContent-Type: application/json\r\n"
UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def make_request(text: str) -> bytes:
    body = json.dumps({"model": "scripted", "input": text, "stream": True, "store": False})
    return f"POST /v1/responses HTTP/1.1\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def make_message(text: str) -> bytes:
    """Return a WebSocket message with a request, with a mask of zeros."""
    body = json.dumps({"type": "response.create", "model": "scripted", "input": text, "store": False}).encode()
    return bytes((0x81, 0x80 | len(body))) + bytes(4) + body


def read_until(client: socket.socket, text: bytes) -> None:
    received = b""
    while text not in received:
        part = client.recv(65536)
        assert part, received
        received = received[-len(text) :] + part


def find_closed(clients: list[socket.socket]) -> list[socket.socket]:
    poll = select.poll()
    for client in clients:
        poll.register(client, select.POLLHUP | select.POLLERR | select.POLLRDHUP)
    closed = {descriptor for descriptor, _ in poll.poll(0)}
    return [client for client in clients if client.fileno() in closed]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server that does not give slow readers up during the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * (IDLE + SLOW + SOCKETS) + 100
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"a process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    folder: Path = tmp_path_factory.mktemp("streams")
    started = Victim(folder, script=SCRIPT, write_timeout_seconds=3600, min_bytes_per_second=0, log_level="warning")
    yield started
    started.stop()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def connect(server: Victim) -> Iterator[Callable[[bytes], socket.socket]]:
    """Return a function that sends bytes on a new connection with a small receive buffer.

    They come from an address that is used for the first time. The kernel remembers the packets of former connections
    (`ip tcp_metrics`) and may buffer 4 MB for each new one: the server is then at other events of the answer.
    """
    address = f"127.{randrange(1, 255)}.{randrange(1, 255)}.{randrange(1, 255)}"
    with ExitStack() as stack:

        def open_connection(data: bytes) -> socket.socket:
            client = stack.enter_context(socket.socket())
            client.settimeout(TIMEOUT)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.bind((address, 0))
            client.connect(("127.0.0.1", server.port))
            client.sendall(data)
            return client

        yield open_connection


def check_others(server: Victim) -> None:
    """Other clients are served."""
    for fields in ({}, {"stream": True}, {"store": False}) * 4:
        answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "Hi", **fields})
        assert answer.status == 200
        assert b"Hello." in answer.body
    assert server.ask("GET", "/readyz").status == 200
    assert server.longest_block() < MAX_BLOCK, server.log()


def test_idle_streams_take_little_memory(server: Victim, connect: Callable[[bytes], socket.socket]) -> None:
    server.reset_peak()
    before = server.rss_mb()
    background = {"model": "scripted", "input": "idle", "background": True}
    followed = server.ask("POST", "/v1/responses", background).json["id"]
    follow = f"GET /v1/responses/{followed}?stream=true HTTP/1.1\r\n{HEAD}\r\n".encode()
    clients = [connect(follow if number % 2 else make_request("idle")) for number in range(IDLE)]
    for client in clients:
        read_until(client, b"output_text.delta")
    check_others(server)
    assert server.peak_mb() < before + 20 + MAX_IDLE_MB * IDLE
    assert not find_closed(clients)
    server.ask("POST", f"/v1/responses/{followed}/cancel")
    for client in clients[1::2]:
        read_until(client, b"[DONE]")


def test_slow_readers_hold_their_answer_and_one_event(
    server: Victim, connect: Callable[[bytes], socket.socket]
) -> None:
    """Some of them use WebSockets, and read nothing at all."""
    server.reset_peak()
    before = server.rss_mb()
    readers = [connect(make_request("long")) for _ in range(SLOW)]
    for reader in readers:
        assert reader.recv(100)
    sockets = [connect(UPGRADE) for _ in range(SOCKETS)]
    for client in sockets:
        read_until(client, b"\r\n\r\n")
        client.sendall(make_message("long"))
    check_others(server)
    for reader in readers:
        assert reader.recv(100)
    assert server.peak_mb() < before + 20 + MAX_SLOW_MB * (SLOW + SOCKETS)
    assert not find_closed([*readers, *sockets])
    read_until(readers[0], b"event: response.completed")
    read_until(readers[0], b"[DONE]")
    read_until(sockets[0], b'"type":"response.completed"')
