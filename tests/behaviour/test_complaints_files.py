"""Complaint K82: a file reaches the model on every backend, or is rejected with its path."""

from typing import Any

import pytest

from behaviour.upstreams import ask_through
from behaviour.wire import Json

NOTE = "data:text/plain;base64,aGk="
PAPER = "data:application/pdf;base64,JVBERi0="
INPUT = [
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "Read these."},
            {"type": "input_file", "filename": "note.txt", "file_data": NOTE},
            {"type": "input_file", "filename": "paper.pdf", "file_data": PAPER},
        ],
    }
]


def document(title: str, source: str, media_type: str, data: str) -> Json:
    return {"type": "document", "source": {"type": source, "media_type": media_type, "data": data}, "title": title}


@pytest.mark.parametrize(
    ("kind", "field", "read"),
    [
        (
            "anthropic_messages",
            "messages",
            [
                {"type": "text", "text": "Read these."},
                document("note.txt", "text", "text/plain", "hi"),
                document("paper.pdf", "base64", "application/pdf", "JVBERi0="),
            ],
        ),
        (
            "chat_completions",
            "messages",
            [
                {"type": "text", "text": "Read these."},
                {"type": "text", "text": "[File: note.txt]\nhi"},
                {"type": "file", "file": {"filename": "paper.pdf", "file_data": PAPER}},
            ],
        ),
        ("responses", "input", INPUT[0]["content"]),
    ],
)
async def test_pain_k_82_file_reaches_the_model_on_every_backend(kind: str, field: str, read: list[Json]) -> None:
    """ogx-ai/ogx#4206, vllm-project/vllm#46562, praxis-proxy/ai#397"""
    answer, sent = await ask_through(kind, INPUT)
    assert (answer.status, [message["content"] for body in sent for message in body[field]]) == (200, [read])


@pytest.mark.parametrize(
    ("kind", "file", "param", "status", "code"),
    [
        ("chat_completions", {"file_id": "file_1"}, "input[0].content[0].file_id", 404, None),
        ("chat_completions", {"file_url": "https://a.invalid/a.pdf"}, "input[0].content[0].file_url", 400,
         "invalid_value"),
        ("anthropic_messages", {"file_data": "data:application/zip;base64,UEs="}, "input[0].content[0].file_data",
         400, "unsupported_file"),
        ("responses", {"filename": "a.txt"}, "input[0].content[0]", 400, "invalid_value"),
    ],
)  # fmt: skip
async def test_pain_k_82_unsupported_file_is_rejected_with_its_path(
    kind: str, file: dict[str, Any], param: str, status: int, code: str | None
) -> None:
    """cloud-apim/otoroshi-llm-extension#186: the file was dropped without an error."""
    answer, sent = await ask_through(kind, [{"role": "user", "content": [{"type": "input_file"} | file]}])
    error = answer.json["error"]
    assert (answer.status, error["param"], error["code"], sent) == (status, param, code, [])
