"""Files and vector stores in PostgreSQL, with connections of their own: indexing must not delay responses."""

from collections.abc import Collection, Sequence

from antiphon.bounds import remove_oldest
from antiphon.errors import ServerError
from antiphon.retrieval.ranking import Ranked
from antiphon.store.files.chunks import USAGE
from antiphon.store.files.database import FileDatabase
from antiphon.store.files.rows import ChunkRow, TextMatch, VectorQuery
from antiphon.store.postgres.contents import PostgresContents
from antiphon.store.postgres.database import PostgresDatabase
from antiphon.store.postgres.driver import asyncpg
from antiphon.store.postgres.steps import PostgresSteps
from antiphon.store.postgres.vectors import COUNT_MISSING, VectorTable, make_parameters, open_vector_table
from antiphon.store.postgres.words import (
    COUNT_MATCHES,
    COUNT_WORDS,
    INSERT_WORDS,
    MATCH_WORDS,
    make_scope_word,
    split_text,
)
from antiphon.store.sql_steps import Batch, SqlStep, Steps

NEW_IDS = "SELECT nextval(pg_get_serial_sequence('chunks', 'id')) FROM generate_series(1, ?)"
INSERT_CHUNK = "INSERT INTO chunks (id, entry, starts_at, scope, text, vectors) VALUES (?, ?, ?, ?, ?, ?)"
HAS_FILES = "SELECT EXISTS (SELECT 1 FROM files) OR EXISTS (SELECT 1 FROM contents)"
KNOWN_IN_CONTAINERS = "SELECT content FROM container_files WHERE content IN TEXTS(?)"
_MAX_COUNTS = 10_000


class PostgresFileDatabase(PostgresSteps, FileDatabase):
    _usage_statement = USAGE.format("octet_length(text)")
    _vector_table: VectorTable | None = None

    async def open(self) -> None:
        await super().open()
        self._word_counts: dict[str, tuple[int | None, int, float]] = {}
        try:
            async with self._reader.use() as connection:
                self._vector_table = await open_vector_table(connection)
        except BaseException:
            await self.close()
            raise

    async def find_unknown_contents(self, content_ids: Sequence[str]) -> list[str]:
        """Return the ids that no file, part of an upload or file of a container has."""
        if not content_ids:
            return []
        unknown = await super().find_unknown_contents(content_ids)
        rows = await self._fetch(KNOWN_IN_CONTAINERS, (unknown,))
        known = {content_id for (content_id,) in rows}
        return [content_id for content_id in unknown if content_id not in known]

    @property
    def contents(self) -> PostgresContents:
        """The contents of files. `open` must have been called."""
        return PostgresContents(self._writer, self._reader)

    async def match_words(
        self,
        scope: str,
        words: Sequence[str],
        *,
        limit: int,
        entries: Collection[int] | None = None,
        revision: int | None = None,
    ) -> list[TextMatch]:
        terms = [term for word in words for term in split_text(word)]
        if not terms:
            return []
        allowed = None if entries is None else list(entries)
        parameters = limit, terms, _quote(scope), allowed, *await self._count_words(scope, revision)
        return [TextMatch(*row) for row in await self._reader.submit(MATCH_WORDS, parameters)]

    async def count_matches(self, scope: str, words: Sequence[str], *, limit: int) -> list[int]:
        terms = [" ".join(split_text(word)) for word in words]
        return [count for (count,) in await self._reader.submit(COUNT_MATCHES, (terms, _quote(scope), limit))]

    async def estimate_chunks(self, scope: str, *, revision: int | None = None) -> int:
        return (await self._count_words(scope, revision))[0]

    async def _count_words(self, scope: str, revision: int | None) -> tuple[int, float]:
        """Return the number of chunks of a scope and the average of their lengths. All are read once per revision."""
        found = self._word_counts.get(scope)
        if found is None or revision is None or found[0] != revision:
            ((chunks, length),) = await self._reader.submit(COUNT_WORDS, (_quote(scope),))
            found = self._word_counts[scope] = (revision, chunks, length)
            remove_oldest(self._word_counts, _MAX_COUNTS)
        return found[1:]

    async def rank_vectors(self, scope: str, query: VectorQuery) -> list[Ranked] | None:
        table = self._vector_table
        if table is None:
            return None
        # Files that were indexed before the extension was installed have no rows.
        ((missing,),) = await self._fetch(COUNT_MISSING, (list(query.entries),))
        if missing:
            return None
        try:
            rows = await self._reader.submit(table.rank, make_parameters(scope, query))
        except ServerError as error:
            if isinstance(error.__cause__, asyncpg.DataError):  # vectors of different lengths
                return None
            raise
        return [Ranked(*row) for row in rows]

    def _insert_chunks(
        self, position: int, scope: str, chunks: Sequence[ChunkRow], dimensions: int | None
    ) -> Steps[None]:
        ids = [number for (number,) in (yield SqlStep(NEW_IDS, (len(chunks),)))]
        inserted = [
            (number, position, chunk.starts_at, scope, chunk.text, chunk.vectors)
            for number, chunk in zip(ids, chunks, strict=True)
        ]
        yield Batch(INSERT_CHUNK, inserted)
        texts = [split_text(chunk.text) for chunk in chunks]
        words = [
            (number, position, len(text) + 1, " ".join(text), make_scope_word(scope))
            for number, text in zip(ids, texts, strict=True)
        ]
        yield Batch(INSERT_WORDS, words)
        if self._vector_table is not None:
            rows = self._vector_table.list_rows(ids, position, scope, chunks, dimensions)
            yield Batch(self._vector_table.insert, rows)


def _quote(scope: str) -> str:
    """Return the query for the chunks of a scope."""
    return f"'{make_scope_word(scope)}'"


class PostgresFileCheck(PostgresDatabase):
    """The part of the store that finds out whether there are files."""

    async def has_files(self) -> bool:
        ((exists,),) = await self._reader.submit(HAS_FILES)
        return bool(exists)
