"""Servers whose disk is full: they refuse writes, lose nothing, and continue when there is space."""

import importlib.util
import re
import resource
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
TIMEOUT = 60.0
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
FULL = (503, "server_error", "store_full", "1")
SCRIPT = {"default": "Hi.", "rules": [{"user": "slow", "answers": [[{"text": "a"}, {"delay": 5}, {"text": "b"}]]}]}
# The delay is longer than a busy machine takes to fill the disk.


def create(server: Victim, **fields: Any) -> HttpResponse:
    return server.ask("POST", "/v1/responses", {"model": "scripted", "input": "Hello.", **fields})


def send_file(server: Victim, path: str, size: int, *, field: str = "file") -> HttpResponse:
    parts = ('name="purpose"\r\n\r\nassistants', f'name="{field}"; filename="a.txt"\r\n\r\n{"x" * size}')
    body = "".join(f"--b\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + "--b--\r\n"
    return server.ask("POST", path, body.encode(), headers=FORM)


def read_error(response: HttpResponse) -> tuple[int, str, str, str | None]:
    error = response.json["error"]
    return response.status, error["type"], error["code"], response.headers.get("retry-after")


def read_ids(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return {response_id for (response_id,) in connection.execute("SELECT id FROM responses")}


def wait_until(server: Victim, is_reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not is_reached():
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)


def count_lines(server: Victim, text: str) -> int:
    assert "Traceback" not in server.log()
    return sum(text in line for line in server.log().splitlines())


def fill(folder: Path) -> Path:
    """Write a file until the disk is full, and return its path."""
    ballast = folder / "ballast"
    with pytest.raises(OSError, match="No space left"), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB. Only a system administrator can mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=False, capture_output=True)
    if mount.returncode:
        pytest.skip("no file system can be mounted")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def server(victim: StartVictim, small_disk: Path) -> Victim:
    """A server whose store is on the small disk."""
    return victim(
        script=SCRIPT,
        store=f"sqlite:///{small_disk}/store.db",
        store_min_free_bytes=100_000,
        background_lease_seconds=1,
    )


def test_full_disk_refuses_writes_until_files_are_deleted(server: Victim, small_disk: Path) -> None:
    stored = {create(server).json["id"] for _ in range(3)}
    assert server.ask("GET", "/readyz").status == 200
    running = create(server, input="slow", background=True).json["id"]
    wait_until(server, lambda: server.ask("GET", f"/v1/responses/{running}").json["status"] == "in_progress")
    ballast = fill(small_disk)
    # No write has failed yet, but the next one would.
    wait_until(server, lambda: server.ask("GET", "/readyz").status == 503)
    assert read_error(server.ask("GET", "/readyz")) == FULL
    refused = [create(server, input="x" * 100_000), create(server, background=True), create(server, stream=True)]
    refused += [
        server.ask("POST", "/v1/conversations", {"items": [{"role": "user", "content": "x" * 100_000}]}),
        server.ask("POST", "/v1/prompts", {"template": {"instructions": "x" * 100_000}}),
    ]
    assert [read_error(response) for response in refused] == [FULL] * 5
    assert server.ask("GET", "/healthz").status == 200
    assert create(server, store=False).status == 200
    assert server.ask("GET", f"/v1/responses/{min(stored)}").status == 200
    # The background response ends while the disk is full. Its lease is renewed: small writes may succeed.
    wait_until(server, lambda: count_lines(server, "the response cannot be stored yet"))
    assert server.ask("GET", f"/v1/responses/{running}").json["status"] == "in_progress"
    ballast.unlink()
    wait_until(server, lambda: server.ask("GET", "/readyz").status == 200)
    wait_until(server, lambda: server.ask("GET", f"/v1/responses/{running}").json["status"] == "completed")
    stored |= {create(server).json["id"] for _ in range(3)}
    assert count_lines(server, "cannot be written to: database or disk is full") == 1
    assert count_lines(server, "works again") == 1
    server.stop()
    assert stored | {running} <= read_ids(small_disk / "store.db")


def test_full_disk_refuses_files_and_containers_until_there_is_space(server: Victim, small_disk: Path) -> None:
    file_id = send_file(server, "/v1/files", 5).json["id"]
    container = f"/v1/containers/{server.ask('POST', '/v1/containers', {'name': 'x'}).json['id']}"
    upload = {"filename": "n.txt", "bytes": 5, "mime_type": "text/plain", "purpose": "user_data"}
    parts = f"/v1/uploads/{server.ask('POST', '/v1/uploads', upload).json['id']}/parts"
    contents = small_disk / "store.db-files" / "contents"
    before = sorted(contents.iterdir())
    ballast = fill(small_disk)
    refused = [
        send_file(server, "/v1/files", 5),
        send_file(server, "/v1/files", 3_000_000),
        send_file(server, parts, 5, field="data"),
        send_file(server, f"{container}/files", 3_000_000),
        server.ask("POST", f"{container}/files", {"file_id": file_id}),
        server.ask("POST", "/v1/uploads", upload),
    ]
    assert [read_error(response) for response in refused] == [FULL] * 6
    assert sorted(contents.iterdir()) == before
    ballast.unlink()
    wait_until(server, lambda: server.ask("GET", "/readyz").status == 200)
    accepted = [
        send_file(server, "/v1/files", 5),
        send_file(server, parts, 5, field="data"),
        send_file(server, f"{container}/files", 5),
        server.ask("POST", f"{container}/files", {"file_id": file_id}),
    ]
    assert [response.status for response in accepted] == [200] * 4
    assert "Traceback" not in server.log()


def test_full_disk_refuses_the_first_file_until_there_is_space(server: Victim, small_disk: Path) -> None:
    """The database of files does not exist yet."""
    with_file = {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]}
    ballast = fill(small_disk)
    refused = [
        send_file(server, "/v1/files", 5),
        create(server, **with_file),
        server.ask("GET", "/v1/files"),
    ]
    if importlib.util.find_spec("onnxruntime") is not None:  # without the extra search, vector stores are refused
        refused.append(server.ask("POST", "/v1/vector_stores", {"name": "x"}))
    assert [read_error(response) for response in refused] == [FULL] * len(refused)
    assert str(small_disk) not in "".join(response.body.decode() for response in refused)
    ballast.unlink()
    assert send_file(server, "/v1/files", 5).status == 200
    assert count_lines(server, "the database of files cannot be opened: ") == 1


