"""Large and incomplete request bodies."""

import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from support.loop_blocks import MAX_BLOCK
from support.victim import TIMEOUT, Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

StartVictim = Callable[..., Victim]
MB = 1024 * 1024
REQUEST = {"model": "scripted", "input": "hi"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server with the default limits, for all tests of this module."""
    started = Victim(tmp_path_factory.mktemp("bodies"), script={"default": "Hello."})
    yield started
    started.stop()


def start_body(server: Victim, declared: int | None, sent: int) -> Any:
    """Return a connection that has sent a part of a body, or has been answered before. Without a length, use chunks."""
    framing = b"Transfer-Encoding: chunked" if declared is None else b"Content-Length: %d" % declared
    client = server.connect()
    client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % framing)
    block = b" " * (256 * 1024)
    if declared is None:
        block = b"%x\r\n%b\r\n" % (len(block), block)
    for _ in range(sent // (256 * 1024)):
        client.sendall(block)
    return client


@pytest.mark.parametrize("declared", [12 * MB, None])
def test_half_sent_bodies_stay_within_the_budget(victim: StartVictim, declared: int | None) -> None:
    server = victim(script={"default": "Hello."}, store="memory:", max_body_bytes=16 * MB, body_budget_bytes=32 * MB)
    before = server.rss_mb()
    with ExitStack() as stack:
        clients = [stack.enter_context(start_body(server, declared, 8 * MB)) for _ in range(20)]
        refused = []
        for client in clients:
            client.settimeout(0.05)
            try:
                refused.append(client.recv(65536))
            except TimeoutError:
                continue
        # A usual request is served while the budget is exhausted.
        assert server.ask("POST", "/v1/responses", REQUEST).status == 200
    assert 14 <= len(refused) <= 18
    for answer in refused:
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 5\r\n" in answer
        assert b"body_budget_bytes" in answer
    assert server.peak_mb() < 250
    assert server.longest_block() < MAX_BLOCK
    large = json.dumps(REQUEST | {"input": "x" * 8 * MB}).encode()
    assert server.ask("POST", "/v1/responses", large).status == 200, "the budget is free again"
    assert server.rss_mb() < before + 40


@pytest.mark.parametrize("stream", [False, True])
def test_large_requests_of_clients_that_do_not_read_stay_within_the_budget(victim: StartVictim, stream: bool) -> None:
    """The response repeats the instructions, so each such request is in memory three times."""
    server = victim(script={"default": "Hello."}, store="memory:", max_body_bytes=16 * MB, body_budget_bytes=32 * MB)
    body = json.dumps(REQUEST | {"instructions": "x" * 8 * MB, "store": False, "stream": stream}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    statuses = []
    with ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(server.connect())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(head + body)
            statuses.append(client.recv(12))
        assert server.ask("POST", "/v1/responses", REQUEST).status == 200
    assert statuses.count(b"HTTP/1.1 503") >= 15
    assert b"HTTP/1.1 200" in statuses
    assert server.peak_mb() < 250
    ended = time.monotonic() + TIMEOUT
    while server.ask("POST", "/v1/responses", body).status == 503:  # until the server has noticed the disconnects
        assert time.monotonic() < ended


def test_announced_bodies_take_nothing_from_the_budget(victim: StartVictim) -> None:
    server = victim(script={"default": "Hello."}, store="memory:", max_body_bytes=16 * MB, body_budget_bytes=16 * MB)
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(start_body(server, 16 * MB, 0))
        large = json.dumps(REQUEST | {"input": "x" * 8 * MB}).encode()
        assert server.ask("POST", "/v1/responses", large).status == 200


def test_refused_body_is_answered_before_it_is_sent(victim: StartVictim) -> None:
    server = victim(store="memory:", max_body_bytes=16 * MB, body_budget_bytes=16 * MB)
    with start_body(server, 16 * MB, 12 * MB), start_body(server, 12 * MB, 0) as second:
        second.settimeout(TIMEOUT)
        assert second.recv(65536).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("head", [b"Content-Length: 67108865", b"Transfer-Encoding: chunked"])
def test_too_large_body_is_refused(server: Victim, head: bytes) -> None:
    with server.send_raw(b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % head) as client:
        if b"chunked" in head:
            client.sendall(b"4000001\r\n" + b" " * (64 * MB + 1) + b"\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "block",
    [b"1\r\n \r\n" * 10_000, b"1;" + b"x" * 65536 + b"\r\n \r\n", b"0\r\n" + b"X: " + b"y" * 65536],
    ids=["tiny chunks", "chunk extensions", "trailer"],
)
def test_endless_framing_is_refused(server: Victim, block: bytes) -> None:
    server.reset_peak()
    before = server.rss_mb()
    with server.send_raw(
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    ) as client:
        client.sendall(block)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(500):
                client.sendall(block.removeprefix(b"0\r\n"))
    assert server.peak_mb() < before + 30
    assert server.longest_block() < MAX_BLOCK


def test_endless_refused_body_ends(server: Victim) -> None:
    """A refused body is read for a while, so that the client can read the response."""
    server.reset_peak()
    before = server.rss_mb()
    with server.send_raw(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999999\r\n\r\n") as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 404 ")
        block = b" " * MB
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(200):
                client.sendall(block)
    assert server.peak_mb() < before + 30


def test_background_request_of_a_gone_client_is_accepted(victim: StartVictim) -> None:
    server = victim(script={"default": "Hello."}, log_format="json")  # the other format shortens ids
    body = json.dumps(REQUEST | {"background": True}).encode()
    for _ in range(20):
        with server.send_raw(
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        ):
            pass
    ids: set[str] = set()
    ended = time.monotonic() + TIMEOUT
    while len(ids) < 20:
        assert time.monotonic() < ended, server.log()
        assert server.ask("GET", "/healthz").status == 200
        ids = set(re.findall(r'"response_id": ?"(resp_\w+)"', server.log()))
    assert {server.ask("GET", f"/v1/responses/{each}").status for each in ids} == {200}


FORM_HEAD = (
    b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
)
FILE_PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'
FIELD_PART = b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\n' + b"x" * 60_000 + b"\r\n"


@pytest.mark.parametrize(
    ("start", "rest"),
    [(b"", b"x" * 60_000), (FILE_PART + b"--b--\r\n", b"x" * 60_000), (b"", FIELD_PART)],
    ids=["before the first boundary", "after the last boundary", "fields"],
)
def test_endless_form_is_refused(server: Victim, start: bytes, rest: bytes) -> None:
    """The limit is 1 MiB besides the file."""
    with server.send_raw(FORM_HEAD) as client:
        for part in (start, *[rest] * 18):
            if part:
                client.sendall(b"%x\r\n%b\r\n" % (len(part), part))
        received = client.recv(65536)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_form"' in received
