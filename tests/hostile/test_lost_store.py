"""Servers whose database is deleted, replaced or full: they refuse writes, and acknowledge only what is stored."""

import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB. Only a system administrator can mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False, capture_output=True)
    if mount.returncode:
        pytest.skip("no file system can be mounted")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


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


def test_full_disk_refuses_writes_until_files_are_deleted(victim: StartVictim, small_disk: Path) -> None:
    path = small_disk / "store.db"
    server = victim(script={"default": "Hi."}, store=f"sqlite:///{path}", store_min_free_bytes=100_000)
    stored = {create(server).json["id"] for _ in range(3)}
    assert server.ask("GET", "/readyz").status == 200
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    # No write has failed yet, but the next one would.
    assert read_error(wait_for_status(server, "/readyz", 503)) == (503, "server_error", "store_full")
    refused = [create(server, input="x" * 100_000), create(server, background=True), create(server, stream=True)]
    assert [read_error(response) for response in refused] == [(503, "server_error", "store_full")] * 3
    assert server.ask("GET", "/healthz").status == 200
    assert create(server, store=False).status == 200
    assert len([line for line in find_errors(server) if "cannot be written to: database or disk is full" in line]) == 1
    ballast.unlink()
    wait_for_status(server, "/readyz", 200)
    stored |= {create(server).json["id"] for _ in range(3)}
    server.stop()
    assert stored <= read_ids(path)


def test_limited_file_size_refuses_writes_until_it_is_raised(victim: StartVictim) -> None:
    server = victim(script={"default": "Hi."})
    path = server.folder / "store.db"
    stored = {create(server).json["id"] for _ in range(3)}
    size = max(file.stat().st_size for file in server.folder.glob("store.db*"))
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, hard))
    refused = [create(server, input="x" * 200_000) for _ in range(3)]
    # SQLite reports an I/O error.
    assert [read_error(response) for response in refused] == [(503, "server_error", "store_unavailable")] * 3
    assert read_error(wait_for_status(server, "/readyz", 503)) == (503, "server_error", "store_unavailable")
    assert server.ask("GET", "/healthz").status == 200
    assert len([line for line in find_errors(server) if "cannot be written to: disk I/O error" in line]) == 1
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
    wait_for_status(server, "/readyz", 200)
    stored |= {create(server).json["id"] for _ in range(3)}
    server.stop()
    assert stored <= read_ids(path)
