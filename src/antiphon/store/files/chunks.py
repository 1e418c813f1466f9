"""Chunks of files: the queue of the indexing, and the data that a search reads."""

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

from antiphon.offload import LARGE_COUNT, run_in_thread
from antiphon.retrieval.ranking import Ranked
from antiphon.store.files.rows import (
    ChunkRow,
    IndexingJob,
    IndexingLost,
    SearchEntry,
    TextMatch,
    VectorQuery,
    VectorRow,
)
from antiphon.store.sql_steps import Batch, Clock, Lock, SqliteStep, SqlStep, StepDatabase, Steps
from antiphon.store.sqlite.leases import LiveProcesses

OWNERS = """
SELECT DISTINCT owner FROM entries WHERE status = 'in_progress' AND owner IS NOT NULL AND owner <> ?
"""
END_LEASES = "UPDATE entries SET owner = NULL, leased_until = 0 WHERE status = 'in_progress' AND owner = ?"
FREE_PROJECTS = """
SELECT project FROM entries WHERE status = 'in_progress' AND (owner IS NULL OR leased_until <= ?)
GROUP BY project ORDER BY min(position)
"""
FREE = """
SELECT entries.position, entries.project, entries.store_id, entries.file_id, files.filename, files.bytes,
    entries.chunk_tokens, entries.overlap_tokens, entries.attempts + 1, stores.embedding
FROM entries JOIN files ON files.project = entries.project AND files.id = entries.file_id
JOIN vector_stores AS stores ON stores.project = entries.project AND stores.id = entries.store_id
WHERE entries.project = ? AND entries.status = 'in_progress' AND (owner IS NULL OR leased_until <= ?)
ORDER BY entries.position LIMIT 1
"""
TAKE = """
UPDATE entries SET owner = ?, leased_until = ?, attempts = attempts + 1
WHERE position = ? AND status = 'in_progress' RETURNING position
"""
RENEW = """
UPDATE entries SET leased_until = ? WHERE position = ? AND owner = ? AND status = 'in_progress' RETURNING position
"""
RELEASE = "UPDATE entries SET owner = NULL, leased_until = 0, attempts = attempts - 1 WHERE position = ? AND owner = ?"
NEXT_FREE = "SELECT min(leased_until) FROM entries WHERE status = 'in_progress'"
SCOPE = """
SELECT stores.position FROM vector_stores AS stores
JOIN entries ON stores.project = entries.project AND stores.id = entries.store_id WHERE entries.position = ?
"""
INSERT_CHUNK = "INSERT INTO chunks (entry, starts_at, scope, text, vectors) VALUES (?, ?, ?, ?, ?)"
FINISH = """
UPDATE entries SET status = ?, error_code = ?, error_message = ?, usage_bytes = ?, owner = NULL, leased_until = 0
WHERE position = ?
"""
USAGE = """
SELECT CAST(coalesce(sum({0} + length(vectors)), 0) AS bigint) FROM chunks WHERE entry = ?
"""
ADD_WORDS = "INSERT INTO chunk_words (rowid, scope, text) SELECT id, scope, text FROM chunks WHERE entry = ?"
DROP_WORDS = """
INSERT INTO chunk_words (chunk_words, rowid, scope, text)
SELECT 'delete', id, scope, text FROM chunks WHERE entry = ?
"""
DELETE_CHUNKS = "DELETE FROM chunks WHERE entry = ?"
TOUCH = "UPDATE vector_stores SET revision = revision + 1 WHERE project = ? AND id = ?"
TOUCH_BY_ENTRY = """
UPDATE vector_stores SET revision = revision + 1
WHERE (project, id) = (SELECT project, store_id FROM entries WHERE position = ?)
"""
DELETE_ENTRY = "DELETE FROM entries WHERE position = ? RETURNING status, project, store_id"

SEARCH_ENTRIES = """
SELECT entries.position, entries.file_id, files.filename, entries.attributes
FROM entries JOIN files ON files.project = entries.project AND files.id = entries.file_id
WHERE entries.project = ? AND entries.store_id = ? AND entries.status = 'completed'
    AND (files.expires_at IS NULL OR files.expires_at > ?)
ORDER BY entries.position
"""
VECTORS = "SELECT id, vectors FROM chunks WHERE entry = ? AND id > ? ORDER BY id LIMIT ?"
PROJECT_USAGE = "SELECT CAST(coalesce(sum(usage_bytes), 0) AS bigint) FROM entries WHERE project = ?"
TEXTS = "SELECT id, text FROM chunks WHERE id IN NUMBERS(?)"
CHUNK_ENTRIES = "SELECT id, entry FROM chunks WHERE id IN NUMBERS(?)"
ENTRY_TEXTS = "SELECT starts_at, text FROM chunks WHERE entry = ? ORDER BY id"


