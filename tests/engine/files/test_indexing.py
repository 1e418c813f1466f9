"""Indexing of files while the store fails."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.limits import FileLimits
from antiphon.engine.files import indexing
from antiphon.engine.files.indexing import Indexer
from antiphon.engine.files.search import Searcher
from antiphon.engine.files.storage import FileStorage
from antiphon.engine.files.vector_stores import VectorStores
from antiphon.errors import InvalidRequest
from antiphon.protocol.vector_stores import AttachFile, CreateVectorStore
from antiphon.store.files.database import FileDatabase
from antiphon.store.files.location import FileLocation
from antiphon.store.files.rows import EntryRow, FileRow, NewEntry, StoreRow
from antiphon.store.files.sqlite import SqliteFileDatabase

PROJECT = "p"


class FixedEmbedder:
    """Every chunk has the same vector."""

    id = "fixed"
    is_local = False
    dimensions: int | None = 1

    async def embed_query(self, text: str) -> Any:
        raise NotImplementedError

    async def embed_chunks(self, texts: Sequence[str]) -> list[bytes]:
        return [bytes(20_000) for _ in texts]

    async def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[FileStorage]:
    storage = FileStorage(FileLocation(tmp_path / "files"))
    yield storage
    await storage.close()


async def add_file(storage: FileStorage, text: str, *, file_id: str = "file-1") -> FileDatabase:
    """Store a file, and let it wait for its indexing in a new vector store."""
    database = await storage.open()
    writer = await storage.contents.start_writing()
    await writer.write(text.encode())
    await writer.commit(file_id)
    await database.save_file(PROJECT, FileRow(file_id, 1, None, "a.txt", len(text), "assistants"))
    store = StoreRow("vs_1", 1, 1, "", None, None, None, FixedEmbedder.id)
    await database.create_vector_store(PROJECT, store, [NewEntry(file_id, None, 100, 0)])
    return database


async def wait_for_end(database: FileDatabase) -> EntryRow:
    """Wait until the file is indexed or has failed. The indexer reports nothing, so poll."""
    for _ in range(3000):
        entry = await database.load_entry(PROJECT, "vs_1", "file-1")
        if entry is not None and entry.status != "in_progress":
            return entry
        await asyncio.sleep(0.02)
    raise AssertionError("the file is not indexed")


async def wait_for_lines(caplog: pytest.LogCaptureFixture, text: str, count: int) -> None:
    for _ in range(3000):
        if sum(text in record.getMessage() for record in caplog.records) >= count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(caplog.text)


async def test_full_disk_postpones_the_indexing_without_a_failed_attempt(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(indexing, "_RETRY_SECONDS", 0.01)
    database = await add_file(storage, "word " * 300)
    assert isinstance(database, SqliteFileDatabase)
    connection = database._writer._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    indexer = Indexer(storage, FixedEmbedder(), FileLimits(), lease=30)
    indexer.wake()
    # More often than a file may interrupt the server.
    await wait_for_lines(caplog, "files cannot be indexed now", 5)
    connection.execute("PRAGMA max_page_count = 1000000")
    entry = await wait_for_end(database)
    assert (entry.status, entry.error_message) == ("completed", None)
    await indexer.close()


async def test_file_beyond_the_quota_of_its_project_fails(storage: FileStorage) -> None:
    database = await add_file(storage, "word " * 300)
    limits = FileLimits(max_project_index_bytes=50_000)
    indexer = Indexer(storage, FixedEmbedder(), limits, lease=30)
    indexer.wake()
    entry = await wait_for_end(database)
    await indexer.close()
    assert (entry.status, entry.error_code, entry.usage_bytes) == ("failed", "server_error", 0)
    assert "(setting files.max_project_index_bytes)" in (entry.error_message or "")
    assert await database.load_entry_texts(entry.position) == []


async def test_full_quota_refuses_another_file_with_the_setting(storage: FileStorage) -> None:
    pytest.importorskip("onnxruntime")
    database = await add_file(storage, "word " * 300)
    indexer = Indexer(storage, FixedEmbedder(), FileLimits(), lease=30)
    indexer.wake()
    await wait_for_end(database)
    await indexer.close()
    used = await database.sum_usage(PROJECT)
    full = Indexer(storage, FixedEmbedder(), FileLimits(max_project_index_bytes=used), lease=30)
    stores = VectorStores(storage, FixedEmbedder(), full, Searcher(storage, FixedEmbedder(), cache_bytes=0))
    assert used > 60_000
    with pytest.raises(InvalidRequest) as refused:
        await stores.attach(PROJECT, "vs_1", AttachFile(file_id="file-1"))
    assert (refused.value.code, refused.value.param) == ("index_quota_exceeded", "file_id")
    assert (await stores.create(PROJECT, CreateVectorStore())).file_counts.total == 0
    await full.close()
