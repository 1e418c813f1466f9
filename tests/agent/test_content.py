"""Images and files in the task of a run, and in results of tools."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon import FileInput, ImageInput, InvalidRequest, tool, user_message
from antiphon.ledger import Ledger
from support.scripted_model import ScriptedModel, call, outputs_of

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
PNG_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
NOTES = FileInput.from_bytes(b"Bern", filename="notes.txt")


async def test_task_of_texts_images_and_files_is_one_message(scripted: ScriptedModel, tmp_path: Path) -> None:
    (tmp_path / "photo.bin").write_bytes(PNG)
    (tmp_path / "report.pdf").write_bytes(b"%PDF-1.7")
    scripted.set_answers("A photo.")
    parts = ["What is it?", ImageInput.from_path(tmp_path / "photo.bin", detail="low"), "And this?"]
    outcome = await scripted.agent().run([*parts, FileInput.from_path(tmp_path / "report.pdf")])
    assert outcome.text == "A photo."
    assert scripted.sent[0]["input"] == [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is it?"},
                {"type": "input_image", "image_url": PNG_URL, "detail": "low"},
                {"type": "input_text", "text": "And this?"},
                {
                    "type": "input_file",
                    "filename": "report.pdf",
                    "file_data": f"data:application/pdf;base64,{base64.b64encode(b'%PDF-1.7').decode()}",
                },
            ],
        }
    ]


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        (ImageInput(image_url=PNG_URL), [{"type": "input_image", "image_url": PNG_URL, "detail": "auto"}]),
        (NOTES, [{"type": "input_file", "filename": "notes.txt", "file_data": NOTES.file_data}]),
        (
            ["Bern:", ImageInput(image_url=PNG_URL, detail="low"), {"degrees": 18}],
            [
                {"type": "input_text", "text": "Bern:"},
                {"type": "input_image", "image_url": PNG_URL, "detail": "low"},
                {"type": "input_text", "text": '{"degrees":18}'},
            ],
        ),
    ],
)
async def test_images_and_files_of_a_tool_are_parts_of_its_output(
    in_process: ScriptedModel, ledger: Ledger, result: Any, parts: list[dict[str, Any]]
) -> None:
    @tool
    def look() -> Any:
        """Look."""
        return result

    in_process.set_answers([call("look")], "A photo.")
    outcome = await in_process.agent(tools=[look]).run("Go.", ledger=ledger)
    assert (outcome.kind, outputs_of(in_process.sent[1])) == ("final", [("call_1", parts)])


async def test_single_image_is_a_task(in_process: ScriptedModel) -> None:
    in_process.set_answers("A cat.")
    await in_process.agent().run(ImageInput.from_url("https://example.com/cat.png"))
    part = {"type": "input_image", "image_url": "https://example.com/cat.png", "detail": "auto"}
    assert in_process.sent[0]["input"] == [{"role": "user", "content": [part]}]


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp"),
    ],
)
def test_media_type_of_an_image_is_that_of_its_contents(data: bytes, media_type: str) -> None:
    url = ImageInput.from_bytes(data).image_url
    assert url == f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def test_uploaded_and_remote_files_are_parts() -> None:
    message = user_message(
        ImageInput.from_id("file_1"),
        FileInput.from_id("file_2"),
        FileInput.from_url("https://example.com/a.pdf"),
        FileInput.from_bytes(b"a,b\n", filename="table.unknown"),
        ImageInput.from_bytes(b"BM", media_type="image/bmp"),
    )
    assert message["content"] == [
        {"type": "input_image", "file_id": "file_1", "detail": "auto"},
        {"type": "input_file", "file_id": "file_2"},
        {"type": "input_file", "file_url": "https://example.com/a.pdf"},
        {
            "type": "input_file",
            "filename": "table.unknown",
            "file_data": "data:application/octet-stream;base64,YSxiCg==",
        },
        {"type": "input_image", "image_url": "data:image/bmp;base64,Qk0=", "detail": "auto"},
    ]


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: ImageInput.from_bytes(b"text"), "data"),
        (lambda: FileInput.from_bytes(b"", filename="a.txt"), "data"),
        (lambda: ImageInput.from_url("cat.png"), "url"),
        (ImageInput, "image_url"),
        (lambda: ImageInput.from_id("file_1", detail="huge"), "detail"),
        (lambda: FileInput(file_data="data:,x"), "filename"),
        (lambda: FileInput(file_id="file_1", file_url="https://example.com"), "file_data"),
        (user_message, "content"),
        (lambda: user_message("a", 5), "content[1]"),
    ],
    ids=range(9),
)
def test_invalid_content_is_refused(make: Callable[[], Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert refused.value.param == param
