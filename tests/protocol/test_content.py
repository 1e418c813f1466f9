from typing import Any

import pytest

from antiphon.protocol.codec import encode
from antiphon.protocol.content import (
    PARTS,
    InputImage,
    InputText,
    LogProb,
    OutputText,
    PromptCacheBreakpoint,
    Refusal,
    Text,
    TopLogProb,
    UrlCitation,
    extract_text,
)
from antiphon.protocol.unions import Unknown


@pytest.mark.parametrize(
    ("part", "raw"),
    [
        (OutputText("hi"), b'{"type":"output_text","text":"hi","annotations":[]}'),
        (OutputText("hi", logprobs=[]), b'{"type":"output_text","text":"hi","annotations":[],"logprobs":[]}'),
        (
            OutputText("", [UrlCitation("u", "t", 0, 1)]),
            (
                b'{"type":"output_text","text":"","annotations":[{"type":"url_citation","url":"u","title":"t",'
                b'"start_index":0,"end_index":1}]}'
            ),
        ),
        (
            LogProb("a", -1.5, top_logprobs=[TopLogProb("b", -2.0, [98])]),
            b'{"token":"a","logprob":-1.5,"bytes":[],"top_logprobs":[{"token":"b","logprob":-2.0,"bytes":[98]}]}',
        ),
        (InputImage(file_id="f"), b'{"type":"input_image","file_id":"f"}'),
        (
            InputText("hi", PromptCacheBreakpoint("explicit")),
            b'{"type":"input_text","text":"hi","prompt_cache_breakpoint":{"mode":"explicit"}}',
        ),
    ],
)
def test_part_is_encoded_with_required_fields(part: Any, raw: bytes) -> None:
    assert encode(part) == raw


def test_null_annotations_and_logprobs_are_accepted() -> None:
    part = PARTS.decode(b'{"type":"output_text","text":"hi","annotations":null,"logprobs":null}')
    assert part == OutputText("hi")


def test_output_text_shares_the_given_annotations_list() -> None:
    annotations: list[Any] = []
    part = OutputText("hi", annotations)
    annotations.append(Unknown(b'{"type":"acme:x"}'))
    assert part.annotations == annotations


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ([], ""),
        ([InputText("a"), Text("b"), OutputText("c"), Refusal("d")], "abcd"),
        ([InputImage(file_id="f"), Unknown(b'{"type":"acme:x","text":"no"}'), InputText("a")], "a"),
    ],
)
def test_text_of_content_is_joined_from_parts(content: Any, text: str) -> None:
    assert extract_text(content) == text
