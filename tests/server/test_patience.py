"""Clients that have stopped reading."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from antiphon.server import patience
from antiphon.server.patience import Patience
from live_server import Running
from websocket_client import Client

ENDLESS = {"rules": [{"user": "go", "answers": [[{"text": ["x" * 2**18]}, {"delay": 0}] * 256]}]}


@pytest.fixture
def running(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setattr(patience, "_SLOWEST_READER_SECONDS", 0.05)
    return serve(ENDLESS)


def test_a_stream_that_nobody_reads_any_more_is_broken_off_and_its_model_stops(running: Running) -> None:
    with running.connect() as client:
        body = b'{"model":"scripted","input":"go","stream":true}'
        client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        running.wait_for(running.backend.cancellation.wait)


def test_a_websocket_that_nobody_reads_any_more_is_broken_off_and_its_model_stops(running: Running) -> None:
    with Client(running, max_queue=1) as client:
        client.create("go", store=False)
        running.wait_for(running.backend.cancellation.wait)
        client.socket.socket.shutdown(socket.SHUT_RDWR)  # it would wait for a farewell that it does not read


async def test_one_that_reads_on_is_waited_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_SLOWEST_READER_SECONDS", 0.0)
    broken = asyncio.Event()

    class Way(asyncio.Transport):
        def abort(self) -> None:
            broken.set()

    protocol = Patience()
    protocol.loop, protocol.transport = asyncio.get_running_loop(), Way()
    protocol.pause_writing()
    protocol.resume_writing()
    protocol.pause_writing()
    protocol.connection_lost(None)
    for _ in range(3):  # more turns of the loop than its timer would need
        await asyncio.sleep(0)
    assert not broken.is_set()
    protocol.pause_writing()
    await broken.wait()
