"""Ranking of chunks by their vectors and their words. The work is done with NumPy, in a thread of the caller."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_WORD = re.compile(r"\w+")
_MAX_WORDS = 64
# Words that are in most texts. They say nothing about the topic of a query.
_STOP_WORDS_TEXT = (
    "a about after all an and any are as at be because been but by can could did do does for from had has"
    " have how i if in into is it its just may me more most my no not of on one or our out so some such"
    " than that the their them then there these they this those to was we were what when where which while"
    " who whom whose why will with would you your"
)
_STOP_WORDS = frozenset(_STOP_WORDS_TEXT.split())


class SearchWeights(NamedTuple):
    """The shares of the similarity of vectors and of the match of words in a score."""

    embedding: float = 0.8
    text: float = 0.2


class Ranked(NamedTuple):
    """A chunk with its score from 0 to 1."""

    score: float
    chunk_id: int
    entry: int


def split_words(query: str) -> list[str]:
    """Return the distinct words of a query for a text search, without frequent ones unless there are no others."""
    words = list(dict.fromkeys(_WORD.findall(query.lower())))
    return ([word for word in words if word not in _STOP_WORDS] or words)[:_MAX_WORDS]


class VectorBlock:
    """The vectors of some chunks. A chunk has one or more vectors, one after the other.

    `chunk_ids` and `entries` have one element per chunk, `first_rows` the number of its first vector.
    """

    def __init__(self, chunk_ids: Any, entries: Any, first_rows: Any, matrix: Any) -> None:
        self.chunk_ids = chunk_ids
        self.entries = entries
        self.first_rows = first_rows
        self.matrix = matrix
        self._order: Any = None

    @classmethod
    def build(cls, entry: int, rows: Sequence[tuple[int, bytes]], dimensions: int | None) -> "VectorBlock":
        """Return the block of chunks of one entry, from their ids and vectors as stored.

        There must be at least one chunk. Without `dimensions`, each chunk has one vector.
        """
        import numpy as np

        dimensions = dimensions or len(rows[0][1]) // 2
        counts = [len(vectors) // (2 * dimensions) for _, vectors in rows]
        joined = b"".join(vectors for _, vectors in rows)
        matrix = np.frombuffer(joined, dtype="<f2").reshape(-1, dimensions).astype(np.float32)
        first_rows = np.cumsum([0, *counts[:-1]], dtype=np.int64)
        chunk_ids = np.array([chunk_id for chunk_id, _ in rows], dtype=np.int64)
        return cls(chunk_ids, np.full(len(rows), entry, dtype=np.int64), first_rows, matrix)

    @classmethod
    def join(cls, blocks: Sequence["VectorBlock"]) -> "VectorBlock":
        """Return one block with all chunks. There must be at least one block."""
        import numpy as np

        offsets = np.cumsum([0, *(len(block.matrix) for block in blocks[:-1])])
        return cls(
            np.concatenate([block.chunk_ids for block in blocks]),
            np.concatenate([block.entries for block in blocks]),
            np.concatenate([block.first_rows + offset for block, offset in zip(blocks, offsets, strict=True)]),
            np.concatenate([block.matrix for block in blocks]),
        )

    def select(self, is_selected: Any) -> "VectorBlock":
        """Return a block with copies of some chunks. `is_selected` has one element per chunk; one must be True."""
        import numpy as np

        counts = np.diff(self.first_rows, append=len(self.matrix))
        matrix = self.matrix[np.repeat(is_selected, counts)]
        first_rows = np.cumsum(np.concatenate(([0], counts[is_selected][:-1])), dtype=np.int64)
        return VectorBlock(self.chunk_ids[is_selected], self.entries[is_selected], first_rows, matrix)

    @property
    def size(self) -> int:
        """The size in bytes."""
        return int(self.matrix.nbytes + 3 * self.chunk_ids.nbytes)

    def rank(
        self,
        query: Any,
        text_scores: Mapping[int, float],
        weights: SearchWeights,
        *,
        limit: int,
        threshold: float = 0.0,
        allowed: Any = None,
        is_live: Any = None,
    ) -> list[Ranked]:
        """Return the best chunks. `text_scores` are from 0 to 1, by chunk. `allowed` are entries, or None for all.

        Chunks for which `is_live` is False are ignored.
        """
        import numpy as np

        if not len(self.chunk_ids):
            return []
        total = weights.embedding + weights.text
        scores: Any = np.zeros(len(self.chunk_ids), dtype=np.float32)
        if weights.embedding:
            # The similarity of a chunk is that of its most similar window.
            similarities = np.maximum.reduceat(self.matrix @ query, self.first_rows)
            scores += np.clip(similarities, 0.0, 1.0) * (weights.embedding / total)
        if weights.text and text_scores:
            matched = np.fromiter(text_scores.keys(), dtype=np.int64, count=len(text_scores))
            positions = self._find(matched)
            is_here = self.chunk_ids[positions] == matched
            values = np.fromiter(text_scores.values(), dtype=np.float32, count=len(text_scores))
            scores[positions[is_here]] += values[is_here] * (weights.text / total)
        if allowed is not None:
            scores[~np.isin(self.entries, allowed)] = -1.0
        if is_live is not None:
            scores[~is_live] = -1.0
        if not weights.embedding:
            scores[scores == 0.0] = -1.0  # no word matches
        count = min(limit, len(scores))
        # Chunks with the same score are in the order of their ids, also at the limit.
        lowest = max(-float(np.partition(-scores, count - 1)[count - 1]), threshold, 0.0)
        best = np.flatnonzero(scores >= lowest)
        best = best[np.lexsort((self.chunk_ids[best], -scores[best]))][:count]
        return [
            Ranked(min(float(scores[index]), 1.0), int(self.chunk_ids[index]), int(self.entries[index]))
            for index in best
        ]

    def _find(self, chunk_ids: Any) -> Any:
        """Return a position for each of these ids. If the block has the chunk, it is its position."""
        import numpy as np

        if self._order is None:  # several processes may index at once, so the ids are not in order
            self._order = np.argsort(self.chunk_ids)
        found = np.searchsorted(self.chunk_ids, chunk_ids, sorter=self._order)
        return self._order[np.minimum(found, len(self.chunk_ids) - 1)]


def normalize_ranks(matches: Sequence[tuple[int, float]], *, words: int, chunks: int) -> dict[int, float]:
    """Return the BM25 ranks of text matches as scores from 0 to 1.

    A chunk with all words of the query, each of them rare among all chunks, has about 1. The score falls with the
    third power of the part that matches, because a few common words say little about the topic.
    """
    best = words * math.log(chunks + 1)
    return {chunk_id: min(1.0, rank / best) ** 3 for chunk_id, rank in matches} if best > 0 else {}


def merge(rankings: Sequence[Sequence[Ranked]], limit: int) -> list[Ranked]:
    """Return the best chunks of several rankings. A chunk has the best of its scores."""
    best: dict[int, Ranked] = {}
    for ranking in rankings:
        for ranked in ranking:
            found = best.get(ranked.chunk_id)
            if found is None or ranked.score > found.score:
                best[ranked.chunk_id] = ranked
    return sorted(best.values(), key=lambda ranked: (-ranked.score, ranked.chunk_id))[:limit]
