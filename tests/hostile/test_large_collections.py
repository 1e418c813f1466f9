"""Collections of the largest size: a conversation of 100,000 items, and batches of 2,000 files."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from support.crashing_server import wait_until
from support.loop_blocks import MAX_BLOCK
from support.victim import Victim

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

StartVictim = Callable[..., Victim]


def test_conversation_of_100000_items_is_paged_and_continued(victim: StartVictim) -> None:
    server = victim(script={"default": "Hello."})
    conversation = server.ask("POST", "/v1/conversations", {}).json["id"]
    for part in range(6):
        items = [{"role": "user", "content": f"{part} {number}"} for number in range(17_000)]
        body = {"model": "scripted", "conversation": conversation, "input": items}
        assert server.ask("POST", "/v1/responses", body).status == 200
    path = f"/v1/conversations/{conversation}/items"
    page = server.ask("GET", f"{path}?limit=100&order=asc").json
    assert [item["content"][0]["text"] for item in page["data"]] == [f"0 {number}" for number in range(100)]
    page = server.ask("GET", f"{path}?limit=100&order=asc&after={page['last_id']}").json
    assert (page["data"][0]["content"][0]["text"], page["has_more"]) == ("0 100", True)
    for query in (
        "after=%00",
        "after=" + "x" * 50_000,
        "after=msg_",
        "limit=0",
        "limit=99999999999999999999",
        "order=",
    ):
        assert server.ask("GET", f"{path}?{query}").status == 400
    body = {"model": "scripted", "conversation": conversation, "input": "hi"}
    assert server.ask("POST", "/v1/responses", body).status == 200
    assert server.ask("DELETE", f"/v1/conversations/{conversation}").status == 200
    assert server.peak_mb() < 400
    assert server.longest_block() < MAX_BLOCK, server.log()


class EmbeddingHandler(BaseHTTPRequestHandler):
    """Answers with the same vector for each text."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        data = [{"index": index, "embedding": [1.0, 0.5]} for index in range(len(texts))]
        body = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def embeddings() -> Iterator[str]:
    """The URL of a server of embeddings."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), EmbeddingHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def upload(server: Victim, name: str, content: bytes) -> str:
    fields = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n--b\r\n'
    head = f'{fields}Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    file_id: str = server.ask("POST", "/v1/files", head.encode() + content + b"\r\n--b--\r\n", headers=headers).json[
        "id"
    ]
    return file_id


def test_batches_with_repeated_deleted_and_poisoned_files_are_indexed(victim: StartVictim, embeddings: str) -> None:
    pytest.importorskip("numpy")
    pytest.importorskip("pypdfium2")
    server = victim(script={"default": "Hello."}, embeddings={"base_url": embeddings, "model": "m"})
    files = [upload(server, f"{number}.txt", b"Cats %d." % number) for number in range(40)]
    poison = upload(server, "a.pdf", b"%PDF-1.4\nstream\n" + b"(" * 1_000_000 + b"\ntrailer << /Root 1 0 R >>\n%%EOF")
    store = server.ask("POST", "/v1/vector_stores", {}).json["id"]
    path = f"/v1/vector_stores/{store}"

    def attach(file_ids: list[str]) -> tuple[int, int]:
        answer = server.ask("POST", f"{path}/file_batches", {"file_ids": file_ids})
        return answer.status, answer.json.get("file_counts", {}).get("total", 0)

    before = server.rss_mb()
    assert attach(files * 50) == (200, 40)
    assert attach(files * 50 + files[:1]) == (400, 0)
    assert attach(files[:1] * 500) == (200, 1)
    assert [attach([poison]) for _ in range(10)] == [(200, 1)] * 10
    assert {server.ask("DELETE", f"/v1/files/{each}").status for each in files[20:]} == {200}
    wait_until(lambda: server.ask("GET", path).json["file_counts"]["in_progress"] == 0)
    counts = server.ask("GET", path).json["file_counts"]
    assert counts == {"in_progress": 0, "completed": 20, "failed": 1, "cancelled": 0, "total": 21}
    assert server.peak_mb() < before + 80
    assert "ended the process that read it" not in server.log()
    assert "Traceback" not in server.log()
