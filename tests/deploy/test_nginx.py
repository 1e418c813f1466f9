"""The configuration of nginx: checked by nginx, and in front of two nodes on one PostgreSQL database."""

import base64
import contextlib
import http.client
import json
import os
import resource
import shlex
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from websockets.sync.client import connect

from support.certificates import Authority
from support.crashing_server import KillableServer, wait_until
from support.ports import port_of, reserve_port

NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
FILES = Path(__file__).parents[2] / "deploy" / "nginx"

pytestmark = pytest.mark.skipif(not Path(NGINX).exists(), reason="needs nginx")


@pytest.fixture
def port() -> Iterator[int]:
    with reserve_port() as reserved:
        yield port_of(reserved)


def write_configuration(folder: Path, port: int, nodes: list[str], *, tls_port: int = 0) -> Path:
    """Write the files with other addresses, and return the main one."""
    for name in ("nginx.conf", "proxy.conf", "tls.conf"):
        text = (FILES / name).read_text().replace("/tmp/nginx", f"{folder}/nginx")
        for number, address in enumerate(nodes, start=1):
            text = text.replace(f"server node{number}:8484", f"server {address}")
        text = text.replace("listen 8484", f"listen 127.0.0.1:{port}").replace(
            "worker_processes auto", "worker_processes 1"
        )
        if tls_port:
            text = text.replace("# include tls.conf", "include tls.conf").replace(
                "listen 8443", f"listen 127.0.0.1:{tls_port}"
            )
            text = text.replace("/etc/nginx/antiphon/tls/", f"{folder}/")
        (folder / name).write_text(text)
    return folder / "nginx.conf"


def make_command(configuration: Path, *options: str) -> list[str]:
    user = "user root; " if os.geteuid() == 0 else ""
    return [NGINX, "-e", "stderr", "-c", str(configuration), "-g", f"{user}daemon off;", *options]


def test_configuration_with_and_without_tls_is_valid(tmp_path: Path, port: int) -> None:
    path = Authority(tmp_path).write_certificate("127.0.0.1")
    for name in ("certificate.pem", "key.pem"):
        shutil.copy(path, tmp_path / name)
    nodes = ["127.0.0.1:1", "127.0.0.1:2"]
    with reserve_port() as reserved:
        for tls_port in (0, port_of(reserved)):
            configuration = write_configuration(tmp_path, port, nodes, tls_port=tls_port)
            checked = subprocess.run(make_command(configuration, "-t"), capture_output=True, text=True, check=False)
            assert checked.returncode == 0, checked.stderr
            assert "warn" not in checked.stderr


@pytest.mark.skipif(0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 17000, reason="needs 17000 open files")
def test_proxy_accepts_all_its_connections_with_a_low_limit_of_open_files(tmp_path: Path, port: int) -> None:
    command = shlex.join(make_command(write_configuration(tmp_path, port, ["127.0.0.1:1", "127.0.0.1:2"])))
    process = subprocess.Popen(["/bin/sh", "-c", f"ulimit -S -n 64 && exec {command}"])
    try:
        wait_until(lambda: can_connect(port))
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                stack.callback(client.close)
                client.request("GET", "/metrics")
                assert client.getresponse().status == 404
    finally:
        process.terminate()
        process.wait(30)


def test_proxy_passes_a_body_on_while_it_arrives(tmp_path: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as node:
        node.settimeout(60)
        address = f"127.0.0.1:{node.getsockname()[1]}"
        process = subprocess.Popen(make_command(write_configuration(tmp_path, port, [address, address])))
        try:
            wait_until(lambda: can_connect(port))
            with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\nbegin")
                passed, _ = node.accept()
                with passed, passed.makefile("rb") as received:
                    assert received.readline() == b"POST /v1/responses HTTP/1.1\r\n"
                    while received.readline() != b"\r\n":
                        pass
                    assert received.read(5) == b"begin"
        finally:
            process.terminate()
            process.wait(30)


class AnswerHandler(BaseHTTPRequestHandler):
    """Answers every request and closes its connection."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve_answers(port: int) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", port), AnswerHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def post(port: int) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
        client.request("POST", "/v1/responses", b"{}")
        return client.getresponse().status


def test_restarted_node_gets_requests_while_the_next_one_restarts(tmp_path: Path, port: int) -> None:
    with reserve_port() as first, reserve_port() as second:
        nodes = [port_of(first), port_of(second)]
        configuration = write_configuration(tmp_path, port, [f"127.0.0.1:{node}" for node in nodes])
        process = subprocess.Popen(make_command(configuration))
        try:
            wait_until(lambda: can_connect(port))
            with serve_answers(nodes[1]):
                assert [post(port) for _ in range(6)] == [200] * 6
            # nginx still counts the first node as down.
            with serve_answers(nodes[0]):
                assert [post(port) for _ in range(6)] == [200] * 6
        finally:
            process.terminate()
            process.wait(30)


SCRIPT: dict[str, Any] = {
    "rules": [
        {"user": "steps", "answers": [[step for n in range(12) for step in ({"text": [f"w{n} "]}, {"delay": 0.02})]]},
        {"user": "gate", "answers": [[{"text": ["first "]}, {"delay": 60}]]},
    ],
    "default": "You said: {input}",
}


@pytest.fixture
def nodes(tmp_path: Path, postgres_url: str) -> Iterator[list[KillableServer]]:
    with contextlib.ExitStack() as stack:
        started = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            settings: dict[str, Any] = {
                "seal_keys": [base64.b64encode(bytes(32)).decode()],
                "data_dir": str(tmp_path / "data"),
            }
            node = KillableServer(
                tmp_path / name, SCRIPT, store=postgres_url, background_lease_seconds=1.0, metrics=True, **settings
            )
            started.append(node)
            stack.callback(stop_node, node)
        yield started


def stop_node(node: KillableServer) -> None:
    with contextlib.suppress(ValueError):  # killed by the test
        node.kill()


@pytest.fixture
def proxy(tmp_path: Path, port: int, nodes: list[KillableServer]) -> Iterator[str]:
    configuration = write_configuration(tmp_path, port, [node.address for node in nodes])
    process = subprocess.Popen(make_command(configuration))
    try:
        wait_until(lambda: can_connect(port))
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_proxy_passes_streams_and_resumes_them_on_the_other_node(proxy: str, nodes: list[KillableServer]) -> None:
    with OpenAI(base_url=f"http://{proxy}/v1", api_key="any", max_retries=0, timeout=60) as client:
        # The second event arrives although the answer is not complete: nothing is buffered.
        with client.responses.create(model="scripted", input="gate", stream=True) as stream:
            first = next(event for event in stream if event.type == "response.output_text.delta")
        assert first.delta == "first "

        with connect(f"ws://{proxy}/v1/responses", proxy=None) as socket_client:
            socket_client.send(json.dumps({"type": "response.create", "model": "scripted", "input": "hi"}))
            types = []
            while not types or types[-1] != "response.completed":
                types.append(json.loads(socket_client.recv(60))["type"])

        begun = client.responses.create(model="scripted", input="steps", background=True, stream=True)
        received = []
        for event in begun:
            received.append(event)
            if event.type == "response.output_text.delta":
                break
        begun.close()
        response_id = received[0].response.id
        nodes[0].kill()  # nginx and the client continue with the other node
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=received[-1].sequence_number))
        numbers = [event.sequence_number for event in (*received, *rest)]
        assert numbers == list(range(len(numbers)))
        assert rest[-1].type == "response.completed"
        assert client.responses.create(model="scripted", input="still there").output_text == "You said: still there"
    with contextlib.closing(http.client.HTTPConnection(proxy, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 404
