"""Requests and connections that have ended, in any way, are freed without the garbage collector.

The server collects rarely. Cycles would grow for minutes, and the collection would then block the event loop.
"""

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.sync.client import connect

from support.crashing_server import wait_until
from support.garbage import expect_no_garbage
from support.live_server import TIMEOUT, LiveServer, make_settings

SCRIPT = {
    "rules": [
        {"user": "wait", "answers": [[{"text": "first"}, {"delay": 600}]]},
        {"user": "refuse", "answers": [[{"raise": {"message": "No.", "status": 400, "code": "no"}}]]},
        {"user": "fail", "answers": [[{"text": "So "}, {"failure": {"message": "No.", "code": "model_error"}}]]},
    ],
    "default": "Hello.",
}


@pytest.fixture(scope="module")
def running() -> Iterator[LiveServer]:
    server = LiveServer(SCRIPT, make_settings())
    yield server
    server.stop()


def make_request(**body: Any) -> bytes:
    data = json.dumps({"model": "scripted", **body}).encode()
    return b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


def send(running: LiveServer, request: bytes, *, until: bytes) -> None:
    """Send a request on a new connection, read until these bytes have arrived, and leave."""
    with running.connect() as client:
        client.sendall(request)
        received = b""
        while until not in received:
            received += client.recv(65536)


def leave_waiting(running: LiveServer) -> None:
    """Leave while the model works on a response that is not streamed."""
    with running.connect() as client:
        client.sendall(make_request(input="wait"))
        wait_until(lambda: running.engine.foreground_count > 0)


def use_socket(running: LiveServer, text: str, *, until: str) -> None:
    """Send a request on a WebSocket, read until this event, and leave."""
    with connect(running.url.replace("http", "ws") + "/v1/responses", open_timeout=TIMEOUT) as client:
        client.send(json.dumps({"type": "response.create", "model": "scripted", "input": text}))
        while json.loads(client.recv(TIMEOUT))["type"] != until:
            pass
        client.socket.shutdown(socket.SHUT_RDWR)


USES: dict[str, Callable[[LiveServer], object]] = {
    "whole": lambda running: send(running, make_request(input="hi"), until=b'"usage"'),
    "stream": lambda running: send(running, make_request(input="hi", stream=True), until=b"[DONE]"),
    "invalid": lambda running: send(running, make_request(input="hi", temperature="hot"), until=b'"error"'),
    "refused": lambda running: send(running, make_request(input="refuse", stream=True), until=b'"error"'),
    "failed": lambda running: send(running, make_request(input="fail", stream=True), until=b"[DONE]"),
    "left while it waits": leave_waiting,
    "left in the stream": lambda running: send(running, make_request(input="wait", stream=True), until=b"first"),
    "not HTTP": lambda running: send(running, b"nonsense\r\n\r\n", until=b"invalid_http"),
    "socket": lambda running: use_socket(running, "hi", until="response.completed"),
    "socket with an error": lambda running: use_socket(running, "refuse", until="error"),
    "socket left in the stream": lambda running: use_socket(running, "wait", until="response.output_text.delta"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_ended_request_leaves_no_garbage(running: LiveServer, use: Callable[[LiveServer], object]) -> None:
    use(running)  # some parts are made at the first use
    with expect_no_garbage():
        for _ in range(3):
            use(running)
        state = running.server.server_state
        wait_until(lambda: not state.connections and not state.tasks)
