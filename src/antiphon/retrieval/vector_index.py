"""The vectors of a vector store in memory. Adding or removing a file does not copy the vectors of the others.

An index is immutable: a search that runs in a thread is not affected by changes. The work is done with NumPy, in a
thread of the caller.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from antiphon.retrieval.ranking import Ranked, SearchWeights, VectorBlock, merge

# A segment is joined with the next one if the size of the next one is at least this share of its own. So there are few
# segments, and a vector is copied rarely.
_JOIN_SHARE = 0.5
# A segment with more removed chunks than this part is copied without them.
_MAX_REMOVED_SHARE = 0.25


class _Segment(NamedTuple):
    """A block of vectors. `is_live` is False for the chunks of removed entries; None if there are none."""

    block: VectorBlock
    is_live: Any = None

    def remove(self, entries: Collection[int]) -> "_Segment | None":
        """Return the segment without the chunks of these entries, or None if there are no others."""
        import numpy as np

        is_live = ~np.isin(self.block.entries, list(entries))
        if self.is_live is not None:
            is_live &= self.is_live
        live = int(np.count_nonzero(is_live))
        if live == 0:
            return None
        if live == len(is_live):
            return self
        if live < (1 - _MAX_REMOVED_SHARE) * len(is_live):
            return _Segment(self.block.select(is_live))
        return _Segment(self.block, is_live)

    def take_live(self) -> VectorBlock:
        return self.block if self.is_live is None else self.block.select(self.is_live)


class VectorIndex:
    """The vectors of some entries. `entries` are those with at least one chunk, and those that were added without."""

    def __init__(self, segments: Sequence[_Segment] = (), entries: frozenset[int] = frozenset()) -> None:
        self._segments = segments
        self.entries = entries

    @property
    def size(self) -> int:
        """The size in bytes, with removed chunks that are still in memory."""
        return sum(segment.block.size for segment in self._segments)

    def update(self, added: Mapping[int, Sequence[VectorBlock]], removed: Collection[int] = ()) -> "VectorIndex":
        """Return an index with the blocks of more entries and without the entries in `removed`."""
        segments = list(self._segments)
        if removed:
            segments = [rest for segment in segments if (rest := segment.remove(removed)) is not None]
        blocks = [block for parts in added.values() for block in parts]
        if blocks:
            segments.append(_Segment(VectorBlock.join(blocks)))
            _join_last(segments)
        return VectorIndex(segments, self.entries.difference(removed).union(added))

    def rank(
        self,
        query: Any,
        text_scores: Mapping[int, float],
        weights: SearchWeights,
        *,
        limit: int,
        threshold: float = 0.0,
        allowed: Any = None,
    ) -> list[Ranked]:
        """Return the best chunks, as `VectorBlock.rank` does."""
        rankings = [
            segment.block.rank(
                query,
                text_scores,
                weights,
                limit=limit,
                threshold=threshold,
                allowed=allowed,
                is_live=segment.is_live,
            )
            for segment in self._segments
        ]
        return rankings[0] if len(rankings) == 1 else merge(rankings, limit)


def _join_last(segments: list[_Segment]) -> None:
    """Join the last segments until each is more than twice as large as the next one."""
    first = len(segments) - 1
    size = segments[first].block.size
    while first > 0 and size >= _JOIN_SHARE * segments[first - 1].block.size:
        first -= 1
        size += segments[first].block.size
    if first < len(segments) - 1:
        joined = _Segment(VectorBlock.join([segment.take_live() for segment in segments[first:]]))
        segments[first:] = [joined]
