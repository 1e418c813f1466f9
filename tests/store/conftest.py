import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from antiphon.protocol.codec import decode_items
from antiphon.protocol.items import Item, Message
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Store, StoredResponse
from antiphon.store.location import locate_store

MakeStored = Callable[..., StoredResponse]
MakeItems = Callable[..., list[Item | Unknown]]


class Clock:
    """A clock that stands still until a test sets it."""

    time = 1_700_000_000

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_stored() -> MakeStored:
    def make(
        response_id: str,
        *,
        previous: str | None = None,
        text: str = "Hello",
        status: str = "completed",
        expires_at: int | None = None,
    ) -> StoredResponse:
        return StoredResponse(
            response=Response(
                id=response_id,
                created_at=1_700_000_000,
                status=status,
                model="scripted",
                previous_response_id=previous,
                output=decode_items(
                    b'[{"type":"message","id":"msg_%b","role":"assistant","status":"completed",'
                    b'"content":[{"type":"output_text","text":"%b","annotations":[]}]}]'
                    % (response_id.encode(), text.encode())
                ),
            ),
            input=decode_items(b'[{"type":"message","role":"user","content":"%b?"}]' % text.encode()),
            expires_at=expires_at,
        )

    return make


@pytest.fixture
def make_items() -> MakeItems:
    def make(*item_ids: str) -> list[Item | Unknown]:
        return [Message("user", f"I am {item_id}.", item_id) for item_id in item_ids]

    return make


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an empty SQLite store. Copying it takes less time than all migrations."""
    path = tmp_path_factory.mktemp("empty") / "store.db"

    async def create() -> None:
        store = locate_store(f"sqlite:///{path}")
        await store.open()
        await store.close()

    asyncio.run(create())
    return path


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres_url")
        return url
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("empty_database"), tmp_path / "store.db")
        return f"sqlite:///{tmp_path}/store.db"
    return "memory:"


@pytest.fixture
async def store(store_url: str, clock: Clock) -> AsyncIterator[Store]:
    store = locate_store(store_url, now=clock)
    await store.open()
    yield store
    await store.close()
