"""Citation markers become annotations, however the text is split into deltas."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from antiphon.protocol.content import FileCitation
from antiphon.stream.deltas import Annotate, Text
from antiphon.tools.hosted.file_search.citations import CitationFilter, Source

SOURCES = [Source("file-a", "a.txt"), Source("file-b", "b b.txt")]


def pass_through(pieces: list[str]) -> tuple[str, list[tuple[str, int]]]:
    """Return the text and the annotations as file id and index. Each annotation follows the text before it."""
    text_filter = CitationFilter(SOURCES)
    output = [delta for piece in pieces for delta in text_filter.feed(piece)] + list(text_filter.close())
    text, cited = "", []
    for delta in output:
        if isinstance(delta, Text):
            assert delta.text
            text += delta.text
        else:
            assert isinstance(delta, Annotate)
            assert isinstance(delta.annotation, FileCitation)
            assert delta.annotation.index == len(text)
            cited.append((delta.annotation.file_id, delta.annotation.index))
    return text, cited


@pytest.mark.parametrize(
    ("written", "text", "cited"),
    [
        ("No marker.", "No marker.", []),
        ("One【1】.", "One.", [("file-a", 3)]),
        ("One【1】【2】 two 【2】", "One two ", [("file-a", 3), ("file-b", 3), ("file-b", 8)]),
        ("Both【1, 2】.", "Both.", [("file-a", 4), ("file-b", 4)]),
        ("Named【b b.txt】, by id【file-a】.", "Named, by id.", [("file-b", 5), ("file-a", 12)]),
        ("With a name【2†b b.txt】.", "With a name.", [("file-b", 11)]),
        ("Wrong【3】【0】【99999999999999】【file-zzz】【4:0†source】.", "Wrong.", []),
        ("A heading: 【注意】 text.", "A heading: 【注意】 text.", []),
        ("Open 【1 and no end", "Open 【1 and no end", []),
        ("Open 【a\nnext line 【1】.", "Open 【a\nnext line .", [("file-a", 18)]),
        ("Twice 【【1】.", "Twice 【.", [("file-a", 7)]),
        ("Closed only】.", "Closed only】.", []),
    ],
)
def test_markers_become_annotations(written: str, text: str, cited: list[tuple[str, int]]) -> None:
    assert pass_through([written]) == (text, cited)
    assert pass_through(list(written)) == (text, cited)


@example(["【", "1", "\n", "】"])
@example(["【", "1†" + "x" * 254, "】"])
@given(
    st.lists(
        st.sampled_from(["【", "】", "1", "2", "7", ",", "†", "x", "\n", " ", "【1】", "file-a", "注"]), max_size=40
    )
)
def test_split_of_the_text_does_not_change_the_result(pieces: list[str]) -> None:
    assert pass_through(pieces) == pass_through(["".join(pieces)])


def test_long_text_in_brackets_is_not_held_back() -> None:
    text_filter = CitationFilter(SOURCES)
    output = text_filter.feed("【" + "a" * 300)
    assert output == [Text("【" + "a" * 300)]
