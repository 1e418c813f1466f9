"""Sizes of regular expressions with their repetitions written out."""

import time
from contextlib import suppress

import pytest

from antiphon.grammars.patterns import PatternFault, exceeds_size


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("a|b*c+d?", 4),
        ("^[a-z0-9]{8}$", 8),
        ("(ab){10}c", 21),
        ("((a{2}){3}b){4}", 28),
        ("a{2,5}", 5),
        ("a{3,}", 4),
        ("a{0}", 1),
        (r"\p{L}{3}", 3),
        (r"\x{41}\{3}", 4),
        ("[a{5}]", 1),
        ("[]a]{2}", 2),
        ("[^]a]{2}", 2),
        (r"[\]a]{2}", 2),
        ("[[:alpha:]_]{2}", 2),
        ("(?:a){3}", 3),
        ("(?P<name>a){3}", 3),
        ("(?i:a){3}", 3),
        ("a{,3}", 5),
        ("a{x}", 4),
    ],
)
def test_repetitions_are_counted_with_their_nesting(pattern: str, size: int) -> None:
    assert exceeds_size(pattern, max(size, len(pattern))) is False
    assert exceeds_size(pattern, size - 1) is True or size <= 0


@pytest.mark.parametrize("pattern", ["(", ")", "a(b", "[", "[]", "[^]", "a\\", "a{5,4}"])
def test_unmatched_brackets_are_faults(pattern: str) -> None:
    with pytest.raises(PatternFault):
        exceeds_size(pattern, 100)


@pytest.mark.parametrize("part", ["(", "[", "{1", r"\p{", "(?<a", "a{9}", "(a", "[[", r"\\", "(?"])
def test_scanning_takes_linear_time(part: str) -> None:
    began = time.thread_time()
    with suppress(PatternFault):
        exceeds_size(part * 25_000, 10**6)
    assert time.thread_time() - began < 1
