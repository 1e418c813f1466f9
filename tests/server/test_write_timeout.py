"""Clients that stop reading."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from antiphon.server import write_timeout
from antiphon.server.write_timeout import WriteTimeoutMixin
from support.live_server import LiveServer
from support.websocket_client import WebSocketClient

ENDLESS = {"rules": [{"user": "go", "answers": [[{"text": ["x" * 2**18]}, {"delay": 0}] * 256]}]}


@pytest.fixture
def running(serve: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    monkeypatch.setattr(write_timeout, "_WRITE_TIMEOUT_SECONDS", 0.05)
    return serve(ENDLESS)


def test_unread_stream_is_aborted_and_its_model_stops(running: LiveServer) -> None:
    with running.connect() as client:
        body = b'{"model":"scripted","input":"go","stream":true}'
        client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        running.wait_for(running.backend.cancellation.wait)


def test_unread_websocket_is_aborted_and_its_model_stops(running: LiveServer) -> None:
    with WebSocketClient(running, max_queue=1) as client:
        client.create("go", store=False)
        running.wait_for(running.backend.cancellation.wait)
        client.socket.socket.shutdown(socket.SHUT_RDWR)  # its close would wait for a close frame that it does not read


class FakeTransport(asyncio.Transport):
    """A transport that reports these sizes of unread data, one per call."""

    def __init__(self, *unread: int) -> None:
        super().__init__()
        self._unread = iter(unread)
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return next(self._unread)

    def abort(self) -> None:
        self.aborted.set()


def make_protocol(transport: FakeTransport) -> WriteTimeoutMixin:
    protocol = WriteTimeoutMixin()
    protocol.loop, protocol.transport = asyncio.get_running_loop(), transport
    return protocol


async def test_client_that_has_read_all_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_timeout, "_WRITE_TIMEOUT_SECONDS", 0.0)
    transport = FakeTransport(9, 9)
    protocol = make_protocol(transport)
    protocol.pause_writing()
    protocol.resume_writing()
    protocol.pause_writing()
    protocol.connection_lost(None)
    for _ in range(3):  # more iterations of the event loop than the timer needs
        await asyncio.sleep(0)
    assert not transport.aborted.is_set()


async def test_slow_reader_is_not_aborted_while_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_timeout, "_WRITE_TIMEOUT_SECONDS", 0.0)
    transport = FakeTransport(9, 8, 8, 7, 7, 7)
    make_protocol(transport).pause_writing()
    await transport.aborted.wait()
    with pytest.raises(StopIteration):
        transport.get_write_buffer_size()
