"""A store on PostgreSQL."""

from collections.abc import AsyncIterator

import pytest

pytest.importorskip("asyncpg")

from antiphon.store.postgres.store import PostgresStore


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    await store.open()
    yield store
    await store.close()
