import asyncio
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.settings import Settings
from antiphon.errors import ConfigError
from antiphon.server import process
from antiphon.server.listener import bind_socket
from antiphon.server.process import fit_connections
from antiphon.store.sqlite.store import SqliteStore
from support import live_server
from support.crashing_server import wait_until
from support.loop_blocks import assert_no_block

TIMEOUT = 60
SERVER_PROCESS = Path(live_server.__file__).with_name("server_process.py")
GATED = {"rules": [{"user": "wait", "answers": [[{"text": "first "}, {"wait": "gate"}, {"text": "last"}]]}]}

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []

    def start_child(*, port: int = 0, grace: float = 0, store: str = "memory:") -> subprocess.Popen[str]:
        command = [sys.executable, str(SERVER_PROCESS), str(port), str(grace), store, json.dumps(GATED)]
        child = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        children.append(child)
        return child

    yield start_child
    for child in children:
        child.kill()
        if child.stderr is not None and not child.stderr.closed:
            assert_no_block(child.communicate()[1])


@contextlib.contextmanager
def start_stream(child: subprocess.Popen[str]) -> Iterator[http.client.HTTPResponse]:
    """Open a stream whose model has sent its first delta, and waits."""
    assert child.stdout is not None
    url = child.stdout.readline().strip()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT)
    body = json.dumps({"model": "scripted", "input": "wait", "stream": True})
    with contextlib.closing(connection):
        connection.request("POST", "/v1/responses", body)
        with connection.getresponse() as response:
            while b'"delta":"first' not in response.readline():
                pass
            yield response


def read_rest(response: http.client.HTTPResponse) -> list[str]:
    """Return the names of the remaining events and the last data line."""
    lines = response.read().decode().splitlines()
    return [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] + [lines[-2]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_streams_and_exits_with_0(start: Start, number: signal.Signals) -> None:
    child = start(grace=0)
    with start_stream(child) as response:
        child.send_signal(number)
        rest = read_rest(response)
    assert rest[-3:] == ["error", "response.failed", "data: [DONE]"]
    assert child.wait(TIMEOUT) == 0
    assert "Traceback" not in child.communicate()[1]


def test_second_signal_exits_at_once(start: Start) -> None:
    child = start(grace=1000)
    with start_stream(child):
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
        # The system decides which of the two signals is delivered first.
        assert child.wait(TIMEOUT) in {128 + signal.SIGINT, 128 + signal.SIGTERM}


def test_stream_that_finishes_within_the_grace_period_completes(serve: Callable[..., Any]) -> None:
    running = serve(GATED, shutdown_grace_seconds=TIMEOUT)
    with running.client() as client, client.responses.stream(model="scripted", input="wait") as stream:
        deltas = (event.delta for event in stream if event.type == "response.output_text.delta")
        assert next(deltas) == "first"
        running.server.handle_exit(signal.SIGTERM, None)
        running.do(lambda: running.backend.release("gate"))
        assert "".join(deltas) == " last"


def test_plain_response_in_progress_gets_a_shutdown_error(serve: Callable[..., Any]) -> None:
    running = serve(GATED)
    body = json.dumps({"model": "scripted", "input": "wait"}).encode()
    with running.connect() as client:
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        running.wait_for(lambda: running.backend.reached("gate"))
        running.server.handle_exit(signal.SIGTERM, None)
        response = http.client.HTTPResponse(client)
        response.begin()
        answer = json.loads(response.read())
    assert (response.status, answer["status"], answer["error"]["message"]) == (
        200,
        "failed",
        "The server is shutting down.",
    )


def test_stopping_server_closes_connections_after_their_next_response(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_LINGER_SECONDS", TIMEOUT)
    caplog.set_level("INFO", process.logger.name)
    running = serve(GATED, shutdown_grace_seconds=TIMEOUT)
    idle = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)

    def check_readiness() -> tuple[int, bool, bytes]:
        idle.request("GET", "/readyz")
        response = idle.getresponse()
        return response.status, response.will_close, response.read()

    with contextlib.closing(idle), running.client() as client:
        assert check_readiness()[:2] == (200, False)
        with client.responses.stream(model="scripted", input="wait") as stream:
            deltas = (event.delta for event in stream if event.type == "response.output_text.delta")
            assert next(deltas) == "first"
            running.server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: not is_listening(running.port))
            status, will_close, body = check_readiness()
            assert (status, will_close) == (503, True)
            assert b"The server is shutting down." in body
            running.do(lambda: running.backend.release("gate"))
            assert "".join(deltas) == " last"
    running.stop()
    assert [message for message in caplog.messages if message.startswith("stop")] == [
        "stopping: accepts no more connections",
        f"stopping: 1 foreground and 0 background responses have {TIMEOUT} s to end",
        "stopped",
    ]


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_background_response_ends_within_the_grace_period(serve: Callable[..., Any], tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    running = serve(GATED, store=store, shutdown_grace_seconds=TIMEOUT)
    with running.client() as client:
        response_id = client.responses.create(model="scripted", input="wait", background=True).id
        running.wait_for(lambda: running.backend.reached("gate"))
    running.server.handle_exit(signal.SIGTERM, None)
    wait_until(lambda: not is_listening(running.port))
    running.do(lambda: running.backend.release("gate"))
    running.stop()
    assert asyncio.run(load_status(SqliteStore(store.path), response_id)) == "completed"


async def load_status(store: SqliteStore, response_id: str) -> str | None:
    await store.open()
    try:
        response = await store.load_response("default", response_id)
    finally:
        await store.close()
    return None if response is None else response.status


def test_drained_server_accepts_requests_but_is_not_ready(serve: Callable[..., Any]) -> None:
    running = serve(GATED, shutdown_drain_seconds=TIMEOUT)
    running.server.handle_exit(signal.SIGTERM, None)
    wait_until(lambda: running.ask("GET", "/readyz").status == 503)
    assert running.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"}).json["status"] == "completed"
    running.do(running.server.stop_draining)


def test_port_in_use_fails_with_one_line(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = start(port=port)
        out, err = child.communicate(timeout=TIMEOUT)
    assert (child.returncode, out, err) == (
        1,
        "",
        f"Port {port} on 127.0.0.1 is in use. Stop the other program, or choose another port.\n",
    )


def test_engine_start_error_fails_with_one_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    child = start(store="sqlite:///folder")
    out, err = child.communicate(timeout=TIMEOUT)
    assert (child.returncode, out, len(err.splitlines())) == (1, "", 1)


def test_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    settings = Settings(host="192.0.2.1", port=8484, data_dir=tmp_path, store="memory:")
    with pytest.raises(ConfigError, match=r"^Cannot listen on port 8484 of 192\.0\.2\.1: "):
        bind_socket(settings)


def test_ipv6_address_is_supported(serve: Callable[..., Any]) -> None:
    running = serve(host="::1")
    assert running.url == f"http://[::1]:{running.port}"
    with running.client() as client:
        assert client.responses.create(model="scripted", input="hi").output_text == "You said: hi"


@pytest.mark.parametrize(
    ("descriptors", "connections"), [(None, 100), (1000, 100), (134, 100), (100, 75), (4, 3), (1, 1)]
)
def test_connections_fit_the_limit_of_files(
    caplog: pytest.LogCaptureFixture, descriptors: int | None, connections: int
) -> None:
    fitted = fit_connections(live_server.make_settings(max_connections=100), descriptors)
    assert fitted.max_connections == connections
    assert ("ulimit -n" in caplog.text) == (connections != 100)
