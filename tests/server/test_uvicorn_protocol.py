import asyncio
import http.client
import json
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from antiphon.errors import ServerError, Unavailable
from antiphon.server.http import WATCH_DISCONNECT, Message, Receive, Scope, Send
from antiphon.server.http_cycle import encode_error
from support.crashing_server import wait_until
from support.http_connection import GET, LENGTH, answer, connect_app, make_app, make_body, make_start
from support.live_server import TIMEOUT


def read_all(client: socket.socket) -> bytes:
    received = b""
    while part := client.recv(65536):
        received += part
    return received


def read_response(client: socket.socket) -> tuple[int, Any]:
    """Read one response, and no byte of a pipelined one behind it."""
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
    """Connect and send before the server can accept: the client blocks the server's event loop meanwhile.

    Otherwise a busy machine could delay the data for any time after the connect.
    """
    clients: list[socket.socket] = []

    def connect() -> None:
        clients.append(running.connect())
        clients[0].sendall(data)

    running.do(connect)
    return clients[0]


def send_in_turn(running: Any, client: socket.socket, *parts: tuple[Callable[[Any], Any], bytes]) -> None:
    """Send each part when its condition is true of a connection. The server's own loop sends it without delay."""

    async def send() -> None:
        left = list(parts)
        while left:
            if any(map(left[0][0], running.server.server_state.connections)):
                client.sendall(left.pop(0)[1])
            await asyncio.sleep(0)

    running.wait_for(send)


def is_connected(_: Any) -> bool:
    return True


def is_body_incomplete(connection: Any) -> bool:
    return bool(connection._body_is_open)


def has_pipeline(connection: Any) -> bool:
    return bool(connection.pipeline)


def has_no_pipeline(connection: Any) -> bool:
    return not connection.pipeline


