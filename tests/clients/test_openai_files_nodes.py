"""Files, uploads and vector stores on PostgreSQL with the official `openai` client: two nodes share all of them."""

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import NotFoundError, OpenAI
from openai.types.responses import Response

from support.crashing_server import KillableServer, wait_until

pytest.importorskip("onnxruntime")

FILES = 12
SCRIPT = {
    "native_tools": ["function"],
    "rules": [
        {"user": "Which room", "last_item": "function_call_output", "answers": ["Room 3 has that code【1】."]},
        {
            "user": "Which room",
            "answers": [[{"tool_call": {"name": "file_search", "arguments": {"queries": ["code of room 3"]}}}]],
        },
    ],
    "default": "You said: {input}",
}


class Node:
    def __init__(self, folder: Path, store: str) -> None:
        folder.mkdir()
        keys = [base64.b64encode(bytes(32)).decode()]
        self.server = KillableServer(folder, SCRIPT, store=store, background_lease_seconds=1.0, seal_keys=keys)
        self.client = OpenAI(base_url=f"http://{self.server.address}/v1", api_key="none", timeout=60, max_retries=0)

    def kill(self) -> None:
        with contextlib.suppress(ValueError):  # killed before
            self.server.kill()
        self.client.close()


@pytest.fixture
def nodes(tmp_path: Path, postgres_url: str) -> Iterator[list[Node]]:
    started = [Node(tmp_path / f"node{number}", postgres_url) for number in range(2)]
    yield started
    for node in started:
        node.kill()


def test_nodes_share_files_and_take_over_the_indexing(nodes: list[Node]) -> None:
    one, two = nodes[0].client, nodes[1].client
    content = bytes(range(256)) * 5000  # more than one piece
    file = one.files.create(file=("data.bin", content), purpose="batch")
    assert two.files.retrieve(file.id) == file
    assert two.files.content(file.id).read() == content
    assert two.files.delete(file.id).deleted
    with pytest.raises(NotFoundError):
        one.files.content(file.id)

    upload = one.uploads.create(bytes=10, filename="parts.txt", mime_type="text/plain", purpose="user_data")
    parts = [
        client.uploads.parts.create(upload.id, data=data).id for client, data in ((one, b"Hello"), (two, b" node"))
    ]
    completed = two.uploads.complete(upload.id, part_ids=parts)
    assert completed.file is not None
    assert one.files.retrieve(completed.file.id).bytes == 10

    texts = [f"The code of room {number} is unique{number}x." for number in range(FILES)]
    ids = [
        one.files.create(file=(f"{number}.txt", text.encode()), purpose="assistants").id
        for number, text in enumerate(texts)
    ]
    store = one.vector_stores.create(name="rooms")
    batch = one.vector_stores.file_batches.create(store.id, file_ids=ids)

    def count_completed() -> int:
        return two.vector_stores.file_batches.retrieve(batch.id, vector_store_id=store.id).file_counts.completed

    wait_until(lambda: count_completed() >= 2)
    nodes[0].kill()
    wait_until(lambda: count_completed() == FILES)
    shown = two.vector_stores.retrieve(store.id)
    assert (shown.status, shown.file_counts.completed, shown.file_counts.failed) == ("completed", FILES, 0)
    found = two.vector_stores.search(store.id, query="unique7x", max_num_results=50).data
    assert (found[0].filename, len(found)) == ("7.txt", FILES)

    response = two.responses.create(
        model="scripted",
        input="Which room has the code?",
        tools=[{"type": "file_search", "vector_store_ids": [store.id]}],
        include=["file_search_call.results"],
    )
    call, message = response.output[0], response.output[-1]
    assert call.type == "file_search_call"
    assert call.results is not None
    assert call.results[0].filename == "3.txt"
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    assert [each.type for each in message.content[0].annotations] == ["file_citation"]
    # This model reads files. An unknown id is refused before it is called.
    assert ask_about_file(two, completed.file.id).status == "completed"
    with pytest.raises(NotFoundError):
        ask_about_file(two, file.id)


def ask_about_file(client: OpenAI, file_id: str) -> Response:
    return client.responses.create(
        model="scripted", input=[{"role": "user", "content": [{"type": "input_file", "file_id": file_id}]}]
    )
