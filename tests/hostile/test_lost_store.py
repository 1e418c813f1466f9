"""Servers whose database is deleted or replaced: they refuse writes, and acknowledge only what is stored."""

import shutil
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.live_server import HttpResponse
from support.victim import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

StartVictim = Callable[..., Victim]
TIMEOUT = 30.0


def create(server: Victim, **fields: Any) -> HttpResponse:
    return server.ask("POST", "/v1/responses", {"model": "scripted", "input": "Hello.", **fields})


def read_error(response: HttpResponse) -> tuple[int, str, str]:
    error = response.json["error"]
    return response.status, error["type"], error["code"]


def read_ids(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return {response_id for (response_id,) in connection.execute("SELECT id FROM responses")}


def wait_for_status(server: Victim, path: str, status: int) -> HttpResponse:
    deadline = time.monotonic() + TIMEOUT
    while (response := server.ask("GET", path)).status != status:
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)
    return response


def find_errors(server: Victim) -> list[str]:
    """Return the lines of the log about errors, without those of requests."""
    assert "Traceback" not in server.log()
    return [line for line in server.log().splitlines() if " error " in line]


def replace_by_copy(path: Path) -> None:
    shutil.copyfile(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


@pytest.mark.parametrize("loss", [Path.unlink, replace_by_copy], ids=["deleted", "replaced"])
def test_nothing_is_acknowledged_after_the_database_is_lost(
    victim: StartVictim, loss: Callable[[Path], object]
) -> None:
    server = victim(script={"default": "Hi."})
    path = server.folder / "store.db"
    stored = create(server)
    assert (stored.status, server.ask("GET", "/readyz").status) == (200, 200)
    loss(path)
    refused = [create(server), create(server, background=True), create(server)]
    assert [read_error(response) for response in refused] == [(503, "server_error", "store_lost")] * 3
    assert read_error(wait_for_status(server, "/readyz", 503)) == (503, "server_error", "store_lost")
    assert server.ask("GET", "/healthz").status == 200
    # Requests that store nothing are answered, and stored responses can still be read.
    assert create(server, store=False).status == 200
    assert server.ask("GET", f"/v1/responses/{stored.json['id']}").status == 200
    errors = find_errors(server)
    assert len([line for line in errors if "the store is lost" in line]) == 1
    # And at most one line for each request that was refused.
    assert len(errors) <= 1 + len(refused), errors
    server.stop()
    assert "Traceback" not in server.log()
    server.restart()
    after = create(server)
    assert after.status == 200
    assert server.ask("GET", "/readyz").status == 200
    server.stop()
    assert after.json["id"] in read_ids(path)


def test_lost_store_is_noticed_without_requests(victim: StartVictim) -> None:
    server = victim(script={"default": "Hi."})
    (server.folder / "store.db").unlink()
    deadline = time.monotonic() + TIMEOUT
    while "the store is lost" not in server.log():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.ask("GET", "/readyz").status == 503


def test_server_continues_when_the_same_file_is_back(victim: StartVictim) -> None:
    script = {"default": "Hi.", "rules": [{"user": "slow", "answers": [[{"text": "a"}, {"delay": 60}]]}]}
    server = victim(script=script, background_lease_seconds=1)
    path = server.folder / "store.db"
    running = create(server, input="slow", background=True).json["id"]
    following = server.send_raw(f"GET /v1/responses/{running}?stream=true HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    with following as stream:
        received = b""
        while b"output_text.delta" not in received:
            received += stream.recv(65536)
        path.rename(path.with_name("elsewhere"))
        wait_for_status(server, "/readyz", 503)
        deadline = time.monotonic() + TIMEOUT
        while "1 background responses are stopped" not in server.log():
            assert time.monotonic() < deadline, server.log()
            time.sleep(0.05)
    path.with_name("elsewhere").rename(path)
    wait_for_status(server, "/readyz", 200)
    assert create(server).status == 200
    assert server.ask("POST", f"/v1/responses/{running}/cancel").json["status"] == "cancelled"
    assert len([line for line in find_errors(server) if "the store is lost, nothing" in line]) == 1
    assert len([line for line in server.log().splitlines() if "works again" in line]) == 1
