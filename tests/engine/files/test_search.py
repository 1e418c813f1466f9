"""The memory of searches in vector stores."""

from pathlib import Path

import pytest

from antiphon.engine.files import search
from antiphon.engine.files.embedding import LocalEmbedder
from antiphon.engine.files.search import Searcher, SearchQuery
from antiphon.engine.files.storage import FileStorage
from antiphon.store.files.location import FileLocation
from antiphon.store.files.rows import FileRow, NewEntry, StoreRow


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
