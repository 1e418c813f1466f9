"""WebSocket clients that flood the server, send too slowly, or do not read."""

import json
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from support.loop_blocks import MAX_BLOCK
from support.victim import TIMEOUT, Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

StartVictim = Callable[..., Victim]
MB = 1024 * 1024
UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TEXT, CONTINUATION, CLOSE, PING, PONG = 1, 0, 8, 9, 10
LONG = {"rules": [{"user": "go", "answers": [[{"text": ["x" * 2**18]}, {"delay": 0}] * 64]}], "default": "Hello."}


def make_frame(opcode: int, data: bytes = b"", *, fin: bool = True, declared: int | None = None) -> bytes:
    """Return a masked frame. With a declared length, it may be incomplete."""
    size = len(data) if declared is None else declared
    first = bytes((opcode | (0x80 if fin else 0),))
    if size < 126:
        length = bytes((0x80 | size,))
    elif size < 65536:
        length = b"\xfe" + size.to_bytes(2)
    else:
        length = b"\xff" + size.to_bytes(8)
    return first + length + bytes(4) + data


SETTINGS = {
    "script": LONG,
    "store": "memory:",
    "keepalive_seconds": 0,
    "max_body_bytes": 16 * MB,
    "body_budget_bytes": 32 * MB,
    "log_level": "warning",
}


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server with the default deadlines: a busy machine may delay a client for seconds."""
    started = Victim(tmp_path_factory.mktemp("patient"), **SETTINGS)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server with short deadlines, which no delay of a client makes wrong."""
    started = Victim(
        tmp_path_factory.mktemp("websocket"), body_timeout_seconds=0.5, write_timeout_seconds=0.8, **SETTINGS
    )
    yield started
    started.stop()


def connect(server: Victim) -> socket.socket:
    client = server.connect()
    client.sendall(UPGRADE)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += client.recv(1)
    assert head.startswith(b"HTTP/1.1 101 ")
    return client


def flood(client: socket.socket, data: bytes) -> None:
    """Send data until the server closes the connection or stops reading."""
    with suppress(OSError):
        client.sendall(data)


def read_close(client: socket.socket) -> tuple[int, str]:
    """Return the code and the reason of the close frame, after any pongs."""
    received = b""
    while part := client.recv(65536):
        received += part
    while received[:1] == b"\x8a":
        received = received[2 + received[1] :]
    assert received[:1] == b"\x88", received[:50]
    return struct.unpack("!H", received[2:4])[0], received[4:].decode()


@pytest.mark.parametrize(
    ("data", "code", "setting"),
    [
        (make_frame(TEXT, fin=False) + make_frame(CONTINUATION, fin=False) * 5000, 1009, "small_fragments"),
        (make_frame(TEXT, b"{", fin=False) + make_frame(CONTINUATION, b" ", fin=False) * 5000, 1009, "small_frag"),
        (make_frame(PING) * 700, 1008, "control_frames"),
        (make_frame(PING, b"x" * 125) * 700, 1008, "control_frames"),
        (make_frame(PONG, b"x" * 125) * 700, 1008, "control_frames"),
        (make_frame(TEXT, declared=17 * MB), 1009, ""),
    ],
    ids=["empty fragments", "small fragments", "empty pings", "pings", "pongs", "large message"],
)
def test_flood_of_frames_closes_the_connection(patient: Victim, data: bytes, code: int, setting: str) -> None:
    with connect(patient) as client:
        client.sendall(data)
        closed, reason = read_close(client)
    assert (closed, setting in reason) == (code, True)


