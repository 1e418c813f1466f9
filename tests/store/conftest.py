from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from antiphon.protocol.codec import decode_items
from antiphon.protocol.response import Response
from antiphon.store.base import Store, StoredResponse
from antiphon.store.location import locate_store

MakeStored = Callable[..., StoredResponse]


@pytest.fixture
def make_stored() -> MakeStored:
    def make(response_id: str, *, previous: str | None = None, text: str = "Hello") -> StoredResponse:
        return StoredResponse(
            response=Response(
                id=response_id,
                created_at=1_700_000_000,
                status="completed",
                model="scripted",
                previous_response_id=previous,
                output=decode_items(
                    b'[{"type":"message","id":"msg_%b","role":"assistant","status":"completed",'
                    b'"content":[{"type":"output_text","text":"%b","annotations":[]}]}]'
                    % (response_id.encode(), text.encode())
                ),
            ),
            input=decode_items(b'[{"type":"message","role":"user","content":"%b?"}]' % text.encode()),
        )

    return make


@pytest.fixture(params=["memory", "sqlite"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/store.db"}[request.param]


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    store = locate_store(store_url)
    await store.open()
    yield store
    await store.close()
