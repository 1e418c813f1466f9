"""What content parts become."""

import base64
from typing import Any

import pytest

from antiphon.backends.anthropic_messages.messages import write_parts, write_speech
from antiphon.errors import InvalidRequest
from antiphon.protocol import content
from antiphon.protocol.unions import Unknown

PDF = base64.b64encode(b"%PDF-1.7 and so on").decode()
TEXT = base64.b64encode("Grüße".encode()).decode()


def write(part: Any) -> Any:
    (block,) = write_parts([part], "input[0].content")
    return block


@pytest.mark.parametrize(
    ("part", "source"),
    [
        (
            content.InputImage(image_url="data:image/png;base64,AAAA"),
            {"type": "base64", "media_type": "image/png", "data": "AAAA"},
        ),
        (
            content.InputImage(image_url="DATA:image/jpg;name=x;base64,AAAA"),
            {"type": "base64", "media_type": "image/jpeg", "data": "AAAA"},
        ),
        (
            content.InputImage(image_url="https://example.com/a.png"),
            {"type": "url", "url": "https://example.com/a.png"},
        ),
        (content.ComputerScreenshot(file_id="file_1"), {"type": "file", "file_id": "file_1"}),
    ],
)
def test_an_image_is_shown(part: Any, source: Any) -> None:
    assert write(part) == {"type": "image", "source": source}


@pytest.mark.parametrize(
    ("part", "block"),
    [
        (
            content.InputFile(file_data=f"data:application/pdf;base64,{PDF}", filename="a.pdf"),
            {
                "type": "document",
                "title": "a.pdf",
                "source": {"type": "base64", "media_type": "application/pdf", "data": PDF},
            },
        ),
        (
            content.InputFile(file_data=PDF),
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}},
        ),
        (
            content.InputFile(file_data=TEXT, filename="notes.md"),
            {
                "type": "document",
                "title": "notes.md",
                "source": {"type": "text", "media_type": "text/plain", "data": "Grüße"},
            },
        ),
        (
            content.InputFile(file_data=TEXT),
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Grüße"}},
        ),
        (
            content.InputFile(file_url="https://example.com/a.pdf"),
            {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}},
        ),
        (
            content.InputFile(file_id="file_1"),
            {"type": "document", "source": {"type": "file", "file_id": "file_1"}},
        ),
        (
            content.InputFile(file_data="AAAA", filename="a.png"),
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        ),
    ],
)
def test_a_file_is_given_as_a_document(part: Any, block: Any) -> None:
    assert write(part) == block


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        (content.InputImage(image_url="data:image/svg+xml;base64,AAAA"), ".image_url", "unsupported_image_media_type"),
        (content.InputImage(image_url="file:///etc/passwd"), ".image_url", "invalid_image_url"),
        (content.InputImage(), "", "invalid_value"),
        (content.InputFile(), "", "invalid_value"),
        (content.InputFile(file_data="not base64"), ".file_data", "invalid_value"),
        (content.InputFile(file_data="\x80"), ".file_data", "invalid_value"),
        (content.InputFile(file_data="AAAA", filename="a.docx"), ".file_data", "unsupported_file"),
        (content.InputFile(file_data="/w==", filename="a.txt"), ".file_data", "unsupported_file"),
        (content.InputAudio(content.AudioData("AAAA", "wav")), "", "unsupported_content"),
        (content.InputVideo("https://example.com/a.mp4"), "", "unsupported_content"),
    ],
)
def test_what_the_model_cannot_take_is_refused_by_place(part: Any, param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        write(part)
    assert (caught.value.param, caught.value.code) == (f"input[0].content[0]{param}", code)


def test_an_unknown_part_is_told_as_json() -> None:
    assert write(Unknown(b'{"type":"acme:smell"}')) == {"type": "text", "text": '{"type":"acme:smell"}'}


def test_the_assistants_own_words_are_text_alone() -> None:
    said = write_speech([content.OutputText("Yes"), content.Refusal("No"), content.InputImage(image_url="https://x/y")])
    assert [block["text"] for block in said] == ["Yes", "No", '{"type":"input_image","image_url":"https://x/y"}']