@pytest.mark.parametrize(
    "data",
    [
        make_frame(TEXT, fin=False) + make_frame(CONTINUATION, fin=False) * 400_000,
        make_frame(PING, b"x" * 125) * 500_000,
        make_frame(PING) * 400_000,
        make_frame(TEXT, b"{}") * 20_000,
        make_frame(TEXT) * 20_000,
        make_frame(2, b"x") * 20_000,
    ],
    ids=["fragments", "pings", "empty pings", "messages", "empty messages", "binary messages"],
)
def test_flood_of_frames_does_not_delay_others(server: Victim, data: bytes) -> None:
    with connect(server) as client:
        client.setblocking(False)
        view, ended = memoryview(data), time.monotonic() + TIMEOUT
        while view and time.monotonic() < ended:
            try:
                view = view[client.send(view[: 256 * 1024]) :]
            except BlockingIOError:
                assert server.ask("GET", "/healthz").status == 200
                with suppress(BlockingIOError, ConnectionResetError):
                    client.recv(MB)
            except OSError:
                break
    assert server.longest_block() < MAX_BLOCK
    assert server.peak_mb() < 250


@pytest.mark.parametrize("end", [b"", make_frame(CLOSE, b"\x03\xe8")], ids=["open", "closed by the client"])
@pytest.mark.parametrize(
    "data",
    [
        make_frame(TEXT, b"\xff{}"),
        make_frame(TEXT, b"{", fin=False) + make_frame(CONTINUATION, b"\xc3"),
    ],
    ids=["whole", "fragments"],
)
def test_text_that_is_not_utf8_closes_the_connection_without_a_log_line(
    patient: Victim, data: bytes, end: bytes
) -> None:
    before = patient.log()
    with connect(patient) as client:
        client.sendall(data + end)
        assert read_close(client) == ((1000, "") if end else (1007, "a text message is not UTF-8"))
    lines = patient.log().removeprefix(before).splitlines()
    assert not [line for line in lines if "the event loop" not in line]  # the watchdog may log a test before


def test_fragments_of_usual_size_are_accepted(patient: Victim) -> None:
    message = json.dumps({"type": "response.create", "model": "scripted", "input": "x" * 4 * MB}).encode()
    parts = [message[index : index + 1024] for index in range(0, len(message), 1024)]
    with connect(patient) as client:
        client.sendall(make_frame(TEXT, parts[0], fin=False))
        for part in parts[1:-1]:
            client.sendall(make_frame(CONTINUATION, part, fin=False))
        client.sendall(make_frame(CONTINUATION, parts[-1]))
        assert b'"response.created"' in client.recv(65536)


# Deadlines


def check_timeout(server: Victim, data: bytes, reason: bytes) -> None:
    with connect(server) as client:
        client.sendall(data)
        received = b""
        while part := client.recv(65536):
            received += part
    assert received.removeprefix(b"\x8a\x00")[2:4] == struct.pack("!H", 1008)
    assert reason in received


@pytest.mark.parametrize("data", [b"", make_frame(PING)], ids=["silent", "only a ping"])
def test_connection_without_a_message_times_out(victim: StartVictim, data: bytes) -> None:
    server = victim(store="memory:", keepalive_seconds=0, websocket_first_message_seconds=0.5)
    check_timeout(server, data, b"websocket_first_message_seconds")


@pytest.mark.parametrize(
    "data",
    [
        b"\x89",
        make_frame(TEXT, b"{", declared=1000),
        make_frame(TEXT, b"{", fin=False),
        make_frame(TEXT, b"{", fin=False) + make_frame(PING),
    ],
    ids=["half a ping", "half a frame", "half a message", "ping within"],
)
def test_incomplete_message_times_out(server: Victim, data: bytes) -> None:
    check_timeout(server, data, b"did not arrive in time")


def wait_for_end(client: socket.socket) -> None:
    """Wait until the server has closed the connection, without reading anything from it."""
    poll = select.poll()
    poll.register(client, select.POLLHUP | select.POLLERR)
    assert poll.poll(TIMEOUT * 1000), "the server did not close the connection"


def create(text: str) -> bytes:
    message = {"type": "response.create", "model": "scripted", "input": text, "store": False}
    return make_frame(TEXT, json.dumps(message).encode())


