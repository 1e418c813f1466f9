"""Free text decoded from function arguments."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from antiphon.engine.serve.tool_emulation.freeform import FreeformReader, strip_fence, unwrap_json

anything = st.text(st.characters() | st.sampled_from('"\\/\n\t\ud83d\ude00\udc00{}'), max_size=40)


def read(fragments: list[str]) -> list[str]:
    reader = FreeformReader()
    return [*map(reader.feed, fragments), reader.close()]


def split(text: str, cuts: list[int]) -> list[str]:
    positions = sorted({min(cut, len(text)) for cut in cuts})
    return [text[start:end] for start, end in zip([0, *positions], [*positions, len(text)], strict=True)]


@given(anything, st.lists(st.integers(0, 200), max_size=20), st.booleans())
@example("\ud83d\ude00", [12, 13, 14, 15, 16, 17, 18, 19, 20], True)
def test_reader_decodes_any_text_in_any_fragments(text: str, cuts: list[int], escaped: bool) -> None:
    text = text if escaped else text.encode(errors="replace").decode()
    written = json.dumps({"input": text}, ensure_ascii=escaped)
    expected = json.loads(written)["input"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert "".join(read(split(written, cuts))) == expected


def test_text_is_returned_while_it_streams() -> None:
    assert read(['{"inp', 'ut": "*** Beg', "in Pa", "tch\\n*** Add File: x", '"}']) == [
        "",
        "*** Beg",
        "in Pa",
        "tch\n*** Add File: x",
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("*** Begin Patch\n", "*** Begin Patch\n"),
        ('{"patch": "*** Begin Patch"}', "*** Begin Patch"),
        ('{"why": "so", "input": "x"}', "x"),
        ('"x"', "x"),
        ("{}", ""),
        ('{"a": 1}', '{"a": 1}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ("{ not json", "{ not json"),
        ('{"input": "a\\d"}', "a\\d"),
        ('{"input": "cut o', "cut o"),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ("", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 100])
def test_other_forms_of_the_input_are_decoded(written: str, text: str, size: int) -> None:
    assert "".join(read([written[at : at + size] for at in range(0, len(written), size)])) == text


def test_json_and_code_fences_are_removed() -> None:
    assert (
        unwrap_json('{"input": "x"}'),
        unwrap_json("x"),
        strip_fence("```lark\nx\ny\n```\n"),
        strip_fence("a ```x```"),
    ) == (
        "x",
        "x",
        "x\ny",
        "a ```x```",
    )
