"""Indexing of the files of vector stores, in the background and one at a time.

The queue is in the database, so that another process goes on if this one dies. A file is indexed in batches of chunks.
They can be searched only when the file is complete.
"""

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from pathlib import Path

from antiphon.config.limits import FileLimits
from antiphon.engine.files.embedding import Embedder
from antiphon.engine.files.storage import FileStorage
from antiphon.errors import AntiphonError, InvalidRequest, StoreUnavailable
from antiphon.retrieval.extract import Unreadable
from antiphon.retrieval.messages import ReadChunk
from antiphon.retrieval.process import FileReader
from antiphon.store.files.content import MISSING_CONTENT
from antiphon.store.files.database import FileDatabase
from antiphon.store.files.rows import ChunkRow, IndexingJob, IndexingLost
from antiphon.tasks import cancel_tasks

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
_RETRY_SECONDS = 5.0
_IDLE_CHECK_SECONDS = 60.0
_MAX_RECENT = 100


class Indexer:
    """Indexes the files that wait in the database. `wake` starts the work, and `close` returns it to the queue.

    The files of a dead process on another machine are claimed after `lease` seconds. Files of a process on this machine
    are claimed at once if the database is in SQLite.
    """

    def __init__(self, storage: FileStorage, embedder: Embedder, limits: FileLimits, *, lease: float) -> None:
        self._storage = storage
        self._embedder = embedder
        self._max_bytes = limits.max_project_index_bytes
        self._lease = lease
        self._idle_seconds = lease if storage.is_shared else _IDLE_CHECK_SECONDS
        self._reader = FileReader(limits, embed=embedder.is_local)
        self._owner = secrets.token_hex(16)
        self._task: asyncio.Task[None] | None = None
        self._has_work = asyncio.Event()
        self._recent: list[str] = []

    def wake(self) -> None:
        """Index the files that wait. Call this when files were added."""
        self._has_work.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def check_quota(self, used: int, *, param: str | None = None) -> None:
        """Raise InvalidRequest if the chunks of a project have more bytes than allowed."""
        if used > self._max_bytes:
            raise InvalidRequest(
                f"The vector stores of the project have {used} bytes. This server stores at most {self._max_bytes} for "
                "a project (setting files.max_project_index_bytes). Delete vector stores, or files in them.",
                param=param,
                code="index_quota_exceeded",
            )

    async def close(self) -> None:
        await cancel_tasks(self._task)
        await self._reader.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._work()
            except AntiphonError as error:
                logger.error("files cannot be indexed now: %s", error.message)
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception:
                logger.exception("files cannot be indexed now")
                await asyncio.sleep(_RETRY_SECONDS)

    async def _work(self) -> None:
        """Index files until none waits, then wait until there may be some."""
        self._has_work.clear()
        database = await self._storage.open()
        while await database.find_next_claim() is not None and (job := await self._claim(database)) is not None:
            await self._index(database, job)
        free_at = await database.find_next_claim()
        wait = self._idle_seconds if free_at is None else max(0.1, free_at - time.time())
        with suppress(TimeoutError):
            async with asyncio.timeout(min(wait, self._idle_seconds)):
                await self._has_work.wait()

    async def _claim(self, database: FileDatabase) -> IndexingJob | None:
        job = await database.claim_indexing(self._owner, lease=self._lease, recent=self._recent)
        if job is not None:
            self._recent = [project for project in self._recent if project != job.project][-_MAX_RECENT:]
            self._recent.append(job.project)
        return job

    async def _index(self, database: FileDatabase, job: IndexingJob) -> None:
        renewal = asyncio.create_task(self._renew(database, job))
        try:
            error = await self._index_file(database, job)
            status = "completed" if error is None else "failed"
            await database.finish_indexing(self._owner, job.position, status, error=error)
        except IndexingLost:
            logger.info("the file %s was cancelled or deleted while it was indexed", job.file_id)
        except asyncio.CancelledError:
            with suppress(AntiphonError):
                await asyncio.shield(database.release_indexing(self._owner, job.position))
            raise
        except StoreUnavailable:
            await self._release(database, job)
            raise
        finally:
            renewal.cancel()

    async def _release(self, database: FileDatabase, job: IndexingJob) -> None:
        """Return an entry to the queue, as soon as the store can be written to. The attempt does not count."""
        while True:
            try:
                await database.release_indexing(self._owner, job.position)
                return
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _index_file(self, database: FileDatabase, job: IndexingJob) -> tuple[str, str] | None:
        """Save the chunks of a file. Return the code and message of the error, or None."""
        if job.attempts > _MAX_ATTEMPTS:
            return "server_error", f"The server was interrupted {_MAX_ATTEMPTS} times while it indexed the file."
        if job.embedding != self._embedder.id:
            return "server_error", f"The vector store has vectors of '{job.embedding}', which this server does not use."
        try:
            async with self._storage.contents.use_path(job.file_id) as path:
                await self._save_chunks(database, job, path)
        except Unreadable as error:
            return error.code, error.message
        except (IndexingLost, StoreUnavailable):
            raise
        except FileNotFoundError:
            return "server_error", MISSING_CONTENT
        except AntiphonError as error:
            return "server_error", error.message
        return None

    async def _save_chunks(self, database: FileDatabase, job: IndexingJob, path: Path) -> None:
        chunks = self._reader.read(
            str(path), job.filename, chunk_tokens=job.chunk_tokens, overlap_tokens=job.overlap_tokens
        )
        used = await database.sum_usage(job.project)
        try:
            async for batch in chunks:
                rows = await self._embed(batch)
                used += sum(len(row.text.encode()) + len(row.vectors) for row in rows)
                self.check_quota(used)
                await database.append_chunks(
                    self._owner, job.position, rows, lease=self._lease, dimensions=self._embedder.dimensions
                )
        finally:
            await chunks.aclose()

    async def _embed(self, batch: list[ReadChunk]) -> list[ChunkRow]:
        if self._embedder.is_local:
            return [ChunkRow(chunk.starts_at, chunk.text, chunk.vectors) for chunk in batch]
        vectors = await self._embedder.embed_chunks([chunk.text for chunk in batch])
        return [ChunkRow(chunk.starts_at, chunk.text, vector) for chunk, vector in zip(batch, vectors, strict=True)]

    async def _renew(self, database: FileDatabase, job: IndexingJob) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            try:
                await database.renew_indexing(self._owner, job.position, lease=self._lease)
            except AntiphonError as error:
                logger.warning("the lease of a file could not be renewed: %s", error.message)