def test_client_that_reads_nothing_is_disconnected(server: Victim) -> None:
    with connect(server) as client:
        client.sendall(create("go"))
        wait_for_end(client)


def test_client_that_reads_nothing_is_closed_at_the_end_of_its_time(victim: StartVictim) -> None:
    """The write timeout is longer than the lifetime, so it does not close the connection.

    The lifetime is longer than a busy machine delays the requests.
    """
    server = victim(script=LONG, store="memory:", keepalive_seconds=0, websocket_max_seconds=4, write_timeout_seconds=8)
    with ExitStack() as stack:
        busy, idle = (stack.enter_context(connect(server)) for _ in range(2))
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        busy.sendall(create("go"))
        idle.sendall(create("hi"))
        wait_for_end(busy)
        poll = select.poll()
        poll.register(idle, select.POLLRDHUP)
        assert poll.poll(TIMEOUT * 1000)


# The budget


def test_half_sent_messages_stay_within_the_budget(server: Victim) -> None:
    with ExitStack() as stack:
        for index in range(20):
            client = stack.enter_context(connect(server))
            data = b" " * 7 * MB
            frame = make_frame(TEXT, data, declared=15 * MB) if index % 2 else make_frame(TEXT, data, fin=False)
            flood(client, frame)
        assert server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"}).status == 200
    assert server.peak_mb() < 250


def test_messages_of_a_client_that_does_not_read_stay_within_the_budget(server: Victim) -> None:
    """Errors fill the buffers to the client. Then the server reads no further message, and holds at most one."""
    with ExitStack() as stack:
        for _ in range(8):
            client = stack.enter_context(connect(server))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(0.3)
            flood(client, make_frame(TEXT, b'{"type": "' + b"x" * 1000 + b'"}') * 2000)
            flood(client, make_frame(TEXT, b" " * 14 * MB))
        assert server.ask("GET", "/healthz").status == 200
    assert server.peak_mb() < 250


def test_large_requests_of_clients_that_do_not_read_share_the_budget(server: Victim) -> None:
    """The events repeat the instructions, so each such request is in memory several times."""
    server.reset_peak()
    fields = {"model": "scripted", "input": "hi", "instructions": "x" * 12 * MB, "store": False}
    frame = make_frame(TEXT, json.dumps({"type": "response.create"} | fields).encode())
    with ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(connect(server))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            flood(client, frame)
            client.recv(100)
        assert server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"}).status == 200
    assert server.peak_mb() < 400


def test_responses_in_the_memory_of_idle_connections_give_way(patient: Victim) -> None:
    patient.reset_peak()
    before = patient.rss_mb()
    fields = {"model": "scripted", "input": "x" * 12 * MB, "store": False}
    frame = make_frame(TEXT, json.dumps({"type": "response.create"} | fields).encode())
    with ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(connect(patient))
            client.sendall(frame)
            received = b""
            while b'"type":"response.completed"' not in received:
                part = client.recv(65536)
                assert part, received
                received += part
        assert patient.rss_mb() < before + 150


@pytest.mark.parametrize("fields", [{}, {"stream_id": True}], ids=["one lane", "many lanes"])
def test_thousand_requests_and_cancels_of_a_client_that_does_not_read_are_bounded(
    server: Victim, fields: dict[str, bool]
) -> None:
    server.reset_peak()
    before = server.rss_mb()
    with connect(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for number in range(1000):
            lane = dict.fromkeys(fields, f"lane_{number}")
            create = {"type": "response.create", "model": "scripted", "input": "hi"} | lane
            cancel = {"type": "response.cancel"} | lane
            flood(client, b"".join(make_frame(TEXT, json.dumps(message).encode()) for message in (create, cancel)))
        assert server.ask("GET", "/healthz").status == 200
        assert server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"}).status == 200
    assert server.peak_mb() < before + 40
    assert server.longest_block() < MAX_BLOCK
