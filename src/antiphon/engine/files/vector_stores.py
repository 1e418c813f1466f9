"""The operations on vector stores, their files and their batches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import UNSET

from antiphon.engine.files.embedding import Embedder
from antiphon.engine.files.files import file_not_found
from antiphon.engine.files.indexing import Indexer
from antiphon.engine.files.search import FoundChunk, Searcher, SearchQuery
from antiphon.engine.files.storage import FileStorage
from antiphon.engine.respond.ids import random_hex
from antiphon.errors import InvalidRequest, NotFound
from antiphon.protocol.filters import parse_filter
from antiphon.protocol.vector_stores import (
    DEFAULT_CHUNKING,
    AttachFile,
    Attributes,
    Chunking,
    CreateFileBatch,
    CreateVectorStore,
    FileBatch,
    FileContentPage,
    FileCounts,
    FileError,
    FileStatus,
    SearchPage,
    SearchResult,
    SearchVectorStore,
    StaticChunking,
    StoreExpiry,
    StoreStatus,
    TextContent,
    UpdateVectorStore,
    VectorStore,
    VectorStoreFile,
)
from antiphon.retrieval.process import check_packages
from antiphon.store.base import Order
from antiphon.store.files.database import FileDatabase
from antiphon.store.files.rows import BatchRow, EntryRow, NewEntry, StoreRow, Tally

_DAY = 24 * 3600
_DEFAULT_RESULTS = 10
_ID_PREFIX = "vs_"
# A search renews the expiry of its store, but not more often than this.
_ACTIVE_SECONDS = 60


class StorePage(NamedTuple):
    stores: list[VectorStore]
    has_more: bool


class StoreFilePage(NamedTuple):
    files: list[VectorStoreFile]
    has_more: bool


class VectorStores:
    """The vector stores of a storage."""

    def __init__(self, storage: FileStorage, embedder: Embedder, indexer: Indexer, searcher: Searcher) -> None:
        self._storage = storage
        self._embedder = embedder
        self._indexer = indexer
        self._searcher = searcher

    # Vector stores

    async def create(self, project: str, body: CreateVectorStore) -> VectorStore:
        if body.chunking_strategy is not None and not body.file_ids:
            raise InvalidRequest(
                "'chunking_strategy' needs 'file_ids': it is about these files.",
                param="chunking_strategy",
                code="invalid_value",
            )
        database = await self._open()
        chunking = _choose_chunking(body.chunking_strategy)
        file_ids = list(dict.fromkeys(body.file_ids or ()))
        await self._check_files(database, project, body.file_ids or (), "file_ids[{}]")
        if file_ids:
            await self._check_quota(database, project, "file_ids")
        now = int(self._storage.now())
        row = StoreRow(
            id=f"{_ID_PREFIX}{random_hex()}",
            created_at=now,
            last_active_at=now,
            name=body.name or "",
            description=body.description,
            metadata=body.metadata,
            expires_days=None if body.expires_after is None else body.expires_after.days,
            embedding=self._embedder.id,
        )
        entries = [_make_entry(file_id, None, chunking) for file_id in file_ids]
        await database.create_vector_store(project, row, entries)
        if entries:
            self._indexer.wake()
        return await self._show(database, project, row)

    async def retrieve(self, project: str, store_id: str) -> VectorStore:
        database = await self._open()
        return await self._show(database, project, await self._find(database, project, store_id))

    async def list_page(
        self, project: str, *, after: str | None, before: str | None, limit: int, order: Order
    ) -> StorePage:
        database = await self._open()
        rows, has_more = await database.list_vector_stores(
            project, after=after, before=before, limit=limit, order=order
        )
        tallies = await database.count_entries(project, [row.id for row in rows])
        return StorePage([_show_store(row, tallies[row.id]) for row in rows], has_more)

    async def update(self, project: str, store_id: str, body: UpdateVectorStore) -> VectorStore:
        database = await self._open()
        await self._find(database, project, store_id)
        changes: dict[str, Any] = {}
        if body.name is not UNSET:
            changes["name"] = body.name or ""
        if body.metadata is not UNSET:
            changes["metadata"] = body.metadata
        if body.expires_after is not UNSET:
            changes["expires_days"] = body.expires_after and body.expires_after.days
        await database.update_vector_store(project, store_id, changes)
        return await self._show(database, project, await self._find(database, project, store_id))

    async def delete(self, project: str, store_id: str) -> None:
        """Delete a vector store. Its files stay."""
        database = await self._open()
        _check_id(store_id)
        if not await database.delete_vector_store(project, store_id):
            raise _store_not_found(store_id)
        self._searcher.forget(project, store_id)

    # Files of a vector store

    async def attach(self, project: str, store_id: str, body: AttachFile) -> VectorStoreFile:
        database = await self._open()
        await self._find_usable(database, project, store_id)
        await self._check_files(database, project, [body.file_id], "file_id")
        await self._check_quota(database, project, "file_id")
        chunking = _choose_chunking(body.chunking_strategy)
        await self._attach(database, project, store_id, [_make_entry(body.file_id, body.attributes, chunking)])
        return _show_entry(store_id, await self._find_entry(database, project, store_id, body.file_id))

    async def _attach(
        self,
        database: FileDatabase,
        project: str,
        store_id: str,
        entries: Sequence[NewEntry],
        *,
        batch_id: str | None = None,
    ) -> None:
        if not await database.attach_files(project, store_id, entries, batch_id=batch_id):
            raise _store_not_found(store_id)
        self._indexer.wake()

    async def retrieve_file(self, project: str, store_id: str, file_id: str) -> VectorStoreFile:
        database = await self._open()
        await self._find(database, project, store_id)
        return _show_entry(store_id, await self._find_entry(database, project, store_id, file_id))

    async def list_files(
        self,
        project: str,
        store_id: str,
        *,
        status: str | None,
        after: str | None,
        before: str | None,
        limit: int,
        order: Order,
        batch_id: str | None = None,
    ) -> StoreFilePage:
        """Return a page of the files of a store, or of one of its batches."""
        database = await self._open()
        await self._find(database, project, store_id)
        if batch_id is not None:
            await self._find_batch(database, project, store_id, batch_id)
        rows, has_more = await database.list_entries(
            project,
            store_id,
            status=status,
            batch_id=batch_id,
            after=after,
            before=before,
            limit=limit,
            order=order,
        )
        return StoreFilePage([_show_entry(store_id, row) for row in rows], has_more)

    async def update_file(
        self, project: str, store_id: str, file_id: str, attributes: Attributes | None
    ) -> VectorStoreFile:
        database = await self._open()
        await self._find(database, project, store_id)
        await database.set_attributes(project, store_id, file_id, attributes)
        return _show_entry(store_id, await self._find_entry(database, project, store_id, file_id))

    async def detach(self, project: str, store_id: str, file_id: str) -> None:
        """Remove a file from a vector store. The file itself stays."""
        database = await self._open()
        await self._find(database, project, store_id)
        if not await database.detach_file(project, store_id, file_id):
            raise _entry_not_found(store_id, file_id)

    async def load_content(self, project: str, store_id: str, file_id: str) -> FileContentPage:
        """Return the text of an indexed file."""
        database = await self._open()
        await self._find(database, project, store_id)
        entry = await self._find_entry(database, project, store_id, file_id)
        texts = await database.load_entry_texts(entry.position) if entry.status == "completed" else []
        return FileContentPage(data=[TextContent(text) for text in texts])

    # Batches

    async def create_batch(self, project: str, store_id: str, body: CreateFileBatch) -> FileBatch:
        if (body.file_ids is None) == (body.files is None):
            raise InvalidRequest(
                "Exactly one of 'file_ids' and 'files' is required.",
                param="file_ids",
                code="missing_required_parameter" if body.files is None else "invalid_value",
            )
        database = await self._open()
        await self._find_usable(database, project, store_id)
        if body.files is not None:
            await self._check_files(database, project, [file.file_id for file in body.files], "files[{}].file_id")
            listed = [
                _make_entry(file.file_id, file.attributes, _choose_chunking(file.chunking_strategy))
                for file in body.files
            ]
        else:
            file_ids = body.file_ids or []
            await self._check_files(database, project, file_ids, "file_ids[{}]")
            chunking = _choose_chunking(body.chunking_strategy)
            listed = [_make_entry(file_id, body.attributes, chunking) for file_id in file_ids]
        await self._check_quota(database, project, "file_ids" if body.files is None else "files")
        entries = list({entry.file_id: entry for entry in listed}.values())
        batch_id = f"vsfb_{random_hex()}"
        await self._attach(database, project, store_id, entries, batch_id=batch_id)
        return await self._show_batch(database, project, store_id, batch_id)

    async def retrieve_batch(self, project: str, store_id: str, batch_id: str) -> FileBatch:
        database = await self._open()
        await self._find(database, project, store_id)
        return await self._show_batch(database, project, store_id, batch_id)

    async def cancel_batch(self, project: str, store_id: str, batch_id: str) -> FileBatch:
        """Cancel the files of a batch that are not complete."""
        database = await self._open()
        await self._find(database, project, store_id)
        await database.cancel_batch(project, store_id, batch_id)
        return await self._show_batch(database, project, store_id, batch_id)

    async def _show_batch(self, database: FileDatabase, project: str, store_id: str, batch_id: str) -> FileBatch:
        batch = await self._find_batch(database, project, store_id, batch_id)
        counts = _show_counts(await database.count_batch(project, batch_id))
        status: FileStatus
        if batch.is_cancelled:
            status = "cancelled"
        elif counts.in_progress:
            status = "in_progress"
        else:
            status = "failed" if counts.failed and not counts.completed else "completed"
        return FileBatch(
            id=batch.id,
            created_at=batch.created_at,
            vector_store_id=store_id,
            status=status,
            file_counts=counts,
        )

    # Search

    async def search(self, project: str, store_id: str, body: SearchVectorStore) -> SearchPage:
        queries = [body.query] if isinstance(body.query, str) else body.query
        for index, text in enumerate(queries):
            if not text.strip():
                param = "query" if isinstance(body.query, str) else f"query[{index}]"
                raise InvalidRequest("A query must not be empty.", param=param, code="invalid_value")
        options = body.ranking_options
        query = SearchQuery(
            texts=queries,
            limit=body.max_num_results or _DEFAULT_RESULTS,
            filter=None if body.filters is None else parse_filter(body.filters),
            threshold=0.0 if options is None else options.score_threshold or 0.0,
        )
        found = await self.find_chunks(project, store_id, query)
        return SearchPage(search_query=list(queries), data=[_show_result(chunk) for chunk in found])

    async def find_chunks(
        self, project: str, store_id: str, query: SearchQuery, *, param: str = "vector_store_id"
    ) -> list[FoundChunk]:
        """Search a vector store. Raises NotFound with this param if there is none."""
        database = await self._open()
        row = await self._find_usable(database, project, store_id, param=param)
        if row.expires_days is not None and self._storage.now() - row.last_active_at > _ACTIVE_SECONDS:
            await database.mark_active(project, store_id)
        return await self._searcher.search(project, row, query)

    async def check_store(self, project: str, store_id: str, *, param: str) -> None:
        """Raise NotFound or InvalidRequest with this param unless the store can be searched."""
        await self._find_usable(await self._open(), project, store_id, param=param)

    # Helpers

    async def _open(self) -> FileDatabase:
        check_packages(embed=self._embedder.is_local)
        return await self._storage.open()

    async def _find(
        self, database: FileDatabase, project: str, store_id: str, *, param: str = "vector_store_id"
    ) -> StoreRow:
        _check_id(store_id, param=param)
        row = await database.load_vector_store(project, store_id)
        if row is None:
            raise _store_not_found(store_id, param=param)
        return row

    async def _find_usable(
        self, database: FileDatabase, project: str, store_id: str, *, param: str = "vector_store_id"
    ) -> StoreRow:
        row = await self._find(database, project, store_id, param=param)
        if row.is_expired:
            raise InvalidRequest(
                f"The vector store '{store_id}' has expired. Create a new one.",
                param=param,
                code="vector_store_expired",
            )
        return row

    async def _find_entry(self, database: FileDatabase, project: str, store_id: str, file_id: str) -> EntryRow:
        entry = await database.load_entry(project, store_id, file_id)
        if entry is None:
            raise _entry_not_found(store_id, file_id)
        return entry

    async def _find_batch(self, database: FileDatabase, project: str, store_id: str, batch_id: str) -> BatchRow:
        batch = await database.load_batch(project, store_id, batch_id)
        if batch is None:
            raise NotFound(f"No batch '{batch_id}' in the vector store '{store_id}'.", param="batch_id")
        return batch

    async def _check_quota(self, database: FileDatabase, project: str, param: str) -> None:
        """Raise InvalidRequest if the vector stores of the project have no room for another file."""
        self._indexer.check_quota(await database.sum_usage(project) + 1, param=param)

    async def _check_files(self, database: FileDatabase, project: str, file_ids: Sequence[str], param: str) -> None:
        """Raise NotFound for the first id without a file. `param` is a format with the index."""
        found = await database.load_files(project, file_ids)
        for index, file_id in enumerate(file_ids):
            if file_id not in found:
                raise file_not_found(file_id, param=param.format(index))

    async def _show(self, database: FileDatabase, project: str, row: StoreRow) -> VectorStore:
        return _show_store(row, (await database.count_entries(project, [row.id]))[row.id])


def _choose_chunking(request: Any) -> StaticChunking:
    chosen: StaticChunking = DEFAULT_CHUNKING if request is None else request.chosen
    return chosen


def _make_entry(file_id: str, attributes: Attributes | None, chunking: StaticChunking) -> NewEntry:
    return NewEntry(file_id, attributes, chunking.max_chunk_size_tokens, chunking.chunk_overlap_tokens)


def _show_counts(tally: Tally) -> FileCounts:
    return FileCounts(**tally.counts, total=sum(tally.counts.values()))


def _show_store(row: StoreRow, tally: Tally) -> VectorStore:
    counts = _show_counts(tally)
    status: StoreStatus = "in_progress" if counts.in_progress else "completed"
    days = row.expires_days
    return VectorStore(
        id=row.id,
        created_at=row.created_at,
        name=row.name,
        description=row.description,
        usage_bytes=tally.usage_bytes,
        file_counts=counts,
        status="expired" if row.is_expired else status,
        expires_after=None if days is None else StoreExpiry("last_active_at", days),
        expires_at=None if days is None else row.last_active_at + days * _DAY,
        last_active_at=row.last_active_at,
        metadata=row.metadata,
    )


def _show_entry(store_id: str, row: EntryRow) -> VectorStoreFile:
    error = None if row.error_code is None else FileError(row.error_code, row.error_message or "")
    return VectorStoreFile(
        id=row.file_id,
        created_at=row.created_at,
        vector_store_id=store_id,
        status=row.status,
        usage_bytes=row.usage_bytes,
        last_error=error,
        attributes=row.attributes,
        chunking_strategy=Chunking(StaticChunking(row.chunk_tokens, row.overlap_tokens)),
    )


def _show_result(chunk: FoundChunk) -> SearchResult:
    return SearchResult(
        file_id=chunk.file_id,
        filename=chunk.filename,
        score=chunk.score,
        attributes=chunk.attributes,
        content=[TextContent(chunk.text)],
    )


def _check_id(store_id: str, *, param: str = "vector_store_id") -> None:
    if not store_id.startswith(_ID_PREFIX):
        raise InvalidRequest(
            f"Invalid '{param}': '{store_id}'. Expected an ID that begins with '{_ID_PREFIX}'.",
            param=param,
            code="invalid_value",
        )


def _store_not_found(store_id: str, *, param: str = "vector_store_id") -> NotFound:
    return NotFound(f"Vector store with id '{store_id}' not found.", param=param)


def _entry_not_found(store_id: str, file_id: str) -> NotFound:
    return NotFound(f"No file '{file_id}' in the vector store '{store_id}'.", param="file_id")
