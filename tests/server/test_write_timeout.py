"""Clients that have stopped reading."""

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


def test_a_stream_that_nobody_reads_any_more_is_broken_off_and_its_model_stops(running: LiveServer) -> None:
    with running.connect() as client:
        body = b'{"model":"scripted","input":"go","stream":true}'
        client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        running.wait_for(running.backend.cancellation.wait)


def test_a_websocket_that_nobody_reads_any_more_is_broken_off_and_its_model_stops(running: LiveServer) -> None:
    with WebSocketClient(running, max_queue=1) as client:
        client.create("go", store=False)
        running.wait_for(running.backend.cancellation.wait)
        client.socket.socket.shutdown(socket.SHUT_RDWR)  # it would wait for a farewell that it does not read


class Way(asyncio.Transport):
    """To a client that has so much left to read."""

    def __init__(self, *unread: int) -> None:
        super().__init__()
        self._unread = iter(unread)
        self.broken = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return next(self._unread)

    def abort(self) -> None:
        self.broken.set()


def guard(way: Way) -> WriteTimeoutMixin:
    made = WriteTimeoutMixin()
    made.loop, made.transport = asyncio.get_running_loop(), way
    return made


async def test_one_that_has_read_all_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_timeout, "_WRITE_TIMEOUT_SECONDS", 0.0)
    way = Way(9, 9)
    protocol = guard(way)
    protocol.pause_writing()
    protocol.resume_writing()
    protocol.pause_writing()
    protocol.connection_lost(None)
    for _ in range(3):  # more turns of the loop than its timer would need
        await asyncio.sleep(0)
    assert not way.broken.is_set()


async def test_one_that_reads_slowly_is_waited_for_as_long_as_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_timeout, "_WRITE_TIMEOUT_SECONDS", 0.0)
    way = Way(9, 8, 8, 7, 7, 7)
    guard(way).pause_writing()
    await way.broken.wait()
    with pytest.raises(StopIteration):
        way.get_write_buffer_size()
