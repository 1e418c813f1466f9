"""Vectors in memory: after any changes, an index ranks as one that is built anew."""

import random
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from antiphon.retrieval.ranking import Ranked, SearchWeights, VectorBlock
from antiphon.retrieval.vector_index import VectorIndex

np = pytest.importorskip("numpy")

DIMENSIONS = 8
# Small whole numbers: the products have no rounding errors, so results are equal and not only similar.
QUERY = np.arange(DIMENSIONS, dtype=np.float32) / 256

Content = Mapping[int, VectorBlock]


def make_entry(entry: int, chunks: int, chance: random.Random) -> VectorBlock:
    """Return the block of an entry. Each chunk has one to three vectors, and the ids are in no order."""
    ids = chance.sample(range(entry * 1000, entry * 1000 + 1000), chunks)
    rows = [
        (chunk_id, np.array([chance.randrange(16) for _ in range(DIMENSIONS * chance.randint(1, 3))], "<f2").tobytes())
        for chunk_id in ids
    ]
    return VectorBlock.build(entry, rows, DIMENSIONS)


def rank(index: VectorIndex, content: Content, limit: int) -> list[Ranked]:
    """Rank with words in two chunks of each entry, and with entries that have an even number."""
    scores = {int(chunk_id): 0.25 for block in content.values() for chunk_id in block.chunk_ids[:2]}
    allowed = [entry for entry in content if entry % 2 == 0]
    return [
        *index.rank(QUERY, scores, SearchWeights(), limit=limit),
        *index.rank(QUERY, scores, SearchWeights(0.0, 1.0), limit=limit),
        *index.rank(QUERY, {}, SearchWeights(1.0, 0.0), limit=limit, threshold=0.5, allowed=allowed),
    ]


def build(content: Content) -> VectorIndex:
    return VectorIndex().update({entry: [block] for entry, block in content.items()})


@pytest.mark.parametrize("seed", range(8))
def test_changed_index_ranks_as_a_new_one(seed: int) -> None:
    chance = random.Random(seed)
    content: dict[int, VectorBlock] = {}
    index, entry = VectorIndex(), 0
    for _ in range(40):
        removed = chance.sample(sorted(content), chance.randint(0, len(content) // 3))
        for each in removed:
            del content[each]
        added: dict[int, list[VectorBlock]] = {}
        for _ in range(chance.choice([0, 1, 1, 1, 6])):
            entry += 1
            content[entry] = make_entry(entry, chance.randint(1, 20), chance)
            added[entry] = [content[entry]]
        index = index.update(added, removed)
        assert index.entries == content.keys()
        assert rank(index, content, 7) == rank(build(content), content, 7)


def test_index_without_entries_ranks_nothing() -> None:
    index = VectorIndex().update({1: [make_entry(1, 3, random.Random(1))]})
    emptied = index.update({}, [1])
    assert (rank(emptied, {}, 5), emptied.entries, emptied.size) == ([], frozenset(), 0)


def test_entry_without_chunks_is_not_read_again() -> None:
    index = VectorIndex().update({5: []})
    assert (index.entries, index.size) == ({5}, 0)


def test_new_entry_copies_no_vectors_of_a_large_one() -> None:
    chance = random.Random(1)
    large, small = make_entry(1, 500, chance), make_entry(2, 5, chance)
    before = VectorIndex().update({1: [large]})
    after = before.update({2: [small]})
    assert after._segments[0].block is before._segments[0].block


def test_number_of_segments_grows_with_the_logarithm_of_the_entries() -> None:
    chance = random.Random(1)
    index = VectorIndex()
    for entry in range(1, 300):
        index = index.update({entry: [make_entry(entry, 1, chance)]})
    assert len(index._segments) <= 9


def test_removed_chunks_are_a_bounded_part_of_the_memory() -> None:
    chance = random.Random(1)
    content = {entry: make_entry(entry, 10, chance) for entry in range(1, 101)}
    index = build(content)
    for entry in range(1, 100):
        index = index.update({}, [entry])
        del content[entry]
        assert index.size <= 1.5 * sum(block.size for block in content.values())


def test_search_during_changes_sees_one_state() -> None:
    """An index that a thread searches is not affected by those that are made from it."""
    chance = random.Random(1)
    content = {entry: make_entry(entry, 10, chance) for entry in range(1, 31)}
    index = build(content)
    expected = rank(index, content, 20)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(rank(index, content, 20) for _ in range(50)))
    thread.start()
    changed = index
    for entry in range(1, 31):
        changed = changed.update({entry + 100: [make_entry(entry + 100, 5, chance)]}, [entry])
    thread.join()
    assert results == [expected] * 50
