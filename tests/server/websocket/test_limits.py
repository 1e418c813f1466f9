"""Limits of a WebSocket connection, its expiry, and its shutdown."""

import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from websockets.exceptions import ConnectionClosed

from antiphon.engine.respond import run
from antiphon.server.websocket import connection, uvicorn_protocol
from antiphon.server.websocket.uvicorn_protocol import WebSocketProtocol
from support.live_server import TIMEOUT, LiveServer
from support.websocket_client import WebSocketClient, get_text, list_codes

SCRIPT = {
    "rules": [{"user": "slowly", "answers": [[{"text": "One "}, {"wait": "gate"}, {"text": "two."}]]}],
    "default": "{history}",
}


@pytest.fixture
def running(serve: Callable[..., LiveServer]) -> LiveServer:
    return serve(SCRIPT)


@pytest.fixture
def client(running: LiveServer) -> Iterator[WebSocketClient]:
    with WebSocketClient(running) as client:
        yield client


def test_number_of_waiting_requests_is_limited(
    running: LiveServer, client: WebSocketClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_WAITING", 2)
    stored = client.ask(store=False)
    client.create("slowly")
    client.until("response.output_text.delta")
    for _ in range(3):
        client.create("hi", previous_response_id=stored["id"], store=False)
    error = client.until_error()
    assert list_codes([error]) == [(429, "too_many_waiting_requests")]
    running.do(lambda: running.backend.release("gate"))
    assert [get_text(client.finish()[-1]["response"]) for _ in range(3)] == ["One two.", "3", "3"]


def test_size_of_waiting_requests_is_limited(serve: Callable[..., LiveServer]) -> None:
    running = serve(SCRIPT, max_body_bytes=2000)
    with WebSocketClient(running) as client:
        client.create("slowly")
        client.until("response.output_text.delta")
        for _ in range(3):
            client.create("x" * 700)
        assert list_codes([client.until_error()]) == [(429, "too_many_waiting_requests")]


def test_number_of_lanes_is_limited(
    running: LiveServer, client: WebSocketClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_LANES", 1)
    for lane in "abc":  # an idle lane is removed
        client.ask(stream_id=lane)
    client.create("slowly", stream_id="a")
    client.until("response.output_text.delta", "a")
    assert list_codes([client.refuse(stream_id="b")]) == [(429, "too_many_lanes")]
    running.do(lambda: running.backend.release("gate"))


def test_too_large_message_closes_the_connection(serve: Callable[..., LiveServer]) -> None:
    with WebSocketClient(serve(SCRIPT, max_body_bytes=1000)) as client:
        client.create("x" * 1000)
        assert read_close_code(client) == 1009


def read_close_code(client: WebSocketClient) -> int | None:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            client.read()
    return closed.value.rcvd.code if closed.value.rcvd is not None else None


@pytest.fixture
def stuck(
    serve: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LiveServer, WebSocketClient]]:
    """A client that does not read, once the buffers to it are full."""
    paused = threading.Event()

    class WatchedProtocol(WebSocketProtocol):
        def pause_writing(self) -> None:
            super().pause_writing()
            paused.set()

    monkeypatch.setattr(uvicorn_protocol, "WebSocketProtocol", WatchedProtocol)
    step = [{"text": ["x" * 2**18]}, {"wait": "step"}]
    running = serve({"rules": [{"user": "go", "answers": [step * PIECES]}]})
    for _ in range(PIECES):
        running.do(lambda: running.backend.release("step"))
    with WebSocketClient(running, max_queue=1) as client:
        client.create("go", store=False)
        assert paused.wait(TIMEOUT)
        yield running, client


PIECES = 64


def test_slow_websocket_reader_holds_the_model_back(stuck: tuple[LiveServer, WebSocketClient]) -> None:
    """The model emits its next delta only when there is room for it, so no data accumulates."""
    running, client = stuck
    emitted, before = 0, -1
    while emitted != before:  # the client may just have read some data
        before = emitted
        for _ in range(3 * PIECES):
            running.do(lambda: None)
        emitted = running.backend._gates["step"].arrivals._value
    assert emitted < PIECES - 1
    (transport,) = (each.transport for each in running.server.server_state.connections)
    assert transport.get_write_buffer_size() < 2**20
    assert len(get_text(client.finish()[-1]["response"])) == PIECES * 2**18


def test_pongs_do_not_accumulate_for_a_client_that_reads_nothing(stuck: tuple[LiveServer, WebSocketClient]) -> None:
    running, client = stuck
    (connection,) = running.server.server_state.connections
    pings = (b"\x89\xe4" + bytes(4 + 100)) * 20_000
    running.do(lambda: connection.data_received(pings))
    assert connection.transport.get_write_buffer_size() < 2**20
    client.socket.socket.shutdown(socket.SHUT_RDWR)  # its close would wait for a close frame that it does not read


def test_fragmented_message_takes_no_extra_memory(running: LiveServer, client: WebSocketClient) -> None:
    message = json.dumps({"type": "response.create", "model": "scripted", "input": "x" * 1000})
    (connection,) = running.server.server_state.connections

    def pieces() -> Iterator[str]:
        yield from message[:-2]
        running.do(lambda: None)
        assert len(connection.frames) <= 1
        yield from message[-2:]

    client.socket.send(pieces())
    assert get_text(client.finish()[-1]["response"]) == "1"


def test_slow_reader_gets_the_end_of_a_cancelled_response(
    stuck: tuple[LiveServer, WebSocketClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, client = stuck
    monkeypatch.setattr(run, "READER_TIMEOUT_SECONDS", 0.01)
    response_id = client.next()["response"]["id"]
    assert running.ask("POST", f"/v1/responses/{response_id}/cancel").json["status"] == "cancelled"
    client.create("hi", store=False)
    last = client.finish()[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert client.finish()[-1]["type"] == "response.completed"


# Expiry and shutdown


def test_connection_expires(serve: Callable[..., LiveServer]) -> None:
    with WebSocketClient(serve(SCRIPT, websocket_max_seconds=0.05)) as client:
        assert client.next() == {
            "type": "error",
            "status": 400,
            "error": {
                "type": "invalid_request_error",
                "code": "websocket_connection_limit_reached",
                "message": "This connection has reached its limit of 0.05 seconds: open a new one.",
                "param": None,
            },
        }
        assert read_close_code(client) == 1001


def test_expiry_lets_the_running_response_finish_and_refuses_the_rest(
    serve: Callable[..., LiveServer],
) -> None:
    running = serve(SCRIPT)
    with WebSocketClient(running) as client:
        client.create("slowly")
        client.create("hi", stream_id="a")
        client.create("slowly", stream_id="a")
        client.create("hi", stream_id="a")
        assert client.finish("a")[-1]["type"] == "response.completed"
        for _ in range(2):
            running.wait_for(lambda: running.backend.reached("gate"))
        client.send({"type": "nothing"})
        assert list_codes([client.until_error()]) == [
            (400, "invalid_value")
        ]  # so the messages before it have been read
        (connected,) = running.server._app._websockets._connections
        running.do(connected._expire)
        while (event := client.next("a"))["type"] != "error":
            pass
        assert list_codes([event, client.refuse(stream_id="a")]) == [(400, "websocket_connection_limit_reached")] * 2
        for _ in range(2):
            running.do(lambda: running.backend.release("gate"))
        assert client.finish()[-1]["type"] == client.finish("a")[-1]["type"] == "response.completed"
        assert list_codes([client.next()]) == [(400, "websocket_connection_limit_reached")]
        assert read_close_code(client) == 1001


def test_shutdown_ends_running_responses_and_closes(serve: Callable[..., LiveServer]) -> None:
    running = serve(SCRIPT)
    with WebSocketClient(running) as idle, WebSocketClient(running) as busy:
        idle.ask()
        busy.create("slowly")
        busy.create("slowly", stream_id="a")
        busy.create("hi", stream_id="a")
        busy.until("response.output_text.delta")
        busy.until("response.output_text.delta", "a")
        running.server.should_exit = True
        for lane in (None, "a"):
            last = busy.finish(lane)
            if "status" in last[-1]:
                assert list_codes(last[-1:]) == [(503, "server_unavailable")]
                last = busy.finish(lane)
            assert (last[-1]["type"], last[-1]["response"]["error"]["code"]) == ("response.failed", "server_shutdown")
        assert [read_close_code(each) for each in (idle, busy)] == [1001, 1001]


def test_shutdown_lets_a_response_finish_in_time(serve: Callable[..., LiveServer]) -> None:
    running = serve(SCRIPT, shutdown_grace_seconds=TIMEOUT)
    with WebSocketClient(running) as client:
        client.create("slowly")
        client.until("response.output_text.delta")
        running.server.should_exit = True
        running.do(lambda: running.backend.release("gate"))
        assert get_text(client.finish()[-1]["response"]) == "One two."
        assert read_close_code(client) == 1001


def test_client_disconnect_stops_every_lane(running: LiveServer) -> None:
    with WebSocketClient(running) as client:
        ids = []
        for lane in (None, "a", "b"):
            client.create("slowly", **({} if lane is None else {"stream_id": lane}))
            ids.append(client.until("response.created", lane)["response"]["id"])
            client.until("response.output_text.delta", lane)
        client.create("hi", stream_id="a")
    running.wait_for(running.backend.cancellation.wait)
    stored = [wait_for_end(running, each) for each in ids]
    assert (running.backend.cancelled, stored) == (3, ["cancelled"] * 3)


def wait_for_end(running: LiveServer, response_id: str) -> str:
    while True:
        status: str = running.ask("GET", f"/v1/responses/{response_id}").json["status"]
        if status != "in_progress":
            return status
