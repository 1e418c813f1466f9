"""Search in the chunks of vector stores, by vectors and by words."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from antiphon.engine.files.embedding import Embedder
from antiphon.engine.files.storage import FileStorage
from antiphon.errors import InvalidRequest
from antiphon.offload import run_in_thread
from antiphon.protocol.filters import Filter
from antiphon.protocol.vector_stores import Attributes
from antiphon.retrieval.ranking import Ranked, SearchWeights, VectorBlock, merge, normalize_ranks, split_words
from antiphon.retrieval.vector_index import VectorIndex
from antiphon.store.files.database import FileDatabase
from antiphon.store.files.rows import SearchEntry, StoreRow, VectorQuery

_PAGE_CHUNKS = 1000
_MAX_MATCHES = 2000
# A word is common if the store has at least `_LARGE_STORE_CHUNKS`, and one chunk in `_COMMON_SHARE` contains the word.
_LARGE_STORE_CHUNKS, _COMMON_SHARE = 20_000, 20
# A store that does not fit the cache is read in blocks of this size.
_BLOCK_BYTES = 16 * 1024 * 1024
# Maximum memory of an entry and of an attribute. Even an empty store takes some memory, so their number is limited.
_ENTRY_BYTES, _ATTRIBUTE_BYTES = 500, 800
_MAX_CACHED_STORES = 1000


class SearchQuery(NamedTuple):
    """Queries, of which the best results are returned."""

    texts: Sequence[str]
    limit: int
    filter: Filter | None = None
    threshold: float = 0.0
    weights: SearchWeights = SearchWeights()


class FoundChunk(NamedTuple):
    """A result of a search."""

    file_id: str
    filename: str
    attributes: Attributes | None
    score: float
    text: str


class _CachedStore(NamedTuple):
    """The content of a vector store at a revision. `vectors` may be of an earlier one.

    `is_too_large`: the vectors do not fit the cache.
    """

    revision: int
    entries: dict[int, SearchEntry]
    vectors: VectorIndex
    size: int
    is_too_large: bool = False


class Searcher:
    """Searches vector stores. It has the vectors of those that were searched last in memory."""

    def __init__(self, storage: FileStorage, embedder: Embedder, *, cache_bytes: int) -> None:
        self._storage = storage
        self._embedder = embedder
        self._cache_bytes = cache_bytes
        self._loading = asyncio.Lock()
        # Least recently used first.
        self._cache: OrderedDict[tuple[str, str], _CachedStore] = OrderedDict()

    async def search(self, project: str, store: StoreRow, query: SearchQuery) -> list[FoundChunk]:
        """Return the best chunks, best first. Raises InvalidRequest if the store has vectors of another model."""
        if store.embedding != self._embedder.id:
            raise _make_model_error(store, self._embedder.id)
        database = await self._storage.open()
        cached = await self._load_entries(database, project, store)
        allowed = None if query.filter is None else await run_in_thread(_select, cached, query.filter)
        if not cached.entries or (allowed is not None and not allowed):
            return []
        rankings = [await self._rank(database, project, store, text, query, allowed) for text in query.texts]
        ranked = merge(rankings, query.limit)
        texts = await database.load_chunk_texts([each.chunk_id for each in ranked])
        return [
            FoundChunk(entry.file_id, entry.filename, entry.attributes, each.score, texts[each.chunk_id])
            for each in ranked
            # A file may have been removed meanwhile.
            if each.chunk_id in texts and (entry := cached.entries.get(each.entry)) is not None
        ]

    def forget(self, project: str, store_id: str) -> None:
        """Remove a deleted vector store from memory."""
        self._cache.pop((project, store_id), None)

    async def _rank(
        self,
        database: FileDatabase,
        project: str,
        store: StoreRow,
        text: str,
        query: SearchQuery,
        allowed: list[int] | None,
    ) -> list[Ranked]:
        vector: Any = None
        if query.weights.embedding:
            vector = await self._embedder.embed_query(text)
        scores: dict[int, float] = {}
        if query.weights.text:
            scores = await self._score_words(database, store, text, query, allowed)
        if vector is None:
            return await self._rank_words(database, project, store, scores, query)

        def rank(vectors: VectorBlock | VectorIndex) -> list[Ranked]:
            return vectors.rank(
                vector, scores, query.weights, limit=query.limit, threshold=query.threshold, allowed=allowed
            )

        cached = await self._load_vectors(database, project, store)
        if cached is not None:
            return await run_in_thread(rank, cached.vectors)
        entries = (await self._load_entries(database, project, store)).entries if allowed is None else allowed
        vectors = VectorQuery(vector.tolist(), scores, list(entries), *query.weights, query.threshold, query.limit)
        ranked = await database.rank_vectors(store.scope, vectors)
        if ranked is not None:
            return ranked
        return await self._rank_from_disk(database, project, store, rank, query.limit)

    async def _score_words(
        self, database: FileDatabase, store: StoreRow, text: str, query: SearchQuery, allowed: list[int] | None
    ) -> dict[int, float]:
        """Return the scores of the chunks with words of a query.

        Common words are not searched in a large store: ranking each of their many chunks takes much longer than the
        vectors, and adds nearly nothing to the score of a chunk.
        """
        words = searched = split_words(text)
        chunks = await database.estimate_chunks(store.scope, revision=store.revision)
        if chunks >= _LARGE_STORE_CHUNKS:
            limit = chunks // _COMMON_SHARE
            counts = await database.count_matches(store.scope, words, limit=limit)
            searched = [word for word, count in zip(words, counts, strict=True) if count < limit]
            if not searched and not query.weights.embedding:
                searched = words
        if not searched:
            return {}
        matches = await database.match_words(
            store.scope, searched, limit=_MAX_MATCHES, entries=allowed, revision=store.revision
        )
        return normalize_ranks(matches, words=len(words), chunks=chunks)

    async def _rank_words(
        self, database: FileDatabase, project: str, store: StoreRow, scores: dict[int, float], query: SearchQuery
    ) -> list[Ranked]:
        """Rank the chunks with words of the query, without their vectors."""
        entries = (await self._load_entries(database, project, store)).entries
        found = await database.load_chunk_entries(list(scores))
        ranked = [
            Ranked(score, chunk_id, found[chunk_id])
            for chunk_id, score in scores.items()
            if score > 0 and score >= query.threshold and found.get(chunk_id) in entries
        ]
        return merge([ranked], query.limit)

    async def _rank_from_disk(
        self, database: FileDatabase, project: str, store: StoreRow, rank: Any, limit: int
    ) -> list[Ranked]:
        """Rank the chunks of a store that does not fit the cache, block by block."""
        best: list[Ranked] = []
        blocks: list[VectorBlock] = []
        size = 0
        for entry in (await self._load_entries(database, project, store)).entries:
            async for block in self._read_blocks(database, store, entry):
                blocks.append(block)
                size += block.size
                if size >= _BLOCK_BYTES:
                    best = merge([best, await run_in_thread(_rank_joined, rank, blocks)], limit)
                    blocks, size = [], 0
        if blocks:
            best = merge([best, await run_in_thread(_rank_joined, rank, blocks)], limit)
        return best

    async def _load_entries(self, database: FileDatabase, project: str, store: StoreRow) -> _CachedStore:
        """Return the entries of a store, and the vectors that are in memory."""
        key = project, store.id
        cached = self._cache.get(key)
        if cached is None or cached.revision != store.revision:
            found = {entry.position: entry for entry in await database.load_search_entries(project, store.id)}
            index = VectorIndex() if cached is None else cached.vectors
            cached = self._cache[key] = _CachedStore(store.revision, found, index, _measure(found, index))
            self._cache.move_to_end(key)
            self._evict()
        self._cache.move_to_end(key)
        return cached

    async def _load_vectors(self, database: FileDatabase, project: str, store: StoreRow) -> _CachedStore | None:
        """Return a store with all its vectors in memory, or None if they do not fit the cache."""
        async with self._loading:
            return await self._load_missing(database, project, store)

    async def _load_missing(self, database: FileDatabase, project: str, store: StoreRow) -> _CachedStore | None:
        cached = await self._load_entries(database, project, store)
        missing = [position for position in cached.entries if position not in cached.vectors.entries]
        removed = cached.vectors.entries.difference(cached.entries)
        if not missing and not removed:
            return cached
        if cached.is_too_large:
            return None
        index = cached.vectors
        if removed:
            index = await run_in_thread(index.update, {}, removed)
        added: dict[int, list[VectorBlock]] = {}
        size = _measure(cached.entries, index)
        for position in missing:
            added[position] = []
            async for block in self._read_blocks(database, store, position):
                added[position].append(block)
                size += block.size
                if size > self._cache_bytes:
                    self._cache[project, store.id] = cached._replace(is_too_large=True)
                    return None
        if added:
            index = await run_in_thread(index.update, added)
        key = project, store.id
        size = _measure(cached.entries, index)
        self._cache[key] = cached = _CachedStore(cached.revision, cached.entries, index, size)
        self._cache.move_to_end(key)
        self._evict()
        return cached

    def _evict(self) -> None:
        total = sum(cached.size for cached in self._cache.values())
        while len(self._cache) > 1 and (total > self._cache_bytes or len(self._cache) > _MAX_CACHED_STORES):
            _, evicted = self._cache.popitem(last=False)
            total -= evicted.size

    async def _read_blocks(self, database: FileDatabase, store: StoreRow, entry: int) -> Any:
        """Yield the vectors of an entry. Raises InvalidRequest if they do not have the length of the query's vector."""
        after, embedder = 0, self._embedder
        size = None if embedder.is_local or embedder.dimensions is None else 2 * embedder.dimensions
        while rows := await database.read_vectors(entry, after=after, limit=_PAGE_CHUNKS):
            after = rows[-1].chunk_id
            if size is not None and any(len(row.vectors) != size for row in rows):
                raise _make_model_error(store, embedder.id)
            yield await run_in_thread(VectorBlock.build, entry, rows, self._embedder.dimensions)


def _make_model_error(store: StoreRow, embedder_id: str) -> InvalidRequest:
    used = f"'{embedder_id}'" if store.embedding != embedder_id else "vectors of another length"
    return InvalidRequest(
        f"The vector store '{store.id}' has vectors of '{store.embedding}', but this server uses {used}. "
        "Create a new vector store with the same files.",
        param="vector_store_id",
        code="embedding_model_changed",
    )


def _measure(entries: Mapping[int, SearchEntry], index: VectorIndex) -> int:
    """Return the memory of a store in the cache."""
    attributes = sum(len(entry.attributes or ()) for entry in entries.values())
    return _ENTRY_BYTES * len(entries) + _ATTRIBUTE_BYTES * attributes + index.size


def _select(cached: _CachedStore, condition: Filter) -> list[int]:
    """Return the entries that a filter allows."""
    return [entry.position for entry in cached.entries.values() if condition.matches(entry.attributes or {})]


def _rank_joined(rank: Any, blocks: list[VectorBlock]) -> list[Ranked]:
    ranked: list[Ranked] = rank(VectorBlock.join(blocks))
    return ranked