@pytest.mark.parametrize(
    "garbage", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"]
)
def test_invalid_http_gets_the_standard_error_body(server: Any, garbage: bytes) -> None:
    with server.connect() as client:
        client.sendall(garbage)
        assert read_response(client) == (
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


@pytest.mark.parametrize("value", [b"200-ok", b"100-continue, other", b""])
def test_unknown_expectation_is_refused(server: Any, value: bytes) -> None:
    with server.connect() as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nExpect: " + value + b"\r\n\r\n")
        assert read_response(client) == (
            417,
            {
                "error": {
                    "message": "The Expect header must be 100-continue.",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "invalid_http",
                }
            },
        )
        assert client.recv(1) == b""


def test_garbage_after_a_response_gets_its_own_error(server: Any) -> None:
    with server.connect() as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(client) == (200, {"status": "ok"})
        client.sendall(b"garbage\r\n\r\n")
        assert read_response(client)[0] == 400


def test_too_large_headers_are_refused(server: Any) -> None:
    with server.connect() as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nx-filler: ")
        for _ in range(100):
            try:
                client.sendall(b"x" * 65536)
            except (BrokenPipeError, ConnectionResetError):
                break
        else:
            pytest.fail("the server accepted 6 MB of headers")


@pytest.fixture
def head_timeout_server(serve: Callable[..., Any]) -> Any:
    """A server with a short timeout for the head of a request."""
    script = {"rules": [{"user": "long", "answers": [[{"delay": 0.2}, {"text": "Done."}]]}]}
    return serve(script, head_timeout_seconds=0.05)


def test_incomplete_head_times_out(head_timeout_server: Any) -> None:
    with connect_with(head_timeout_server, b"GET /healthz HT") as client:
        assert read_response(client)[0] == 408
        assert client.recv(1) == b""


def test_incomplete_second_head_times_out(head_timeout_server: Any) -> None:
    with connect_with(head_timeout_server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") as client:
        assert read_response(client) == (200, {"status": "ok"})
        client.sendall(b"GET /healthz HT")
        assert read_response(client)[0] == 408


def test_silent_connection_is_closed(head_timeout_server: Any) -> None:
    with head_timeout_server.connect() as client:
        assert client.recv(1) == b""


def test_slow_pipelined_request_does_not_end_the_response_before(head_timeout_server: Any) -> None:
    body = json.dumps({"model": "scripted", "input": "long"}).encode()
    request = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with connect_with(head_timeout_server, request) as client:
        client.sendall(b"GET /healthz HT")
        status, answer = read_response(client)
        assert (status, answer["status"]) == (200, "completed")
        assert read_response(client)[0] == 408


@pytest.fixture
def body_timeout_server(serve: Callable[..., Any]) -> Any:
    """A server with a short timeout for the body of a request."""
    script = {"rules": [{"user": "long", "answers": [[{"delay": 0.25}, {"text": "Done."}]]}]}
    return serve(script, body_timeout_seconds=0.1)


HEAD = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
TIMED_OUT = {
    "error": {
        "message": "The request did not arrive in time.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_http",
    }
}


@pytest.mark.parametrize("begun", [b"", b'{"model":'])
def test_incomplete_body_times_out(body_timeout_server: Any, begun: bytes) -> None:
    with body_timeout_server.connect() as client:
        client.sendall(HEAD + begun)
        assert read_response(client) == (408, TIMED_OUT)
        assert client.recv(1) == b""


def test_incomplete_body_of_a_later_request_times_out(body_timeout_server: Any) -> None:
    with body_timeout_server.connect() as client:
        for _ in range(2):
            body = b'{"model": "scripted", "input": "hi"}'
            head = HEAD.replace(b"1000", b"%d" % len(body))
            send_in_turn(body_timeout_server, client, (is_connected, head), (is_body_incomplete, body))
            assert read_response(client)[0] == 200
        client.sendall(HEAD)
        assert read_response(client) == (408, TIMED_OUT)


def test_incomplete_refused_body_closes_without_a_second_response(body_timeout_server: Any) -> None:
    with body_timeout_server.connect() as client:
        client.sendall(HEAD.replace(b"/v1/responses", b"/nowhere"))
        assert read_response(client)[0] == 404
        client.sendall(b"{")  # more data ends uvicorn's own timeout
        assert client.recv(1) == b""


@pytest.mark.parametrize("last", [b"Connection: close\r\n", b""])
def test_refused_body_is_discarded_before_the_connection_closes(server: Any, last: bytes) -> None:
    """To close earlier would reset the connection, and a client that still sends could lose the response."""
    version = b"HTTP/1.1" if last else b"HTTP/1.0"
    others = set(server.server.server_state.connections)  # of the clients of other tests
    with server.connect() as client:
        head = HEAD.replace(b"/v1/responses", b"/nowhere").replace(b"HTTP/1.1", version)
        client.sendall(head.replace(b"Host", last + b"Host"))
        assert read_response(client)[0] == 404
        for _ in range(4):
            assert client.recv(1) == b""
            client.sendall(b"x" * 250)
        wait_until(lambda: others >= server.server.server_state.connections)


def test_request_behind_a_refused_last_body_is_not_served(server: Any) -> None:
    others = set(server.server.server_state.connections)  # of the clients of other tests
    with server.connect() as client:
        client.sendall(HEAD.replace(b"/v1/responses", b"/nowhere").replace(b"Host", b"Connection: close\r\nHost"))
        assert read_response(client)[0] == 404
        client.sendall(b"x" * 1000 + GET)
        wait_until(lambda: others >= server.server.server_state.connections)


def test_body_timeout_does_not_limit_the_model(body_timeout_server: Any) -> None:
    body = b'{"model": "scripted", "input": "long"}'
    with body_timeout_server.connect() as client:
        head = HEAD.replace(b"1000", b"%d" % len(body))
        send_in_turn(body_timeout_server, client, (is_connected, head), (is_body_incomplete, body))
        assert read_response(client)[0] == 200


def test_unread_pipelined_body_does_not_time_out(body_timeout_server: Any) -> None:
    body = b'{"model": "scripted", "input": "long"}'
    request = HEAD.replace(b"1000", b"%d" % len(body)) + body
    with body_timeout_server.connect() as client:
        send_in_turn(
            body_timeout_server,
            client,
            (is_connected, request + request[:-1]),
            (has_pipeline, b""),
            (has_no_pipeline, request[-1:]),
        )
        assert [read_response(client)[0] for _ in range(2)] == [200, 200]


def test_pipelined_requests_are_answered_in_order(server: Any) -> None:
    body = b'{"model": "scripted", "input": "hi"}'
    first = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    last = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with server.connect() as client:
        client.sendall(first + first + last)
        answers = read_all(client)
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    assert answers.count(b"You said: hi") == 2
    assert answers.endswith(b'{"status":"ok"}')


async def test_response_is_one_write() -> None:
    request = b"POST / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx"
    transport = await answer(make_app(make_start(LENGTH), make_body(b"one")), request)
    assert transport.written == [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none",
    ]
    assert not transport.closed


async def test_stream_is_one_write_for_each_part() -> None:
    parts = (make_body(b"one", more=True), make_body(b"", more=True), make_body(b"two", more=True), make_body(b"."))
    transport = await answer(make_app(make_start(), *parts), GET)
    assert transport.written == [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n",
        b"3\r\ntwo\r\n",
        b"1\r\n.\r\n0\r\n\r\n",
    ]


@pytest.mark.parametrize(
    "request_head", [b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"]
)
async def test_last_response_of_a_connection_closes_it(request_head: bytes) -> None:
    transport = await answer(make_app(make_start(LENGTH), make_body(b"one")), request_head)
    assert transport.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\none"]
    assert transport.closed


@pytest.mark.parametrize("status", [204, 304])
async def test_response_without_a_body_has_no_transfer_encoding(status: int) -> None:
    transport = await answer(make_app(make_start(status=status), make_body(b"")), GET)
    assert transport.written == [STATUS_LINE[status] + b"\r\n"]


async def test_response_to_head_has_no_body() -> None:
    transport = await answer(make_app(make_start(LENGTH), make_body(b"one")), GET.replace(b"GET", b"HEAD"))
    assert transport.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"]


@pytest.mark.parametrize("messages", [(), (make_body(b"one"),)])
async def test_application_without_a_response_is_an_error(messages: tuple[Message, ...]) -> None:
    transport = await answer(make_app(*messages), GET)
    assert transport.written == [encode_error(500, ServerError("The server had an error."))]
    assert transport.closed


@pytest.mark.parametrize("header", [(b"x-forged", b"a\r\nset-cookie: b"), (b"x-forged\n", b"a")])
async def test_response_with_a_forged_header_closes_the_connection(header: tuple[bytes, bytes]) -> None:
    transport = await answer(make_app(make_start(header), make_body(b"one")), GET)
    assert (transport.written, transport.closed) == ([], True)


@pytest.mark.parametrize("started", [False, True])
async def test_cancelled_request_is_an_error_if_its_response_has_not_started(
    started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if started:
            await send(make_start())
            await send(make_body(b"one", more=True))
        await gate.wait()

    connection, transport = connect_app(app)
    connection.data_received(GET)
    (task,) = connection.tasks
    await asyncio.sleep(0)
    task.cancel()
    await task
    begun = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n"
    stopped = encode_error(503, Unavailable("The server is shutting down."))
    assert (transport.written, transport.closed) == ([begun if started else stopped], True)
    assert not caplog.records


@pytest.mark.parametrize(
    "messages",
    [
        (make_start(LENGTH), make_start(LENGTH)),
        (make_start(), make_body(b"one", more=True)),
        (make_start(), make_body(b"one", more=True), {"type": "http.response.trailers"}),
    ],
)
async def test_incomplete_response_closes_the_connection(messages: tuple[Message, ...]) -> None:
    transport = await answer(make_app(*messages), GET)
    assert not b"".join(transport.written).endswith(b"0\r\n\r\n")
    assert transport.closed


async def test_messages_after_the_response_are_refused() -> None:
    refused: list[Exception] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in (make_start(LENGTH), make_body(b"one"), make_body(b"two")):
            try:
                await send(message)
            except RuntimeError as error:
                refused.append(error)

    transport = await answer(app, GET)
    assert transport.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none"]
    assert len(refused) == 1


async def test_lost_connection_calls_the_watch_of_the_running_request() -> None:
    lost: list[str] = []
    gate = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        watch = scope["extensions"][WATCH_DISCONNECT]["watch"]
        assert watch(lambda: lost.append(scope["path"]))
        await gate.wait()
        assert not watch(None)

    connection, _ = connect_app(app)
    # The second request waits for the response to the first.
    connection.data_received(GET.replace(b" / ", b" /first ") + GET.replace(b" / ", b" /second "))
    await asyncio.sleep(0)
    connection.connection_lost(None)
    assert lost == ["/first"]
    gate.set()
    await asyncio.gather(*connection.tasks)


@pytest.mark.parametrize("value", [b"100-continue", b"100-Continue", b" 100-continue \t"])
def test_expect_header_gets_100_continue(server: Any, value: bytes) -> None:
    body = b'{"model": "scripted", "input": "hi"}'
    with server.connect() as client:
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nExpect:%b\r\nContent-Length: %d\r\n\r\n"
            % (value, len(body))
        )
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert read_response(client)[0] == 200


def test_head_requests_keep_the_connection_open(server: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
    for _ in range(2):
        connection.request("HEAD", "/healthz")
        with connection.getresponse() as response:
            assert (response.status, response.read()) == (200, b"")
    connection.request("OPTIONS", "/healthz")
    with connection.getresponse() as response:
        assert (response.status, response.read()) == (204, b"")
    connection.close()


def test_body_in_small_pieces_is_read(server: Any) -> None:
    body = b'{"model": "scripted", "input": "hi"}'
    with server.connect() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in body:
            client.sendall(b"1\r\n%c\r\n" % byte)
        client.sendall(b"0\r\n\r\n")
        status, response = read_response(client)
    assert (status, response["status"]) == (200, "completed")


def test_http2_upgrade_offer_is_ignored(server: Any) -> None:
    body = b'{"model": "scripted", "input": "hi"}'
    with server.connect() as client:
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: localhost\r\n"
            b"HTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        assert read_response(client)[0] == 200


def test_websocket_upgrade_after_responses_on_one_connection(server: Any) -> None:
    with server.connect() as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(client) == (200, {"status": "ok"})
        client.sendall(
            b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert client.recv(13) == b"HTTP/1.1 101 "


def test_invalid_handshake_is_refused(server: Any) -> None:
    with server.connect() as client:
        client.sendall(
            b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        assert client.recv(13) == b"HTTP/1.1 400 "
