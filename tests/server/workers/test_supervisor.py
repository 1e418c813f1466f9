"""A server with several workers: its start, the death of a process, and its end."""

import errno
import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from support.crashing_server import TIMEOUT, KillableServer, wait_until
from support.worker_processes import connect_to_each, is_running, list_workers

SCRIPT = {"default": "You said: {input}"}
PROGRAM = """
import sys
from antiphon.cli import main, serve
serve.format_banner = lambda *_, **__: " ".join(sys.modules)
main.main(["serve", "--port", "0", "--workers", "2", "--script", "script.json", "--store", "sqlite:///store.db"])
"""


def test_dead_worker_is_started_again(tmp_path: Path) -> None:
    server = KillableServer(tmp_path, SCRIPT, workers=2, log_level="info")
    before = list_workers(server)
    os.kill(before[1], signal.SIGKILL)
    assert server.wait_for_log("worker 2").endswith("worker 2 was ended by SIGKILL; it is started again now\n")
    assert server.wait_for_log("worker 2").endswith("worker 2 is ready again\n")
    assert len(set(list_workers(server)) - set(before)) == 1
    assert server.ask("POST", "/v1/responses", {"model": "scripted", "input": "Hello"})["status"] == "completed"
    server.configure(workers=2, log_level="info", models={"alias": "scripted"})
    os.kill(server.pid, signal.SIGHUP)
    server.wait_for_log("reloaded: models\n")
    for connection in connect_to_each(server):
        assert [model["id"] for model in connection.ask("GET", "/v1/models")["data"]] == ["scripted", "alias"]
        connection.close()
    assert "stopping 2 workers\n" in server.stop()


def test_stopping_server_refuses_connections_while_a_response_runs(tmp_path: Path) -> None:
    script = {"default": [{"text": "first "}, {"delay": 600}]}
    server = KillableServer(tmp_path, script, workers=2, log_level="info", shutdown_grace_seconds=600)
    body = json.dumps({"model": "scripted", "input": "hi", "stream": True})
    with closing(http.client.HTTPConnection(server.address, timeout=TIMEOUT)) as client:
        client.request("POST", "/v1/responses", body, {"Content-Type": "application/json"})
        assert client.getresponse().readline() == b"event: response.created\n"
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: is_refused(server.address))
        server.end(signal.SIGTERM, status=128 + signal.SIGTERM)


def is_refused(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=TIMEOUT).close()
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False


def test_workers_end_with_their_supervisor_which_has_no_engine(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        modules = set(process.stdout.readline().split())
        workers = list_workers(process)
        process.kill()
        wait_until(lambda: not any(map(is_running, workers)))
        assert process.stderr is not None
        assert process.stderr.read().count("the supervisor has ended\n") == len(workers) == 2
    packages = {name.split(".")[1] for name in modules if name.startswith("antiphon.")}
    assert packages & {"agent", "backends", "engine", "protocol", "store", "tools", "upstream"} == set()
    assert "uvicorn" not in modules


def test_error_of_the_first_worker_is_one_line_and_exit_1(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    with closing(sqlite3.connect(tmp_path / "store.db")) as database:
        database.execute("PRAGMA user_version = 9999")
    options = ["--port", "0", "--workers", "2", "--script", "script.json", "--store", "sqlite:///store.db"]
    command = [sys.executable, "-m", "antiphon", "serve", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("antiphon: The store store.db has schema version 9999, but")