class ChunkTable(StepDatabase):
    """The queue of the indexing is shared by all processes that use the database, like the queue of runs."""

    async def claim_indexing(self, owner: str, *, lease: float, recent: Sequence[str] = ()) -> IndexingJob | None:
        """Claim the next entry in progress that has no live owner. Its chunks of an earlier attempt are deleted.

        `recent` are the projects that were served last, the latest at the end. Other projects come first.
        """
        return await self._write(_claim, owner, lease, recent, self._get_processes())

    async def renew_indexing(self, owner: str, position: int, *, lease: float) -> bool:
        """Renew the lease of an entry. Return False if the owner does not have it any more."""
        return await self._write(_renew, owner, position, lease)

    async def release_indexing(self, owner: str, position: int) -> None:
        """Return an entry to the queue. The attempt does not count."""
        await self._change(RELEASE, (position, owner))

    async def find_next_claim(self) -> float | None:
        """Return the time at which an entry in progress can be claimed, or None if there is none."""
        rows = await self._fetch(NEXT_FREE, ())
        found: float | None = rows[0][0]
        return found

    async def sum_usage(self, project: str) -> int:
        """Return the size of the chunks of all complete files in the vector stores of a project."""
        ((used,),) = await self._fetch(PROJECT_USAGE, (project,))
        return int(used)

    async def append_chunks(
        self,
        owner: str,
        position: int,
        chunks: Sequence[ChunkRow],
        *,
        lease: float,
        dimensions: int | None = None,
    ) -> None:
        """Save chunks of an entry and renew its lease. Raises IndexingLost if the owner does not have it.

        `dimensions` is the length of a vector. Without it, each chunk has one vector.
        """
        await self._write(_append, owner, position, chunks, lease, dimensions, self._insert_chunks)

    async def finish_indexing(
        self, owner: str, position: int, status: str, *, error: tuple[str, str] | None = None
    ) -> None:
        """Set the final status of an entry. A completed entry can be searched from now on; others lose their chunks.

        Raises IndexingLost if the owner does not have it.
        """
        await self._write(_finish, owner, position, status, error, self._usage_statement)

    async def load_search_entries(self, project: str, store_id: str) -> list[SearchEntry]:
        """Return the files of a vector store that can be searched."""
        rows = await self._fetch(SEARCH_ENTRIES, (project, store_id, int(self._now())))
        return await run_in_thread(_make_entries, rows) if len(rows) > LARGE_COUNT else _make_entries(rows)

    async def read_vectors(self, entry: int, *, after: int, limit: int) -> list[VectorRow]:
        """Return vectors of an entry's chunks in the order of their ids, from the first id greater than `after`."""
        return [VectorRow(*row) for row in await self._fetch(VECTORS, (entry, after, limit))]

    @abstractmethod
    async def match_words(
        self,
        scope: str,
        words: Sequence[str],
        *,
        limit: int,
        entries: Collection[int] | None = None,
        revision: int | None = None,
    ) -> list[TextMatch]:
        """Return the chunks of a vector store that contain any of the words, best first, by BM25.

        With `entries`, only the chunks of these entries are considered. `revision` is that of the vector store: counts
        of its words are used again as long as it is the same.
        """

    @abstractmethod
    async def count_matches(self, scope: str, words: Sequence[str], *, limit: int) -> list[int]:
        """Return the number of chunks of a vector store that contain each word. Counting stops at the limit."""

    @abstractmethod
    async def estimate_chunks(self, scope: str, *, revision: int | None = None) -> int:
        """Return the approximate number of chunks that the frequency of words is counted over."""

    async def load_chunk_texts(self, chunk_ids: Sequence[int]) -> dict[int, str]:
        return dict(await self._fetch(TEXTS, (list(chunk_ids),)))

    async def load_chunk_entries(self, chunk_ids: Sequence[int]) -> dict[int, int]:
        """Return the entries of chunks, by the ids of the chunks."""
        return dict(await self._fetch(CHUNK_ENTRIES, (list(chunk_ids),)))

    async def load_entry_texts(self, entry: int) -> list[str]:
        """Return the text of an entry in parts that do not overlap."""
        rows = await self._fetch(ENTRY_TEXTS, (entry,))
        texts: list[str] = []
        end = 0
        for starts_at, text in rows:
            texts.append(text[max(0, end - starts_at) :])
            end = starts_at + len(text)
        return [text for text in texts if text]

    # Differences of the databases

    _usage_statement: str

    def _get_processes(self) -> LiveProcesses | None:
        """Return the processes of this machine, if only they use the database."""
        return None

    async def rank_vectors(self, scope: str, query: VectorQuery) -> list[Ranked] | None:
        """Return the best chunks, compared in the database, or None if it cannot compare these vectors."""
        return None

    def _insert_chunks(
        self, position: int, scope: str, chunks: Sequence[ChunkRow], dimensions: int | None
    ) -> Steps[None]:
        rows = [(position, chunk.starts_at, scope, chunk.text, chunk.vectors) for chunk in chunks]
        yield Batch(INSERT_CHUNK, rows)


