"""Clients that stop reading."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest

from antiphon.server.write_timeout import WriteStall, WriteTimeout, count_unacknowledged
from support.live_server import LiveServer
from support.websocket_client import WebSocketClient

ENDLESS = {"rules": [{"user": "go", "answers": [[{"text": ["x" * 2**18]}, {"delay": 0}] * 256]}]}


@pytest.fixture
def running(serve: Callable[..., LiveServer]) -> LiveServer:
    return serve(ENDLESS, write_timeout_seconds=0.05)


def test_unread_stream_is_aborted_and_its_model_stops(running: LiveServer) -> None:
    with running.connect() as client:
        body = b'{"model":"scripted","input":"go","stream":true}'
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        running.wait_for(running.backend.cancellation.wait)


def test_unread_websocket_is_aborted_and_its_model_stops(running: LiveServer) -> None:
    with WebSocketClient(running, max_queue=1) as client:
        client.create("go", store=False)
        running.wait_for(running.backend.cancellation.wait)
        with suppress(OSError):  # its close would wait for a close frame that it does not read
            client.socket.socket.shutdown(socket.SHUT_RDWR)


class FakeConnection:
    """A connection with this number of bytes written to it, and a transport that holds some of them."""

    def __init__(self) -> None:
        self.transport = self
        self.bytes_written = 0
        self.waiting = 0
        self.write_stall: WriteStall | None = None
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def get_extra_info(self, name: str) -> None:
        assert name == "socket"

    def abort(self) -> None:
        self.aborted = True


def check(*states: tuple[float, int, int], min_rate: float = 10) -> bool:
    """Check a connection at these times, with these numbers of written and waiting bytes. Return True if aborted."""
    connection = FakeConnection()
    timeout = WriteTimeout([connection], seconds=8, min_rate=min_rate)
    for now, connection.bytes_written, connection.waiting in states:
        assert not connection.aborted
        timeout.check(connection, now)
    return connection.aborted


def test_client_that_takes_nothing_is_aborted() -> None:
    assert check((0, 900, 900), (4, 900, 900), (8, 900, 900))
    assert check((0, 900, 900), (8, 900, 900), min_rate=0)


def test_client_that_has_read_all_is_not_aborted() -> None:
    assert not check((0, 900, 900), (4, 900, 0), (8, 1800, 900), (12, 1800, 900))


def test_slow_reader_is_not_aborted_while_it_reads_enough() -> None:
    assert not check((0, 900, 900), (8, 900, 800), (16, 900, 720))
    assert not check((0, 900, 900), (8, 900, 899), min_rate=0)


def test_reader_below_the_minimum_rate_is_aborted() -> None:
    assert check((0, 900, 900), (8, 900, 821))


def test_progress_counts_while_more_is_written() -> None:
    """The server fills the buffer again as soon as there is room, so its size alone does not show progress."""
    assert not check((0, 900, 900), (4, 940, 900), (8, 980, 900))
    assert check((0, 900, 900), (4, 910, 900), (8, 920, 900))


async def test_closed_connection_has_no_unacknowledged_bytes() -> None:
    loop = asyncio.get_running_loop()
    closed = loop.create_future()

    class Client(asyncio.Protocol):
        def connection_lost(self, error: Exception | None) -> None:
            closed.set_result(None)

    local, remote = socket.socketpair()
    with remote:
        transport, _ = await loop.create_unix_connection(Client, sock=local)
        transport.write(b"x")
        assert count_unacknowledged(transport) > 0
        transport.abort()
        await closed
        await asyncio.sleep(0)  # the socket is closed after this call
        assert count_unacknowledged(transport) == 0
