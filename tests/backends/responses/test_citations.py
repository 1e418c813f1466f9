"""Citations of web pages that an upstream sends without a title or without indexes."""

import json
from typing import Any

import pytest

from antiphon.backends.responses.reader import ResponsesReader
from antiphon.protocol.content import UrlCitation
from antiphon.stream.deltas import Annotate, Text
from antiphon.stream.sse import SseMessage

CITED: dict[str, Any] = {"type": "url_citation", "url": "https://a.example"}


@pytest.mark.parametrize("fields", [{}, {"title": None, "start_index": None, "end_index": None}])
def test_citation_with_only_a_url_is_completed(fields: dict[str, None]) -> None:
    annotation = CITED | fields
    part = {"type": "output_text", "text": "a", "annotations": [annotation, annotation]}
    reader = ResponsesReader()
    emitted = [
        delta
        for event in (
            {"type": "response.output_text.delta", "delta": "a"},
            {"type": "response.output_text.annotation.added", "annotation": annotation},
            {"type": "response.content_part.done", "part": part},
        )
        for delta in reader.read(SseMessage(None, json.dumps(event).encode()))
    ]
    citation = UrlCitation("https://a.example", "", 0, 0)
    assert emitted == [Text("a"), Annotate(citation), Annotate(citation)]
