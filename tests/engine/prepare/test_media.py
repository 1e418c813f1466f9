"""Files of a turn for models that read no files, and files by URL."""

import base64
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from antiphon.config.limits import FileLimits
from antiphon.engine.engine import Engine
from antiphon.engine.files.loader import FileServiceLoader
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.media import find_file_type, find_image_type
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.store.memory.store import MemoryStore
from antiphon.upstream.addresses import OutboundRules
from support.documents import make_pdf
from support.file_server import FileServer
from support.recording_backend import RecordingBackend

BINARY = base64.b64encode(bytes(range(256))).decode()
TEXT = base64.b64encode(b"Hello.").decode()


async def ask(part: dict[str, Any], *, lacks: list[str], limits: FileLimits | None = None) -> tuple[Any, list[str]]:
    """Return the content that the model reads, and the warnings."""
    backend = RecordingBackend({"default": "ok", "lacks": lacks})
    policy = Policy(outbound=OutboundRules.parse(["127.0.0.1"]))
    engine = Engine(
        backends={"test": backend}, store=MemoryStore(), policy=policy, files=FileServiceLoader(limits=limits)
    )
    await engine.start()
    try:
        body = codec.encode({"model": "scripted", "input": [{"role": "user", "content": [part]}]})
        run = await engine.create(codec.decode_request(body).body, project="p")
        await run.drain()
        return json.loads(codec.encode(backend.turns[-1].items))[0]["content"], list(run.warnings)
    finally:
        await engine.close()


async def test_text_of_a_file_is_given_to_a_model_that_reads_no_files() -> None:
    part = {"type": "input_file", "filename": "note.txt", "file_data": f"data:text/plain;base64,{TEXT}"}
    content, warnings = await ask(part, lacks=["files"])
    assert content == [{"type": "input_text", "text": "[File: note.txt]\nHello."}]
    assert warnings == ["input[0].content[0]: the model cannot read files, so it gets the text of 'note.txt'"]


async def test_text_of_a_pdf_is_extracted() -> None:
    pytest.importorskip("pypdfium2")
    data = base64.b64encode(make_pdf("From a PDF")).decode()
    content, _ = await ask({"type": "input_file", "filename": "a.pdf", "file_data": data}, lacks=["files"])
    assert content == [{"type": "input_text", "text": "[File: a.pdf]\nFrom a PDF"}]


async def test_file_data_is_not_changed_for_a_capable_model() -> None:
    part = {"type": "input_file", "filename": "note.txt", "file_data": TEXT}
    assert await ask(part, lacks=[]) == ([part], [])


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        ({"filename": "a.bin", "file_data": BINARY}, "file_data", "unsupported_file"),
        ({"filename": "a.txt", "file_data": "!!!"}, "file_data", "invalid_value"),
        ({"file_url": "http://169.254.169.254/latest"}, "file_url", "invalid_value"),
    ],
)
async def test_unreadable_file_is_refused_with_its_path(part: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await ask({"type": "input_file"} | part, lacks=["files"])
    assert (caught.value.param, caught.value.code) == (f"input[0].content[0].{param}", code)


@pytest.fixture
def files() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_file_by_url_is_fetched_and_inlined(files: FileServer) -> None:
    files.files["/notes/a%20note.txt"] = b"Hello."
    content, _ = await ask({"type": "input_file", "file_url": f"{files.url}/notes/a%20note.txt"}, lacks=[])
    assert content == [{"type": "input_file", "filename": "a note.txt", "file_data": f"data:text/plain;base64,{TEXT}"}]


async def test_missing_and_too_large_urls_are_refused(files: FileServer) -> None:
    files.files["/large.txt"] = b"x" * 2000
    limits = FileLimits(max_input_bytes=1000)
    for name in ("missing.txt", "large.txt"):
        with pytest.raises(InvalidRequest) as caught:
            await ask({"type": "input_file", "file_url": f"{files.url}/{name}"}, lacks=[], limits=limits)
        assert (caught.value.param, caught.value.code) == ("input[0].content[0].file_url", "invalid_value")


def test_media_types_follow_the_content() -> None:
    assert find_image_type(b"\xff\xd8\xff\xe0") == "image/jpeg"
    assert find_image_type(b"RIFF\0\0\0\0WEBPVP8 ") == "image/webp"
    assert find_image_type(b"text") is None
    assert find_file_type("a", b"%PDF-1.7") == "application/pdf"
    assert find_file_type("a.md", b"# Title") == "text/markdown"
    assert find_file_type("a.py", b"x = 1") == "text/x-python"
    assert find_file_type("a.unknown", b"text") == "text/plain"
    assert find_file_type("a.unknown", b"\0\xff") == "application/octet-stream"
