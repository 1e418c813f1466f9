"""Images by file id: two nodes that share nothing but a PostgreSQL database give them to their models."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

pytest.importorskip("asyncpg")

from antiphon.engine.files.loader import FileServiceLoader
from antiphon.protocol import codec
from antiphon.store.files.location import FileLocation
from antiphon.store.location import locate_store
from support.live_server import LiveServer, make_settings
from support.postgres_server import EmptySchema
from support.recording_backend import RecordingBackend

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 3000  # more than one piece in the database


class Node:
    def __init__(self, url: str) -> None:
        self.backend = RecordingBackend({"default": "A square."})
        files = FileServiceLoader(FileLocation(url=url))
        self.server = LiveServer({}, make_settings(), locate_store(url), backend=self.backend, files=files)
        self.client = self.server.client()

    def read_contents(self) -> list[Any]:
        """Return the contents of the user's messages that the model has read last."""
        items = json.loads(codec.encode(self.backend.turns[-1].items))
        return [item["content"] for item in items if item["role"] == "user"]


@pytest.fixture(scope="module")
def nodes(postgres_schema: EmptySchema) -> Iterator[list[Node]]:
    started = [Node(postgres_schema.url) for _ in range(2)]
    yield started
    for node in started:
        node.server.stop()
    postgres_schema.clear()


def make_input(file_id: str) -> Any:
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "file_id": file_id}]
    return [{"role": "user", "content": parts}]


def test_image_of_one_node_reaches_the_model_of_the_other(nodes: list[Node]) -> None:
    one, two = nodes
    file = one.client.files.create(file=("square.png", PNG), purpose="vision")
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}
    first = two.client.responses.create(model="scripted", input=make_input(file.id))
    assert first.output_text == "A square."
    question = [{"type": "input_text", "text": "What is this?"}, image]
    assert two.read_contents() == [question]
    # The history has the id of the file, so the first node loads the image again.
    one.client.responses.create(model="scripted", input="And its color?", previous_response_id=first.id)
    assert one.read_contents() == [question, [{"type": "input_text", "text": "And its color?"}]]
    (stored,) = one.server.ask("GET", f"/v1/responses/{first.id}/input_items").json["data"]
    assert [part.get("file_id") for part in stored["content"]] == [None, file.id]


def test_deleted_and_unsupported_images_are_refused_by_the_other_node(nodes: list[Node]) -> None:
    one, two = nodes
    turns = [len(node.backend.turns) for node in nodes]
    text = one.client.files.create(file=("square.png", b"no image"), purpose="vision")
    with pytest.raises(BadRequestError) as refused:
        two.client.responses.create(model="scripted", input=make_input(text.id))
    assert (refused.value.param, refused.value.type) == ("input[0].content[1].file_id", "invalid_request_error")
    file = one.client.files.create(file=("square.png", PNG), purpose="vision")
    assert two.client.files.delete(file.id).deleted
    with pytest.raises(NotFoundError) as missing:
        one.client.responses.create(model="scripted", input=make_input(file.id))
    assert missing.value.param == "input[0].content[1].file_id"
    assert [len(node.backend.turns) for node in nodes] == turns
