import asyncio
import http.client
import json
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.server import uvicorn_protocol
from antiphon.server.uvicorn_protocol import HeadBufferingTransport


def read_all(client: socket.socket) -> bytes:
    received = b""
    while part := client.recv(65536):
        received += part
    return received


def read_answer(client: socket.socket) -> tuple[int, Any]:
    """One answer, and not a byte of the one behind it: that may come together with it."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = client.recv(1)
        assert byte, f"the connection was closed after {head!r}"
        head += byte
    length = re.search(rb"content-length: (\d+)", head.lower())
    assert length is not None
    body = b""
    while part := client.recv(int(length[1]) - len(body)):
        body += part
    return int(head.split()[1]), json.loads(body)


def connect_with(running: Any, data: bytes) -> socket.socket:
    """A client whose first bytes are there when the server first looks: it holds the server's loop until it has sent.

    On a busy machine, there may be any time between connecting and sending.
    """
    clients: list[socket.socket] = []

    def connect() -> None:
        clients.append(running.connect())
        clients[0].sendall(data)

    running.do(connect)
    return clients[0]


def send_in_turn(running: Any, client: socket.socket, *parts: tuple[Callable[[Any], Any], bytes]) -> None:
    """Send each part as soon as this is true of the connection. The server's own loop does it, so it is not late."""

    async def send() -> None:
        left = list(parts)
        while left:
            if any(map(left[0][0], running.server.server_state.connections)):
                client.sendall(left.pop(0)[1])
            await asyncio.sleep(0)

    running.wait_for(send)


def is_there(_: Any) -> bool:
    return True


def lacks_body(connection: Any) -> bool:
    return bool(connection._body_is_open)


def has_pipeline(connection: Any) -> bool:
    return bool(connection.pipeline)


def has_no_pipeline(connection: Any) -> bool:
    return not connection.pipeline


@pytest.mark.parametrize(
    "garbage", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"]
)
def test_what_is_not_http_gets_an_error_in_the_usual_shape(server: Any, garbage: bytes) -> None:
    with server.connect() as client:
        client.sendall(garbage)
        assert read_answer(client) == (
            400,
            {
                "error": {
                    "message": "The request is not valid HTTP.",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "invalid_http",
                }
            },
        )
        assert client.recv(1) == b""


def test_garbage_behind_an_answered_request_is_an_error_of_its_own(server: Any) -> None:
    with server.connect() as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(client) == (200, {"status": "ok"})
        client.sendall(b"garbage\r\n\r\n")
        assert read_answer(client)[0] == 400


def test_endless_headers_are_cut_off(server: Any) -> None:
    with server.connect() as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nx-filler: ")
        for _ in range(100):
            try:
                client.sendall(b"x" * 65536)
            except (BrokenPipeError, ConnectionResetError):
                break
        else:
            pytest.fail("the server took 6 MB of headers")


