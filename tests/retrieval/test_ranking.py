"""Ranking of chunks by vectors and words."""

import math
from typing import Any

import pytest

from antiphon.retrieval.ranking import Ranked, SearchWeights, VectorBlock, merge, normalize_ranks, split_words

np = pytest.importorskip("numpy")

VECTORS_ONLY = SearchWeights(1.0, 0.0)
QUERY = np.array([1.0, 0.0], dtype=np.float32)


def pack(*vectors: tuple[float, float]) -> bytes:
    packed: bytes = np.array(vectors, dtype="<f2").tobytes()
    return packed


def make_block() -> VectorBlock:
    """Return three chunks of two entries. The second has two vectors, and the ids are not in order."""
    first = VectorBlock.build(1, [(30, pack((0.5, 0.5))), (31, pack((0.0, 1.0), (1.0, 0.0)))], 2)
    second = VectorBlock.build(2, [(10, pack((-1.0, 0.0)))], 2)
    return VectorBlock.join([first, second])


def rank(**options: Any) -> list[Ranked]:
    given: Any = {"limit": 10, "weights": VECTORS_ONLY, "text_scores": {}} | options
    return make_block().rank(QUERY, given.pop("text_scores"), given.pop("weights"), **given)


def test_chunk_has_the_score_of_its_best_window() -> None:
    assert rank() == [Ranked(1.0, 31, 1), Ranked(0.5, 30, 1), Ranked(0.0, 10, 2)]


def test_words_and_vectors_are_weighted() -> None:
    ranked = rank(weights=SearchWeights(3, 1), text_scores={10: 1.0, 99: 1.0})
    assert ranked == [Ranked(0.75, 31, 1), Ranked(0.375, 30, 1), Ranked(0.25, 10, 2)]


def test_words_alone_drop_chunks_without_them() -> None:
    assert rank(weights=SearchWeights(0, 1), text_scores={30: 0.5}) == [Ranked(0.5, 30, 1)]


def test_limit_threshold_and_filter_select_chunks() -> None:
    assert rank(limit=1) == [Ranked(1.0, 31, 1)]
    assert rank(threshold=0.4) == [Ranked(1.0, 31, 1), Ranked(0.5, 30, 1)]
    assert rank(allowed=[2]) == [Ranked(0.0, 10, 2)]
    assert rank(allowed=[]) == []


def test_merged_rankings_have_the_best_score_of_a_chunk() -> None:
    one, other = [Ranked(0.4, 1, 1), Ranked(0.3, 2, 1)], [Ranked(0.5, 2, 1)]
    assert merge([one, other], 5) == [Ranked(0.5, 2, 1), Ranked(0.4, 1, 1)]


def test_ranks_are_normalized_by_the_words_of_the_query() -> None:
    possible = 2 * math.log(1001)
    ranks = [(1, possible * 2), (2, possible), (3, possible / 2)]
    assert normalize_ranks(ranks, words=2, chunks=1000) == {1: 1.0, 2: 1.0, 3: pytest.approx(0.125)}
    assert normalize_ranks([], words=0, chunks=0) == {}


def test_frequent_words_are_left_out_of_a_text_search() -> None:
    assert split_words("What is the capital of France? The CAPITAL!") == ["capital", "france"]
    assert split_words("to be or not") == ["to", "be", "or", "not"]
    assert split_words("…") == []
