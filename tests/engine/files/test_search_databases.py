"""Searches have the same results in SQLite and PostgreSQL, in memory, in the database, and block by block."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("asyncpg")

import numpy as np

from antiphon.engine.files import search
from antiphon.engine.files.search import FoundChunk, Searcher, SearchQuery
from antiphon.engine.files.storage import FileStorage
from antiphon.protocol.filters import Filter, parse_filter
from antiphon.retrieval.ranking import SearchWeights
from antiphon.store.files.location import FileLocation
from antiphon.store.files.rows import ChunkRow, FileRow, NewEntry, StoreRow
from antiphon.store.postgres.files import PostgresFileDatabase

DIMENSIONS, FILES, CHUNKS, WORDS = 16, 12, 9, 40
QUERIES = [" ".join(f"word{number * 3 + index}" for index in range(4)) for number in range(6)]
FILTERS: list[dict[str, Any] | None] = [
    None,
    {"type": "eq", "key": "kind", "value": "odd"},
    {
        "type": "and",
        "filters": [{"type": "gte", "key": "number", "value": 3}, {"type": "nin", "key": "number", "value": [5, 6]}],
    },
    {"type": "eq", "key": "absent", "value": 1},
]


def make_vector(text: str) -> Any:
    vector = np.random.default_rng(sum(text.encode())).standard_normal(DIMENSIONS).astype("f4")
    return vector / np.linalg.norm(vector)


class SeededEmbedder:
    """Gives each text a vector of its own, which is the same at every call."""

    id, is_local, dimensions = "seeded", True, DIMENSIONS

    async def embed_query(self, text: str) -> Any:
        return make_vector(text)

    async def embed_chunks(self, texts: Sequence[str]) -> list[bytes]:
        return []

    async def close(self) -> None:
        pass


async def fill(storage: FileStorage) -> None:
    """Add a vector store with several files. Each chunk has two vectors."""
    database = await storage.open()
    chance = random.Random(1)
    entries = []
    for number in range(FILES):
        file_id = f"file-{number}"
        await database.save_file("p", FileRow(file_id, 1, None, f"{number}.txt", 1, "assistants"))
        attributes = {"number": number, "kind": "odd" if number % 2 else "even"}
        entries.append(NewEntry(file_id, attributes, 100, 0))  # type: ignore[arg-type]
    row = StoreRow("vs_1", 1, 1, "", None, None, None, "seeded")
    await database.create_vector_store("p", row, entries)
    for _ in range(FILES):
        job = await database.claim_indexing("one", lease=30)
        assert job is not None
        chunks = []
        for _ in range(CHUNKS):
            text = " ".join(f"word{chance.randrange(WORDS)}" for _ in range(6))
            vectors = b"".join(make_vector(f"{text}{window}").astype("<f2").tobytes() for window in range(2))
            chunks.append(ChunkRow(0, text, vectors))
        await database.append_chunks("one", job.position, chunks, lease=30, dimensions=DIMENSIONS)
        await database.finish_indexing("one", job.position, "completed")


async def run_searches(storage: FileStorage, *, cache_bytes: int) -> list[list[FoundChunk]]:
    database = await storage.open()
    store = await database.load_vector_store("p", "vs_1")
    assert store is not None
    searcher = Searcher(storage, SeededEmbedder(), cache_bytes=cache_bytes)
    found = []
    for text in QUERIES:
        for condition in FILTERS:
            chosen: Filter | None = None if condition is None else parse_filter(condition)
            for weights in (SearchWeights(), SearchWeights(1, 0), SearchWeights(0, 1)):
                query = SearchQuery([text], 7, chosen, 0.05, weights)
                found.append(await searcher.search("p", store, query))
    return found


def assert_same(one: list[list[FoundChunk]], other: list[list[FoundChunk]]) -> None:
    for first, second in zip(one, other, strict=True):
        assert [each.score for each in second] == pytest.approx([each.score for each in first], abs=1e-3)
        # Chunks with nearly the same score may change their order.
        scores = {(each.file_id, each.text): each.score for each in first}
        for each in second[:-1]:
            assert scores.get((each.file_id, each.text), each.score) == pytest.approx(each.score, abs=1e-3)


async def test_searches_have_the_same_results_in_both_databases(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite, postgres = FileStorage(FileLocation(tmp_path / "files")), FileStorage(FileLocation(url=postgres_url))
    await fill(sqlite)
    await fill(postgres)
    expected = await run_searches(sqlite, cache_bytes=10**9)
    assert sum(map(len, expected)) > 200
    assert_same(expected, await run_searches(sqlite, cache_bytes=0))
    assert_same(expected, await run_searches(postgres, cache_bytes=10**9))
    database = await postgres.open()
    assert isinstance(database, PostgresFileDatabase)
    if database._vector_table is not None:  # without pgvector, this is the same as the last case
        monkeypatch.setattr(search, "_rank_joined", None)  # no vectors are compared here
        assert_same(expected, await run_searches(postgres, cache_bytes=0))
        monkeypatch.undo()
    monkeypatch.setattr(database, "_vector_table", None)
    assert_same(expected, await run_searches(postgres, cache_bytes=0))
    await sqlite.close()
    await postgres.close()