@pytest.fixture
def impatient(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server that waits for a head only for a moment."""
    monkeypatch.setattr(uvicorn_protocol, "_HEAD_TIMEOUT_SECONDS", 0.05)
    return serve({"rules": [{"user": "long", "answers": [[{"delay": 0.2}, {"text": "Done."}]]}]})


def test_a_head_that_does_not_come_to_its_end_is_given_up(impatient: Any) -> None:
    with connect_with(impatient, b"GET /healthz HT") as client:
        assert read_answer(client)[0] == 408
        assert client.recv(1) == b""


def test_a_second_head_that_does_not_come_to_its_end_is_given_up_too(impatient: Any) -> None:
    with connect_with(impatient, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n") as client:
        assert read_answer(client) == (200, {"status": "ok"})
        client.sendall(b"GET /healthz HT")
        assert read_answer(client)[0] == 408


def test_a_connection_on_which_nothing_comes_is_closed(impatient: Any) -> None:
    with impatient.connect() as client:
        assert client.recv(1) == b""


def test_an_answer_is_not_cut_off_by_a_slow_request_behind_it(impatient: Any) -> None:
    body = json.dumps({"model": "scripted", "input": "long"}).encode()
    request = b"POST /v1/responses HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with connect_with(impatient, request) as client:
        client.sendall(b"GET /healthz HT")
        status, answer = read_answer(client)
        assert (status, answer["status"]) == (200, "completed")
        assert read_answer(client)[0] == 408


@pytest.fixture
def strict(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server that waits for the rest of a body only for a moment."""
    monkeypatch.setattr(uvicorn_protocol, "_BODY_TIMEOUT_SECONDS", 0.1)
    return serve({"rules": [{"user": "long", "answers": [[{"delay": 0.25}, {"text": "Done."}]]}]})


HEAD = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
LATE = {
    "error": {
        "message": "The request did not arrive in time.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_http",
    }
}


@pytest.mark.parametrize("begun", [b"", b'{"model":'])
def test_a_body_that_does_not_come_to_its_end_is_given_up(strict: Any, begun: bytes) -> None:
    with strict.connect() as client:
        client.sendall(HEAD + begun)
        assert read_answer(client) == (408, LATE)
        assert client.recv(1) == b""


def test_a_body_of_a_later_request_is_given_up_too(strict: Any) -> None:
    with strict.connect() as client:
        for _ in range(2):
            body = b'{"model": "scripted", "input": "hi"}'
            head = HEAD.replace(b"1000", b"%d" % len(body))
            send_in_turn(strict, client, (is_there, head), (lacks_body, body))
            assert read_answer(client)[0] == 200
        client.sendall(HEAD)
        assert read_answer(client) == (408, LATE)


def test_a_connection_whose_refused_body_stops_coming_is_closed_without_another_answer(strict: Any) -> None:
    with strict.connect() as client:
        client.sendall(HEAD.replace(b"/v1/responses", b"/nowhere"))
        assert read_answer(client)[0] == 404
        client.sendall(b"{")  # which ends uvicorn's own waiting
        assert client.recv(1) == b""


def test_a_model_may_take_longer_than_a_body(strict: Any) -> None:
    body = b'{"model": "scripted", "input": "long"}'
    with strict.connect() as client:
        head = HEAD.replace(b"1000", b"%d" % len(body))
        send_in_turn(strict, client, (is_there, head), (lacks_body, body))
        assert read_answer(client)[0] == 200


def test_a_body_that_is_not_read_yet_is_waited_for(strict: Any) -> None:
    body = b'{"model": "scripted", "input": "long"}'
    request = HEAD.replace(b"1000", b"%d" % len(body)) + body
    with strict.connect() as client:
        send_in_turn(
            strict, client, (is_there, request + request[:-1]), (has_pipeline, b""), (has_no_pipeline, request[-1:])
        )
        assert [read_answer(client)[0] for _ in range(2)] == [200, 200]


def test_pipelined_requests_are_answered_in_order(server: Any) -> None:
    body = b'{"model": "scripted", "input": "hi"}'
    first = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    last = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with server.connect() as client:
        client.sendall(first + first + last)
        answers = read_all(client)
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    assert answers.count(b"You said: hi") == 2
    assert answers.endswith(b'{"status":"ok"}')


def test_an_answer_is_one_write() -> None:
    written: list[bytes] = []

    class Recorder(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            written.append(bytes(data))

        def close(self) -> None:
            written.append(b"closed")

    outlet = HeadBufferingTransport(Recorder())
    for data in (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"one", b"two"):
        outlet.write(data)
    outlet.close()
    assert written == [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\none", b"two", b"closed"]


def test_a_client_that_asks_first_is_told_to_go_on(server: Any) -> None:
    body = b'{"model": "scripted", "input": "hi"}'
    with server.connect() as client:
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert read_answer(client)[0] == 200


def test_heads_alone_keep_the_connection(server: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    for _ in range(2):
        connection.request("HEAD", "/healthz")
        with connection.getresponse() as response:
            assert (response.status, response.read()) == (200, b"")
    connection.request("OPTIONS", "/healthz")
    with connection.getresponse() as response:
        assert (response.status, response.read()) == (204, b"")
    connection.close()


def test_a_body_in_small_pieces_is_a_body(server: Any) -> None:
    body = b'{"model": "scripted", "input": "hi"}'
    with server.connect() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in body:
            client.sendall(b"1\r\n%c\r\n" % byte)
        client.sendall(b"0\r\n\r\n")
        status, response = read_answer(client)
    assert (status, response["status"]) == (200, "completed")


def test_an_offer_of_http_2_is_declined_and_the_request_answered(server: Any) -> None:
    body = b'{"model": "scripted", "input": "hi"}'
    with server.connect() as client:
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: x\r\n"
            b"HTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        assert read_answer(client)[0] == 200


def test_a_websocket_follows_answers_on_the_same_connection(server: Any) -> None:
    with server.connect() as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(client) == (200, {"status": "ok"})
        client.sendall(
            b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert client.recv(13) == b"HTTP/1.1 101 "


def test_a_broken_handshake_is_refused(server: Any) -> None:
    with server.connect() as client:
        client.sendall(b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert client.recv(13) == b"HTTP/1.1 400 "
