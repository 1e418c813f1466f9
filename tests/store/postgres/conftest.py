"""A store on PostgreSQL."""

from collections.abc import AsyncIterator, Iterator

import pytest

pytest.importorskip("asyncpg")

from antiphon.store.postgres.store import PostgresStore
from support.postgres_server import EmptySchema


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def other_database(postgres_server: str, postgres_schema: EmptySchema) -> Iterator[str]:
    """The URL of another database of the same server."""
    name = f"other_{postgres_schema.name}"
    postgres_schema.execute(f"CREATE DATABASE {name}")
    yield f"{postgres_server.rpartition('/')[0]}/{name}"
    postgres_schema.execute(f"DROP DATABASE {name} WITH (FORCE)")
