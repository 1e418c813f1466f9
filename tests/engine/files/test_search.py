"""Searches in vector stores: their memory, and their results while files are added and removed."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.files import search
from antiphon.engine.files.embedding import LocalEmbedder
from antiphon.engine.files.search import Searcher, SearchQuery
from antiphon.engine.files.storage import FileStorage
from antiphon.store.files.database import FileDatabase
from antiphon.store.files.location import FileLocation
from antiphon.store.files.rows import ChunkRow, FileRow, NewEntry, StoreRow


async def search_stores(folder: Path, *, files: int, stores: int, cache_bytes: int) -> Searcher:
    """Search several vector stores with files that have attributes but no chunks."""
    storage = FileStorage(FileLocation(folder))
    database = await storage.open()
    attributes = {f"{number}": "x" * 500 for number in range(16)}
    file_ids = [f"file-{number}" for number in range(files)]
    for file_id in file_ids:
        await database.save_file("p", FileRow(file_id, 1, None, "a.txt", 1, "assistants"))
    embedder = LocalEmbedder()
    searcher = Searcher(storage, embedder, cache_bytes=cache_bytes)
    for number in range(stores):
        row = StoreRow(f"vs_{number}", 1, 1, "", None, None, None, embedder.id)
        await database.create_vector_store("p", row, [NewEntry(file_id, attributes, 100, 0) for file_id in file_ids])
        for _ in file_ids:
            job = await database.claim_indexing("owner", lease=30)
            assert job is not None
            await database.finish_indexing("owner", job.position, "completed")
        found = await database.load_vector_store("p", row.id)
        assert found is not None
        query = SearchQuery(["word"], 10, weights=search.SearchWeights(0.0, 1.0))
        assert await searcher.search("p", found, query) == []
    await embedder.close()
    await storage.close()
    return searcher


async def test_number_of_stores_in_memory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_MAX_CACHED_STORES", 3)
    searcher = await search_stores(tmp_path, files=0, stores=5, cache_bytes=10**9)
    assert [store_id for _, store_id in searcher._cache] == ["vs_2", "vs_3", "vs_4"]


async def test_attributes_of_files_count_as_memory(tmp_path: Path) -> None:
    """Five files with 16 attributes of 500 characters each have at least 40 KB."""
    searcher = await search_stores(tmp_path, files=5, stores=4, cache_bytes=150_000)
    assert [store_id for _, store_id in searcher._cache] == ["vs_2", "vs_3"]
    assert all(cached.size > 40_000 for cached in searcher._cache.values())


class FixedEmbedder(LocalEmbedder):
    """Gives every query the same vector."""

    async def embed_query(self, text: str) -> Any:
        import numpy as np

        return np.eye(1, 384, dtype="f4")[0]


async def search_words(folder: Path, text: str, weights: search.SearchWeights) -> dict[str, float]:
    """Return the scores of chunks whose vectors have nothing in common with the query."""
    storage, embedder = FileStorage(FileLocation(folder)), FixedEmbedder()
    database = await storage.open()
    await database.save_file("p", FileRow("file-1", 1, None, "a.txt", 1, "assistants"))
    row = StoreRow("vs_1", 1, 1, "", None, None, None, embedder.id)
    await database.create_vector_store("p", row, [NewEntry("file-1", None, 100, 0)])
    job = await database.claim_indexing("owner", lease=30)
    assert job is not None
    words = ["apple", "pear", "plum", "fig", "date", "lime", "melon", "kiwi", "grape", "peach"]
    chunks = [ChunkRow(0, f"{word} fruit", bytes(2 * 384)) for word in words]
    await database.append_chunks("owner", job.position, chunks, lease=30, dimensions=384)
    await database.finish_indexing("owner", job.position, "completed")
    store = await database.load_vector_store("p", "vs_1")
    assert store is not None
    searcher = Searcher(storage, embedder, cache_bytes=10**9)
    found = await searcher.search("p", store, SearchQuery([text], 10, weights=weights))
    await embedder.close()
    await storage.close()
    return {each.text: each.score for each in found if each.score > 0}


@pytest.mark.parametrize("weights", [search.SearchWeights(), search.SearchWeights(0.0, 1.0)])
async def test_common_words_are_not_searched_in_a_large_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: search.SearchWeights
) -> None:
    pytest.importorskip("numpy")
    everywhere = await search_words(tmp_path / "small", "fruit fig", weights)
    assert len(everywhere) == 10
    monkeypatch.setattr(search, "_LARGE_STORE_CHUNKS", 10)
    monkeypatch.setattr(search, "_COMMON_SHARE", 2)
    found = await search_words(tmp_path / "large", "fruit fig", weights)
    assert found == {"fig fruit": pytest.approx(everywhere["fig fruit"], rel=1e-3)}
    only_common = await search_words(tmp_path / "common", "fruit", weights)
    assert len(only_common) == (0 if weights.embedding else 10)


async def add_file(database: FileDatabase, file_id: str, numbers: Sequence[int]) -> None:
    """Index a file whose chunks have the given similarities to the query, in parts of 1024."""
    import numpy as np

    await database.attach_files("p", "vs_1", [NewEntry(file_id, None, 100, 0)])
    job = await database.claim_indexing("owner", lease=30)
    assert job is not None
    vectors = np.zeros((len(numbers), 384), dtype="<f2")
    vectors[:, 0] = np.array(numbers) / 1024
    chunks = [
        ChunkRow(0, f"{file_id} {number}", vector.tobytes()) for number, vector in zip(numbers, vectors, strict=True)
    ]
    await database.append_chunks("owner", job.position, chunks, lease=30, dimensions=384)
    await database.finish_indexing("owner", job.position, "completed")


async def test_searches_during_changes_find_what_a_new_index_finds(tmp_path: Path) -> None:
    """Files are added, removed, and added again with other content, while other searches run."""
    pytest.importorskip("numpy")
    storage, embedder = FileStorage(FileLocation(tmp_path)), FixedEmbedder()
    database = await storage.open()
    await database.create_vector_store("p", StoreRow("vs_1", 1, 1, "", None, None, None, embedder.id), [])
    searcher = Searcher(storage, embedder, cache_bytes=10**9)
    query = SearchQuery(["word"], 8, weights=search.SearchWeights(1.0, 0.0))

    async def find(using: Searcher) -> list[tuple[str, float]]:
        store = await database.load_vector_store("p", "vs_1")
        assert store is not None
        return [(each.text, each.score) for each in await using.search("p", store, query)]

    for number in range(4):
        await database.save_file("p", FileRow(f"file-{number}", 1, None, "a.txt", 1, "assistants"))
    for step in range(12):
        running = [asyncio.create_task(find(searcher)) for _ in range(3)]
        if step in range(4, 9):
            assert await database.detach_file("p", "vs_1", f"file-{step % 4}")
        await add_file(database, f"file-{step % 4}", range(step, 1000, 97))
        found = await find(searcher)
        assert found == await find(Searcher(storage, embedder, cache_bytes=10**9))
        assert all(score > 0 for result in await asyncio.gather(*running) for _, score in result)
        assert max(found, key=lambda each: each[1]) == found[0]
    assert len(found) == 8
    await embedder.close()
    await storage.close()
