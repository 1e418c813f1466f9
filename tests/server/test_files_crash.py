"""Indexing continues after the server is killed."""

import http.client
import json
import time
from pathlib import Path
from typing import Any

import pytest

from support.crashing_server import TIMEOUT, KillableServer

pytest.importorskip("onnxruntime")

FILES = 50


def upload(server: KillableServer, name: str, content: str) -> str:
    body = (
        '--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n--X\r\n'
        f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n{content}\r\n--X--\r\n'
    )
    connection = http.client.HTTPConnection(server.address, timeout=TIMEOUT)
    connection.request("POST", "/v1/files", body, {"Content-Type": "multipart/form-data; boundary=X"})
    file_id: str = json.loads(connection.getresponse().read())["id"]
    connection.close()
    return file_id


def wait_for_counts(server: KillableServer, path: str, completed: int) -> dict[str, Any]:
    """Return the counts of a batch when so many files are complete."""
    deadline = time.monotonic() + TIMEOUT
    counts: dict[str, Any] = {}
    while time.monotonic() < deadline:
        counts = server.ask("GET", path)["file_counts"]
        if counts["completed"] + counts["failed"] >= completed:
            return counts
    raise AssertionError(f"the files are not indexed in {TIMEOUT} seconds: {counts}")


def test_killed_server_continues_to_index_all_files(tmp_path: Path) -> None:
    server = KillableServer(tmp_path, {})
    try:
        # The same word is in one file only, so a search shows that its chunks are there once.
        ids = [upload(server, f"{index}.txt", f"The code of room {index} is unique{index}x.") for index in range(FILES)]
        store = server.ask("POST", "/v1/vector_stores", {"name": "rooms"})["id"]
        batch = server.ask("POST", f"/v1/vector_stores/{store}/file_batches", {"file_ids": ids})["id"]
        path = f"/v1/vector_stores/{store}/file_batches/{batch}"
        counts = wait_for_counts(server, path, 5)
        assert counts["total"] == FILES
        server.kill()
        server = KillableServer(tmp_path, {})
        counts = wait_for_counts(server, path, FILES)
        assert counts == {"in_progress": 0, "completed": FILES, "failed": 0, "cancelled": 0, "total": FILES}
        shown = server.ask("GET", f"/v1/vector_stores/{store}")
        assert (shown["status"], shown["file_counts"]) == ("completed", counts)
        for index in (0, 20, FILES - 1):
            body = {"query": f"unique{index}x", "max_num_results": 50}
            found = server.ask("POST", f"/v1/vector_stores/{store}/search", body)["data"]
            assert (found[0]["filename"], len(found)) == (f"{index}.txt", FILES)
    finally:
        server.kill()