def test_file_that_fills_the_disk_is_refused_and_removed(server: Victim, small_disk: Path) -> None:
    """The disk has room when the upload begins, but not for all of it."""
    container = f"/v1/containers/{server.ask('POST', '/v1/containers', {'name': 'x'}).json['id']}"
    assert send_file(server, "/v1/files", 5).status == 200
    refused = [send_file(server, "/v1/files", 8_000_000), send_file(server, f"{container}/files", 8_000_000)]
    assert [read_error(response) for response in refused] == [FULL] * 2
    assert server.ask("GET", "/readyz").status == 200
    assert create(server).status == 200
    assert server.ask("GET", f"{container}/files").json["data"] == []
    assert send_file(server, f"{container}/files", 1_000_000).status == 200
    assert "Traceback" not in server.log()


def test_limited_file_size_refuses_writes_until_it_is_raised(victim: StartVictim) -> None:
    """Needs no rights of a system administrator. SQLite reports an I/O error."""
    server = victim(script={"default": "Hi."})
    path = server.folder / "store.db"
    stored = {create(server).json["id"] for _ in range(3)}
    size = max(file.stat().st_size for file in server.folder.glob("store.db*"))
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, hard))
    unavailable = (503, "server_error", "store_unavailable", "1")
    refused = [create(server, input="x" * 200_000) for _ in range(3)]
    assert [read_error(response) for response in refused] == [unavailable] * 3

    def is_unready() -> bool:
        # A small write, such as that of the usage, may succeed at any time: then the server is ready.
        assert read_error(create(server, input="x" * 200_000)) == unavailable
        response = server.ask("GET", "/readyz")
        return response.status == 503 and read_error(response) == unavailable

    wait_until(server, is_unready)
    assert read_error(send_file(server, "/v1/files", 2 * size)) == unavailable
    assert server.ask("GET", "/healthz").status == 200
    changes = re.findall("cannot be written to: disk I/O error|works again", server.log())
    assert set(changes[::2]) == {"cannot be written to: disk I/O error"}
    assert set(changes[1::2]) <= {"works again"}
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
    wait_until(server, lambda: server.ask("GET", "/readyz").status == 200)
    stored |= {create(server).json["id"] for _ in range(3)}
    server.stop()
    assert stored <= read_ids(path)