def _make_entries(rows: Sequence[Sequence[Any]]) -> list[SearchEntry]:
    return [
        SearchEntry(position, file_id, name, None if packed is None else json.loads(packed))
        for position, file_id, name, packed in rows
    ]


def delete_entries(positions: Sequence[int]) -> Steps[None]:
    """Delete entries of vector stores with their chunks.

    The entry is deleted before its chunks: from then on, no process appends any.
    """
    for position in positions:
        for status, project, store_id in (yield SqlStep(DELETE_ENTRY, (position,))):
            if status == "completed":  # only its chunks are in the text index
                yield SqliteStep(DROP_WORDS, (position,))
            yield SqlStep(TOUCH, (project, store_id))
        yield SqlStep(DELETE_CHUNKS, (position,))


def _claim(
    owner: str, lease: float, recent: Sequence[str], processes: LiveProcesses | None
) -> Steps[IndexingJob | None]:
    yield Lock("indexing")
    if processes is not None:
        for (other,) in (yield SqlStep(OWNERS, (owner,))):
            if processes.is_dead(other):
                yield SqlStep(END_LEASES, (other,))
        processes.register(owner)  # last, because it deletes the lock files of dead processes
    ((now,),) = yield Clock()
    waiting = [project for (project,) in (yield SqlStep(FREE_PROJECTS, (now,)))]
    if not waiting:
        return None
    served = {project: index for index, project in enumerate(recent)}
    project = min(waiting, key=lambda each: served.get(each, -1))  # of several, the one with the oldest entry
    rows = yield SqlStep(FREE, (project, now))
    if not rows:
        return None
    job = IndexingJob(*rows[0])
    if not (yield SqlStep(TAKE, (owner, now + lease, job.position))):
        return None  # cancelled or deleted meanwhile
    yield SqlStep(DELETE_CHUNKS, (job.position,))
    return job


def _renew(owner: str, position: int, lease: float) -> Steps[bool]:
    ((now,),) = yield Clock()
    return bool((yield SqlStep(RENEW, (now + lease, position, owner))))


def _append(
    owner: str,
    position: int,
    chunks: Sequence[ChunkRow],
    lease: float,
    dimensions: int | None,
    insert: Callable[[int, str, Sequence[ChunkRow], int | None], Steps[None]],
) -> Steps[None]:
    if not (yield from _renew(owner, position, lease)):
        raise IndexingLost("The file is not indexed by this process any more.")
    stores = yield SqlStep(SCOPE, (position,))
    if not stores:
        raise IndexingLost("The vector store was deleted.")
    yield from insert(position, make_scope(stores[0][0]), chunks, dimensions)


def make_scope(store_position: int) -> str:
    """Return the key of a vector store in the text index."""
    return f"s{store_position}"


def _finish(owner: str, position: int, status: str, error: tuple[str, str] | None, usage_statement: str) -> Steps[None]:
    # The lease is not changed in effect: the row is about to lose its owner.
    if not (yield SqlStep(RENEW, (0.0, position, owner))):
        raise IndexingLost("The file is not indexed by this process any more.")
    usage = 0
    if status == "completed":
        yield SqliteStep(ADD_WORDS, (position,))
        ((usage,),) = yield SqlStep(usage_statement, (position,))
    else:
        yield SqlStep(DELETE_CHUNKS, (position,))
    code, message = error or (None, None)
    yield SqlStep(FINISH, (status, code, message, usage, position))
    yield SqlStep(TOUCH_BY_ENTRY, (position,))
