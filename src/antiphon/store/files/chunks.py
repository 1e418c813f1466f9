"""Chunks of files: the queue of the indexing, and the data that a search reads."""

import json
import sqlite3
from collections.abc import Callable, Collection, Sequence

from antiphon.store.files.rows import ChunkRow, IndexingJob, IndexingLost, SearchEntry, TextMatch, VectorRow
from antiphon.store.sqlite.database import Database
from antiphon.store.sqlite.leases import LiveProcesses

OWNERS = "SELECT DISTINCT owner FROM entries WHERE status = 'in_progress' AND owner IS NOT NULL AND owner != ?"
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
TAKE = "UPDATE entries SET owner = ?, leased_until = ?, attempts = attempts + 1 WHERE position = ?"
RENEW = "UPDATE entries SET leased_until = ? WHERE position = ? AND owner = ? AND status = 'in_progress'"
RELEASE = "UPDATE entries SET owner = NULL, leased_until = 0, attempts = attempts - 1 WHERE position = ? AND owner = ?"
NEXT_FREE = "SELECT min(leased_until) FROM entries WHERE status = 'in_progress'"
SCOPE = "SELECT stores.position FROM vector_stores AS stores JOIN entries \
ON stores.project = entries.project AND stores.id = entries.store_id WHERE entries.position = ?"
INSERT_CHUNK = "INSERT INTO chunks (entry, starts_at, scope, text, vectors) VALUES (?, ?, ?, ?, ?)"
FINISH = """
UPDATE entries SET status = ?, error_code = ?, error_message = ?, usage_bytes = ?, owner = NULL, leased_until = 0
WHERE position = ?
"""
USAGE = """
SELECT coalesce(sum(length(CAST(text AS BLOB)) + length(vectors)), 0) FROM chunks WHERE entry = ?
"""
ADD_WORDS = "INSERT INTO chunk_words (rowid, scope, text) SELECT id, scope, text FROM chunks WHERE entry = ?"
DROP_WORDS = "INSERT INTO chunk_words (chunk_words, rowid, scope, text) \
SELECT 'delete', id, scope, text FROM chunks WHERE entry = ?"
DELETE_CHUNKS = "DELETE FROM chunks WHERE entry = ?"
TOUCH = """
UPDATE vector_stores SET revision = revision + 1
WHERE (project, id) = (SELECT project, store_id FROM entries WHERE position = ?)
"""
STATUS = "SELECT status FROM entries WHERE position = ?"
DELETE_ENTRY = "DELETE FROM entries WHERE position = ?"

SEARCH_ENTRIES = """
SELECT entries.position, entries.file_id, files.filename, entries.attributes
FROM entries JOIN files ON files.project = entries.project AND files.id = entries.file_id
WHERE entries.project = ? AND entries.store_id = ? AND entries.status = 'completed'
    AND (files.expires_at IS NULL OR files.expires_at > ?)
ORDER BY entries.position
"""
VECTORS = "SELECT id, vectors FROM chunks WHERE entry = ? AND id > ? ORDER BY id LIMIT ?"
MATCHES = """
SELECT rowid, -bm25(chunk_words, 0.0, 1.0) AS score FROM chunk_words
WHERE chunk_words MATCH ?
ORDER BY score DESC LIMIT ?
"""
LAST_CHUNK = "SELECT max(id) FROM chunks"
MATCHES_IN = """
SELECT chunks.id, -bm25(chunk_words, 0.0, 1.0) AS score
FROM chunk_words JOIN chunks ON chunks.id = chunk_words.rowid
WHERE chunk_words MATCH ? AND chunks.entry IN (SELECT value FROM json_each(?))
ORDER BY score DESC LIMIT ?
"""
TEXTS = "SELECT id, text FROM chunks WHERE id IN (SELECT value FROM json_each(?))"
ENTRY_TEXTS = "SELECT starts_at, text FROM chunks WHERE entry = ? ORDER BY id"


