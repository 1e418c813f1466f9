"""The database of files and vector stores in SQLite: a file of its own, beside the contents of the files.

It is separate from the store of responses: indexing writes much, and a response must not wait for it.
"""

from collections.abc import Collection, Sequence

from antiphon.store.files.chunks import USAGE
from antiphon.store.files.database import FileDatabase
from antiphon.store.files.rows import TextMatch
from antiphon.store.sqlite.leases import LiveProcesses
from antiphon.store.sqlite.steps import SqliteSteps

MATCHES = """
SELECT rowid, -bm25(chunk_words, 0.0, 1.0) AS score FROM chunk_words
WHERE chunk_words MATCH ?
ORDER BY score DESC LIMIT ?
"""
COUNT = "(SELECT count(*) FROM (SELECT 1 FROM chunk_words WHERE chunk_words MATCH ? LIMIT ?))"
LAST_CHUNK = "SELECT max(id) FROM chunks"
MATCHES_IN = """
SELECT chunks.id, -bm25(chunk_words, 0.0, 1.0) AS score
FROM chunk_words JOIN chunks ON chunks.id = chunk_words.rowid
WHERE chunk_words MATCH ? AND chunks.entry IN NUMBERS(?)
ORDER BY score DESC LIMIT ?
"""


class SqliteFileDatabase(SqliteSteps, FileDatabase):
    schema = "files"
    _usage_statement = USAGE.format("length(CAST(text AS blob))")

    async def match_words(
        self,
        scope: str,
        words: Sequence[str],
        *,
        limit: int,
        entries: Collection[int] | None = None,
        revision: int | None = None,
    ) -> list[TextMatch]:
        if not words:
            return []
        query = _make_query(scope, words)
        if entries is None:
            rows = await self._fetch(MATCHES, (query, limit))
        else:
            rows = await self._fetch(MATCHES_IN, (query, list(entries), limit))
        return [TextMatch(*row) for row in rows]

    async def count_matches(self, scope: str, words: Sequence[str], *, limit: int) -> list[int]:
        if not words:
            return []
        parameters = [value for word in words for value in (_make_query(scope, [word]), limit)]
        (counts,) = await self._fetch(f"SELECT {', '.join([COUNT] * len(words))}", tuple(parameters))
        return list(counts)

    async def estimate_chunks(self, scope: str, *, revision: int | None = None) -> int:
        """Return the approximate number of chunks of all vector stores together."""
        rows = await self._fetch(LAST_CHUNK, ())
        return rows[0][0] or 0

    def _get_processes(self) -> LiveProcesses:
        return self._processes


def _make_query(scope: str, words: Sequence[str]) -> str:
    """Return the query for the chunks of a scope that contain any of the words."""
    terms = " OR ".join(f'"{word}"' for word in words)
    return f'scope : "{scope}" AND text : ({terms})'
