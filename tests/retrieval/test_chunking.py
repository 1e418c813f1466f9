"""Chunks cover the text, overlap as requested, and have windows that fit the model."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.retrieval.chunking import MAX_TOKEN_CHARACTERS, WINDOW_TOKENS, ChunkedText, EstimatingTokenizer

WORDS = " ".join(f"word{number}" for number in range(3000))


@given(
    st.lists(st.sampled_from(["word", "longerword", "漢字", "!", "\n", " ", "a", " " * 200]), max_size=600),
    st.integers(100, 400),
    st.integers(0, 50),
)
def test_chunks_cover_the_whole_text(pieces: list[str], max_tokens: int, overlap_percent: int) -> None:
    text = "".join(pieces)
    chunked = ChunkedText(text, EstimatingTokenizer())
    chunks = list(chunked.list_chunks(max_tokens, max_tokens * overlap_percent // 100))
    end = 0
    for chunk in chunks:
        assert chunk.starts_at <= end
        assert text[chunk.starts_at : chunk.starts_at + len(chunk.text)] == chunk.text
        end = chunk.starts_at + len(chunk.text)
    assert end == len(text)
    assert {token for chunk in chunks for window in chunk.windows for token in range(*window)} == set(
        range(len(chunked))
    )


def test_chunks_begin_at_words_and_overlap() -> None:
    chunks = list(ChunkedText(WORDS, EstimatingTokenizer()).list_chunks(800, 400))
    assert all(WORDS[chunk.starts_at - 1] == " " for chunk in chunks[1:])
    shared = set(chunks[0].windows) & set(chunks[1].windows)
    assert len(shared) == 2
    assert all(end - start <= WINDOW_TOKENS + 20 for chunk in chunks for start, end in chunk.windows)


def test_text_without_overlap_is_split_once() -> None:
    chunks = list(ChunkedText(WORDS, EstimatingTokenizer()).list_chunks(500, 0))
    assert "".join(chunk.text for chunk in chunks) == WORDS


def test_short_text_is_one_chunk() -> None:
    (chunk,) = ChunkedText("One short text.", EstimatingTokenizer()).list_chunks(800, 400)
    assert (chunk.text, chunk.windows) == ("One short text.", [(0, 4)])


class WordTokenizer:
    """Takes each word as one token, like a tokenizer that does not know it."""

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        starts = [word.start() for word in re.finditer(r"\S+", text)]
        return [7] * len(starts), starts


@pytest.mark.parametrize("text", ["z" * 300_000, "one" + " " * 300_000 + "two", "one " + "z" * 300_000 + " two"])
def test_long_word_and_long_space_do_not_make_a_chunk_larger(text: str) -> None:
    chunked = ChunkedText(text, WordTokenizer())
    chunks = list(chunked.list_chunks(100, 0))
    assert "".join(chunk.text for chunk in chunks) == text
    assert max(len(chunk.text) for chunk in chunks) <= 100 * MAX_TOKEN_CHARACTERS
    assert set(chunked.ids) == {7}