class ChunkTable(Database):
    """The queue of the indexing is shared by all processes that use the database, like the queue of runs."""

    async def claim_indexing(self, owner: str, *, lease: float, recent: Sequence[str] = ()) -> IndexingJob | None:
        """Claim the next entry in progress that has no live owner. Its chunks of an earlier attempt are deleted.

        `recent` are the projects that were served last, the latest at the end. Other projects come first.
        """
        parameters = owner, lease, recent, self._processes, self._now
        job: IndexingJob | None = await self._writer.submit(_claim, parameters)
        return job

    async def renew_indexing(self, owner: str, position: int, *, lease: float) -> bool:
        """Renew the lease of an entry. Return False if the owner does not have it any more."""
        renewed: int = await self._writer.submit(RENEW, (self._now() + lease, position, owner))
        return renewed > 0

    async def release_indexing(self, owner: str, position: int) -> None:
        """Return an entry to the queue. The attempt does not count."""
        await self._writer.submit(RELEASE, (position, owner))

    async def find_next_claim(self) -> float | None:
        """Return the time at which an entry in progress can be claimed, or None if there is none."""
        rows = await self._reader.submit(NEXT_FREE, ())
        found: float | None = rows[0][0]
        return found

    async def append_chunks(self, owner: str, position: int, chunks: Sequence[ChunkRow], *, lease: float) -> None:
        """Save chunks of an entry and renew its lease. Raises IndexingLost if the owner does not have it."""
        await self._writer.submit(_append, (owner, position, chunks, self._now() + lease))

    async def finish_indexing(
        self, owner: str, position: int, status: str, *, error: tuple[str, str] | None = None
    ) -> None:
        """Set the final status of an entry. A completed entry can be searched from now on; others lose their chunks.

        Raises IndexingLost if the owner does not have it.
        """
        await self._writer.submit(_finish, (owner, position, status, error))

    async def load_search_entries(self, project: str, store_id: str) -> list[SearchEntry]:
        """Return the files of a vector store that can be searched."""
        rows = await self._reader.submit(SEARCH_ENTRIES, (project, store_id, self._now()))
        return [
            SearchEntry(position, file_id, name, None if packed is None else json.loads(packed))
            for position, file_id, name, packed in rows
        ]

    async def read_vectors(self, entry: int, *, after: int, limit: int) -> list[VectorRow]:
        """Return vectors of an entry's chunks in the order of their ids, from the first id greater than `after`."""
        return [VectorRow(*row) for row in await self._reader.submit(VECTORS, (entry, after, limit))]

    async def match_words(
        self, scope: str, words: Sequence[str], *, limit: int, entries: Collection[int] | None = None
    ) -> list[TextMatch]:
        """Return the chunks of a vector store that contain any of the words, best first.

        With `entries`, only the chunks of these entries are considered.
        """
        if not words:
            return []
        terms = " OR ".join(f'"{word}"' for word in words)
        query = f'scope : "{scope}" AND text : ({terms})'
        if entries is None:
            rows = await self._reader.submit(MATCHES, (query, limit))
        else:
            rows = await self._reader.submit(MATCHES_IN, (query, json.dumps(list(entries)), limit))
        return [TextMatch(*row) for row in rows]

    async def estimate_chunks(self) -> int:
        """Return about how many chunks all vector stores have together."""
        rows = await self._reader.submit(LAST_CHUNK, ())
        return rows[0][0] or 0

    async def load_chunk_texts(self, chunk_ids: Sequence[int]) -> dict[int, str]:
        return dict(await self._reader.submit(TEXTS, (json.dumps(list(chunk_ids)),)))

    async def load_entry_texts(self, entry: int) -> list[str]:
        """Return the text of an entry in parts that do not overlap."""
        rows = await self._reader.submit(ENTRY_TEXTS, (entry,))
        texts: list[str] = []
        end = 0
        for starts_at, text in rows:
            texts.append(text[max(0, end - starts_at) :])
            end = starts_at + len(text)
        return [text for text in texts if text]


def delete_entries(connection: sqlite3.Connection, positions: Sequence[int]) -> None:
    """Delete entries of vector stores with their chunks."""
    for position in positions:
        drop_chunks(connection, position)
        connection.execute(TOUCH, (position,))
        connection.execute(DELETE_ENTRY, (position,))


def drop_chunks(connection: sqlite3.Connection, position: int) -> None:
    """Delete the chunks of an entry. Only those of a completed entry are in the text index."""
    row = connection.execute(STATUS, (position,)).fetchone()
    if row is not None and row[0] == "completed":
        connection.execute(DROP_WORDS, (position,))
    connection.execute(DELETE_CHUNKS, (position,))


def _claim(
    connection: sqlite3.Connection,
    owner: str,
    lease: float,
    recent: Sequence[str],
    processes: LiveProcesses,
    clock: Callable[[], float],
) -> IndexingJob | None:
    for (other,) in connection.execute(OWNERS, (owner,)).fetchall():
        if processes.is_dead(other):
            connection.execute(END_LEASES, (other,))
    processes.register(owner)  # last, because it deletes the lock files of dead processes
    now = clock()
    waiting = [project for (project,) in connection.execute(FREE_PROJECTS, (now,))]
    if not waiting:
        return None
    served = {project: index for index, project in enumerate(recent)}
    project = min(waiting, key=lambda each: served.get(each, -1))  # of several, the one with the oldest entry
    row = connection.execute(FREE, (project, now)).fetchone()
    if row is None:
        return None
    job = IndexingJob(*row)
    connection.execute(TAKE, (owner, now + lease, job.position))
    connection.execute(DELETE_CHUNKS, (job.position,))
    return job


def _append(
    connection: sqlite3.Connection, owner: str, position: int, chunks: Sequence[ChunkRow], leased_until: float
) -> None:
    if not connection.execute(RENEW, (leased_until, position, owner)).rowcount:
        raise IndexingLost("The file is not indexed by this process any more.")
    scope = _find_scope(connection, position)
    connection.executemany(
        INSERT_CHUNK, [(position, chunk.starts_at, scope, chunk.text, chunk.vectors) for chunk in chunks]
    )


def _find_scope(connection: sqlite3.Connection, position: int) -> str:
    row = connection.execute(SCOPE, (position,)).fetchone()
    if row is None:
        raise IndexingLost("The vector store was deleted.")
    return make_scope(row[0])


def make_scope(store_position: int) -> str:
    """Return the key of a vector store in the text index."""
    return f"s{store_position}"


def _finish(
    connection: sqlite3.Connection, owner: str, position: int, status: str, error: tuple[str, str] | None
) -> None:
    # The lease is not changed in effect: the row is about to lose its owner.
    if not connection.execute(RENEW, (0.0, position, owner)).rowcount:
        raise IndexingLost("The file is not indexed by this process any more.")
    usage = 0
    if status == "completed":
        connection.execute(ADD_WORDS, (position,))
        (usage,) = connection.execute(USAGE, (position,)).fetchone()
    else:
        connection.execute(DELETE_CHUNKS, (position,))
    code, message = error or (None, None)
    connection.execute(FINISH, (status, code, message, usage, position))
    connection.execute(TOUCH, (position,))
