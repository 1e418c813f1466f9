"""Vectors in PostgreSQL with the extension pgvector, for vector stores that do not fit the memory of a server.

The vectors are compared one by one. With the filters of a search, an index of approximate neighbours would miss
some.
The extension may be in any schema, so its type and operators are written with their schema.
"""

import logging
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from antiphon.store.files.rows import ChunkRow, VectorQuery
from antiphon.store.postgres.connection import run_transaction
from antiphon.store.postgres.driver import asyncpg

if TYPE_CHECKING:
    from asyncpg import Connection

logger = logging.getLogger(__name__)

# The type for vectors of 16-bit floats exists since pgvector 0.7.
_MIN_VERSION = (0, 7)
_MAX_DIMENSIONS = 16_000

_FIND = """
SELECT quote_ident(nspname) AS schema, extversion AS version
FROM pg_extension JOIN pg_namespace ON pg_namespace.oid = extnamespace WHERE extname = 'vector'
"""
_IS_AVAILABLE = "SELECT EXISTS (SELECT 1 FROM pg_available_extensions WHERE name = 'vector')"
# One key for the whole database, in which an extension exists only once.
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('antiphon pgvector', 0))"
_HAS_PUBLIC = "SELECT has_schema_privilege('public', 'CREATE') FROM pg_namespace WHERE nspname = 'public'"
_HAS_TABLE = """
SELECT EXISTS (SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'chunk_vectors')
"""
_CREATE_TABLE = """
CREATE TABLE chunk_vectors (
    chunk_id bigint NOT NULL REFERENCES chunks ON DELETE CASCADE,
    entry bigint NOT NULL,
    scope text COLLATE "C" NOT NULL,
    vector {schema}.halfvec NOT NULL
);
CREATE INDEX chunk_vectors_by_scope ON chunk_vectors (scope);
CREATE INDEX chunk_vectors_by_chunk ON chunk_vectors (chunk_id);
CREATE INDEX chunk_vectors_by_entry ON chunk_vectors (entry);
"""
_INSERT = "INSERT INTO chunk_vectors (chunk_id, entry, scope, vector) VALUES (?, ?, ?, ?::text::{schema}.halfvec)"
# Parameters: the scope, the query, the chunks with matching words, their scores, the entries, the two weights, the
# threshold and the number of results. The query is parsed once, by a subquery. Windows are a step of their own so that
# vectors are not sorted to group them.
_RANK = """
WITH matches AS MATERIALIZED (
    SELECT * FROM unnest($3::bigint[], $4::float8[]) AS matches (chunk_id, score)
), windows AS MATERIALIZED (
    SELECT chunk_id, entry,
        -(vector OPERATOR({schema}.<#>) (SELECT $2::text::{schema}.halfvec)) AS similarity
    FROM chunk_vectors WHERE scope = $1 AND entry = ANY($5::bigint[])
), compared AS MATERIALIZED (
    SELECT chunk_id, entry, max(similarity) AS similarity FROM windows GROUP BY chunk_id, entry
), scores AS (
    SELECT greatest(0, least(1, similarity)) * $6::float8 + coalesce(score, 0) * $7::float8 AS score, chunk_id, entry
    FROM compared LEFT JOIN matches USING (chunk_id)
)
SELECT least(1, score), chunk_id, entry FROM scores WHERE score >= $8::float8 ORDER BY score DESC, chunk_id LIMIT $9
"""
COUNT_MISSING = """
SELECT count(*) FROM unnest(?::bigint[]) AS position
WHERE NOT EXISTS (SELECT 1 FROM chunk_vectors WHERE chunk_vectors.entry = position)
"""


class VectorTable:
    """The statements for the table of vectors. Their texts depend on the schema of the extension."""

    def __init__(self, schema: str) -> None:
        self.insert = _INSERT.format(schema=schema)
        self.rank = _RANK.format(schema=schema)

    def list_rows(
        self, ids: Sequence[int], entry: int, scope: str, chunks: Sequence[ChunkRow], dimensions: int | None
    ) -> list[tuple[object, ...]]:
        """Return the rows of the vectors of chunks. Without `dimensions`, each chunk has one vector."""
        return [
            (chunk_id, entry, scope, vector)
            for chunk_id, chunk in zip(ids, chunks, strict=True)
            for vector in _split_vectors(chunk.vectors, dimensions)
        ]


async def open_vector_table(connection: "Connection[Any]") -> VectorTable | None:
    """Return the table of vectors, or None if the database does not have pgvector. Create both if that is allowed."""
    try:
        schema = await _find_extension(connection)
        if schema is None:
            return None
        if not await connection.fetchval(_HAS_TABLE):
            async with run_transaction(connection):
                await connection.execute(_LOCK)
                if not await connection.fetchval(_HAS_TABLE):
                    await connection.execute(_CREATE_TABLE.format(schema=schema))
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        logger.info("pgvector is not used: %s", " ".join(str(error).split()))
        return None
    return VectorTable(schema)


async def _find_extension(connection: "Connection[Any]") -> str | None:
    """Return the schema of the extension. It is created if the server has it."""
    found = await connection.fetchrow(_FIND)
    if found is None:
        if not await connection.fetchval(_IS_AVAILABLE):
            return None
        async with run_transaction(connection):
            await connection.execute(_LOCK)
            # Not in the schema of the store: if that is dropped, other stores must not lose their vectors.
            target = " SCHEMA public" if await connection.fetchval(_HAS_PUBLIC) else ""
            await connection.execute(f"CREATE EXTENSION IF NOT EXISTS vector{target}")
        found = await connection.fetchrow(_FIND)
    version = tuple(int(part) for part in found["version"].split(".")[:2])
    if version < _MIN_VERSION:
        logger.info("pgvector is not used: version %s is too old", found["version"])
        return None
    schema: str = found["schema"]
    return schema


def make_parameters(scope: str, query: VectorQuery) -> tuple[object, ...]:
    """Return the parameters of `VectorTable.rank`."""
    total = query.embedding_weight + query.text_weight
    return (
        scope,
        f"[{','.join(repr(value) for value in query.vector)}]",
        list(query.text_scores),
        list(query.text_scores.values()),
        list(query.entries),
        query.embedding_weight / total,
        query.text_weight / total,
        max(query.threshold, 0.0),
        query.limit,
    )


def _split_vectors(vectors: bytes, dimensions: int | None) -> list[str]:
    """Return stored vectors as text. Vectors that are too long for the type are left out."""
    count = dimensions or len(vectors) // 2
    if not 0 < count <= _MAX_DIMENSIONS:
        return []
    return [f"[{','.join(map(repr, values))}]" for values in struct.iter_unpack(f"<{count}e", vectors) if any(values)]
