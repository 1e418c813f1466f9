"""Reasoning between tags at the beginning of an answer."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.chat_completions.text import ThinkingSplitter


def split(pieces: list[str], *, thinking: bool = False) -> tuple[str, str]:
    splitter = ThinkingSplitter(thinking=thinking)
    splits = [splitter.feed(piece) for piece in pieces] + [splitter.close()]
    return "".join(each.reasoning for each in splits), "".join(each.text for each in splits)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Hello", ("", "Hello")),
        ("", ("", "")),
        ("  \n", ("", "  \n")),
        ("<think>Hm.</think>Yes", ("Hm.", "Yes")),
        ("\n<think>\n Hm. \n</think>\n\n Yes \n", ("Hm.", "Yes \n")),
        ("<think></think>Yes", ("", "Yes")),
        ("<think>a </think b</think>c", ("a </think b", "c")),
        ("<think>Hm.", ("Hm.", "")),
        ("<think>Hm. </th", ("Hm. </th", "")),
        ("<think>\n", ("", "")),
        ("<thinking>", ("", "<thinking>")),
        ("So <think>a</think>", ("", "So <think>a</think>")),
        ("<think>a</think>b<think>c</think>", ("a", "b<think>c</think>")),
        ("</think>", ("", "</think>")),
    ],
)
def test_only_leading_tags_are_reasoning(answer: str, expected: tuple[str, str]) -> None:
    assert split([answer]) == expected


def test_answer_may_start_inside_reasoning() -> None:
    assert split(["Hm.", "</think>", "\nYes"], thinking=True) == ("Hm.", "Yes")


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", " ", "\n", "a", "é"]), max_size=12),
    st.lists(st.integers(0, 80), max_size=6),
    st.booleans(),
)
def test_thinking_split_is_the_same_at_any_boundary(words: list[str], positions: list[int], thinking: bool) -> None:
    answer = "".join(words)
    edges = sorted({0, len(answer), *(position for position in positions if position < len(answer))})
    pieces = [answer[start:end] for start, end in itertools.pairwise(edges)]
    whole = split([answer], thinking=thinking)
    assert split(pieces, thinking=thinking) == whole
    assert split(list(answer), thinking=thinking) == whole
