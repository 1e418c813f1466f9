"""Many slow readers of a large background answer. The server holds shared pages, not a log for each."""

import contextlib
import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.loop_blocks import MAX_BLOCK
from support.victim import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

ANSWER_BYTES = 2_000_000
FOLLOWERS = 100
PIECE = "x" * 500
TIMEOUT = 60
# The number of the last delta. Five events precede the first one, and four follow.
LAST_DELTA = 4 + ANSWER_BYTES // len(PIECE)


def make_answer(victim: Callable[..., Victim], **settings: Any) -> tuple[Victim, str]:
    """Start a server and let it produce a large background answer. Return the path of the response."""
    script = {"default": [{"text": [PIECE] * (ANSWER_BYTES // len(PIECE))}]}
    server = victim(script=script, **settings)
    response = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "go", "background": True}).json
    path = f"/v1/responses/{response['id']}"
    # The stream after the last delta is read when the answer is complete.
    assert b"response.completed" in server.ask("GET", f"{path}?stream=true&starting_after={LAST_DELTA + 3}").body
    return server, path


@contextlib.contextmanager
def follow(server: Victim, path: str, *, after: int = -1) -> Iterator[socket.socket]:
    """Request the events after a number. Yield the connection."""
    query = "stream=true" if after < 0 else f"stream=true&starting_after={after}"
    with request(server, f"{path}?{query}") as connection:
        yield connection


@contextlib.contextmanager
def request(server: Victim, target: str) -> Iterator[socket.socket]:
    """Yield a connection with a small receive buffer that has sent a request and has read nothing yet."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    connection.settimeout(TIMEOUT)
    connection.connect(("127.0.0.1", server.port))
    try:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        yield connection
    finally:
        connection.close()


def read_to_end(connection: socket.socket) -> bytes:
    received = bytearray()
    while part := connection.recv(1 << 20):
        received += part
    return bytes(received)


def read_whole(server: Victim, path: str) -> bytes:
    with server.send_raw(
        f"GET {path}?stream=true HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
    ) as reader:
        return read_to_end(reader)


def read_numbers(stream: bytes) -> list[int]:
    """Return the sequence numbers of an event stream with chunked framing."""
    return [int(number) for number in re.findall(rb'"sequence_number":(\d+)[,}]', join_chunks(stream))]


def join_chunks(stream: bytes) -> bytes:
    _, _, rest = stream.partition(b"\r\n\r\n")
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(parts)


@pytest.mark.parametrize("store", ["sqlite", "memory"])
def test_stalled_followers_share_pages_and_resume_without_loss(victim: Callable[..., Victim], store: str) -> None:
    server, path = make_answer(victim, **({"store": "memory:"} if store == "memory" else {}))
    server.reset_peak()
    before = server.rss_mb()
    with contextlib.ExitStack() as stack:
        # Half of them stall in the text, and half in the closing events, of which each has the whole answer.
        starts = [-1 if number % 2 else LAST_DELTA + number % 4 for number in range(FOLLOWERS)]
        followers = [stack.enter_context(follow(server, path, after=after)) for after in starts]
        for follower in followers:
            assert follower.recv(12) == b"HTTP/1.1 200"
        assert server.ask("GET", "/healthz").status == 200
        used = server.peak_mb() - before
        stream = b"HTTP/1.1 200" + read_to_end(followers[2])
    # Before pages were shared, each follower held the whole log and a copy of it: more than 1 GB.
    assert used < 100
    assert read_numbers(stream) == list(range(starts[2] + 1, LAST_DELTA + 5))
    assert read_numbers(read_whole(server, path)) == list(range(LAST_DELTA + 5))
    assert server.longest_block() < MAX_BLOCK


def test_stalled_readers_of_a_large_response_share_its_body(victim: Callable[..., Victim]) -> None:
    server = victim(script={"default": [{"text": ["x" * 5_000_000]}]})
    created = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "go"}).json
    path = f"/v1/responses/{created['id']}"
    head = server.ask("HEAD", path)
    server.reset_peak()
    before = server.rss_mb()
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(request(server, path)) for _ in range(60)]
        for reader in readers:
            assert reader.recv(12) == b"HTTP/1.1 200"
        used = server.peak_mb() - before
        _, _, body = read_to_end(readers[0]).partition(b"\r\n\r\n")
    # Each reader had a copy of its own, and up to 60 rows were read at once.
    assert used < 100
    assert json.loads(body) == created
    assert (head.body, head.headers["content-length"]) == (b"", str(len(body)))


def test_followers_of_a_running_response_get_each_event_once(victim: Callable[..., Victim]) -> None:
    """Readers join while the answer is written: each sees the change from stored pages to live events."""
    words = [f"w{number} " for number in range(2000)]
    server = victim(script={"default": [{"text": words[:1000]}, {"delay": 0.2}, {"text": words[1000:]}]})
    body = {"model": "scripted", "input": "go", "background": True}
    path = f"/v1/responses/{server.ask('POST', '/v1/responses', body).json['id']}"
    with contextlib.ExitStack() as stack:
        followers = [stack.enter_context(follow(server, path, after=number - 1)) for number in range(20)]
        streams = [read_to_end(follower) for follower in followers]
    last = len(words) + 8
    assert [read_numbers(stream) for stream in streams] == [list(range(number, last + 1)) for number in range(20)]
