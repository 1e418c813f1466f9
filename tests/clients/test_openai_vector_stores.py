"""Vector stores with the OpenAI SDK for Python against a real server with the local embedding model."""

from typing import Any

import openai
import pytest

pytest.importorskip("onnxruntime")

RIVERS = "The Danube flows through Vienna and Budapest into the Black Sea."
METALS = "Mercury is the only metal that is liquid at room temperature."
BIRDS = "The Arctic tern migrates from one polar region to the other every year."


@pytest.fixture(scope="module")
def client(serve: Any) -> Any:
    return serve({"models": ["scripted"]}).client()


@pytest.fixture(scope="module")
def filled(client: Any) -> Any:
    """A vector store with three files."""
    store = client.vector_stores.create(name="facts")
    for name, text, attributes in (
        ("rivers.txt", RIVERS, {"topic": "geography", "year": 2020, "checked": True}),
        ("metals.md", METALS, {"topic": "chemistry", "year": 2021}),
        ("birds.txt", BIRDS, {"topic": "biology", "year": 2022}),
    ):
        file = client.vector_stores.files.upload_and_poll(
            vector_store_id=store.id, file=(name, text.encode()), attributes=attributes
        )
        assert (file.status, file.last_error) == ("completed", None)
    return store


def upload(client: Any, name: str, content: bytes = b"Some text.") -> str:
    file_id: str = client.files.create(file=(name, content), purpose="assistants").id
    return file_id


def test_new_store_is_complete_and_has_the_fields_of_the_api(client: Any) -> None:
    store = client.vector_stores.create(
        name="notes",
        description="Notes of a year",
        metadata={"team": "a"},
        expires_after={"anchor": "last_active_at", "days": 7},
    )
    assert store.id.startswith("vs_")
    assert store.to_dict() == {
        "id": store.id,
        "object": "vector_store",
        "created_at": store.created_at,
        "last_active_at": store.created_at,
        "name": "notes",
        "description": "Notes of a year",
        "metadata": {"team": "a"},
        "status": "completed",
        "usage_bytes": 0,
        "file_counts": {"in_progress": 0, "completed": 0, "failed": 0, "cancelled": 0, "total": 0},
        "expires_after": {"anchor": "last_active_at", "days": 7},
        "expires_at": store.created_at + 7 * 24 * 3600,
    }
    changed = client.vector_stores.update(store.id, name="other", expires_after=None, metadata={"team": "b"})
    assert (changed.name, changed.expires_after, changed.metadata) == ("other", None, {"team": "b"})
    assert client.vector_stores.retrieve(store.id).name == "other"
    deleted = client.vector_stores.delete(store.id)
    assert deleted.to_dict() == {"id": store.id, "object": "vector_store.deleted", "deleted": True}
    with pytest.raises(openai.NotFoundError) as caught:
        client.vector_stores.retrieve(store.id)
    assert caught.value.param == "vector_store_id"


def test_list_of_stores_has_pages_in_both_directions(client: Any) -> None:
    created = [client.vector_stores.create(name=str(index)).id for index in range(4)]
    listed = [store.id for store in client.vector_stores.list(limit=2)]
    assert listed[:4] == created[::-1]
    page = client.vector_stores.list(order="asc", after=created[0], limit=2)
    assert ([store.id for store in page.data], page.has_more) == (created[1:3], True)
    page = client.vector_stores.list(order="desc", before=created[0], limit=2)
    assert [store.id for store in page.data] == [created[2], created[1]]


def test_search_ranks_the_matching_file_first(client: Any, filled: Any) -> None:
    page = client.vector_stores.search(filled.id, query="Which river passes the capital of Austria?")
    best = page.data[0]
    assert (best.filename, best.content[0].text, best.attributes) == (
        "rivers.txt",
        RIVERS,
        {"topic": "geography", "year": 2020.0, "checked": True},
    )
    assert len(page.data) == 3
    scores = [result.score for result in page.data]
    assert scores == sorted(scores, reverse=True)
    assert 0 <= scores[-1] <= scores[0] <= 1
    assert page.model_extra["search_query"] == ["Which river passes the capital of Austria?"]


def test_search_with_several_queries_finds_both_answers(client: Any, filled: Any) -> None:
    page = client.vector_stores.search(filled.id, query=["liquid metal", "bird migration"], max_num_results=2)
    assert {result.filename for result in page.data} == {"metals.md", "birds.txt"}


def test_search_threshold_drops_weak_results(client: Any, filled: Any) -> None:
    query = "Which metal is liquid at room temperature?"
    page = client.vector_stores.search(filled.id, query=query, ranking_options={"score_threshold": 0.5})
    assert [result.filename for result in page.data] == ["metals.md"]


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({"type": "eq", "key": "topic", "value": "biology"}, {"birds.txt"}),
        ({"type": "ne", "key": "topic", "value": "biology"}, {"rivers.txt", "metals.md"}),
        ({"type": "gte", "key": "year", "value": 2021}, {"metals.md", "birds.txt"}),
        ({"type": "lt", "key": "year", "value": 2021}, {"rivers.txt"}),
        ({"type": "in", "key": "year", "value": [2020, 2022]}, {"rivers.txt", "birds.txt"}),
        ({"type": "nin", "key": "topic", "value": ["biology", "chemistry"]}, {"rivers.txt"}),
        ({"type": "eq", "key": "checked", "value": True}, {"rivers.txt"}),
        ({"type": "eq", "key": "missing", "value": 1}, set()),
        ({"type": "gt", "key": "topic", "value": 5}, set()),
        (
            {
                "type": "or",
                "filters": [
                    {"type": "eq", "key": "topic", "value": "biology"},
                    {
                        "type": "and",
                        "filters": [
                            {"type": "gt", "key": "year", "value": 2019},
                            {"type": "lte", "key": "year", "value": 2020},
                        ],
                    },
                ],
            },
            {"rivers.txt", "birds.txt"},
        ),
    ],
)
def test_search_filter_selects_files_by_attributes(client: Any, filled: Any, filters: Any, found: set[str]) -> None:
    page = client.vector_stores.search(filled.id, query="river", filters=filters)
    assert {result.filename for result in page.data} == found


def test_changed_attributes_and_detached_files_change_the_search(client: Any) -> None:
    store = client.vector_stores.create()
    file = client.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=("a.txt", RIVERS.encode()))
    only_new = {"type": "eq", "key": "state", "value": "new"}
    assert client.vector_stores.search(store.id, query="river", filters=only_new).data == []
    changed = client.vector_stores.files.update(file.id, vector_store_id=store.id, attributes={"state": "new"})
    assert changed.attributes == {"state": "new"}
    assert len(client.vector_stores.search(store.id, query="river", filters=only_new).data) == 1
    deleted = client.vector_stores.files.delete(file.id, vector_store_id=store.id)
    assert deleted.to_dict() == {"id": file.id, "object": "vector_store.file.deleted", "deleted": True}
    assert client.vector_stores.search(store.id, query="river").data == []
    assert client.files.retrieve(file.id).id == file.id
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.files.retrieve(file.id, vector_store_id=store.id)


def test_deleted_file_leaves_every_store(client: Any) -> None:
    file_id = upload(client, "a.txt", BIRDS.encode())
    stores = [client.vector_stores.create(file_ids=[file_id]) for _ in range(2)]
    for store in stores:
        assert client.vector_stores.files.poll(file_id, vector_store_id=store.id).status == "completed"
    client.files.delete(file_id)
    for store in stores:
        shown = client.vector_stores.retrieve(store.id)
        assert (shown.file_counts.total, shown.usage_bytes) == (0, 0)
        assert client.vector_stores.search(store.id, query="tern").data == []


def test_batch_counts_completed_and_failed_files(client: Any) -> None:
    store = client.vector_stores.create()
    good = upload(client, "good.txt", METALS.encode())
    bad = upload(client, "bad.bin", bytes(range(256)))
    batch = client.vector_stores.file_batches.create_and_poll(
        store.id,
        files=[
            {"file_id": good, "attributes": {"kind": "good"}},
            {
                "file_id": bad,
                "chunking_strategy": {
                    "type": "static",
                    "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 50},
                },
            },
        ],
        file_ids=openai.omit,
    )
    assert batch.id.startswith("vsfb_")
    counts = {"in_progress": 0, "completed": 1, "failed": 1, "cancelled": 0, "total": 2}
    assert (batch.status, batch.file_counts.to_dict()) == ("completed", counts)
    listed = list(client.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id, filter="failed"))
    assert [(file.id, file.usage_bytes, file.last_error.code) for file in listed] == [(bad, 0, "unsupported_file")]
    assert listed[0].chunking_strategy.static.max_chunk_size_tokens == 100
    shown = client.vector_stores.retrieve(store.id)
    assert (shown.status, shown.file_counts.to_dict()) == ("completed", counts)
    assert shown.usage_bytes > len(METALS)


def test_batch_upload_helper_indexes_all_files(client: Any) -> None:
    store = client.vector_stores.create()
    files = [(f"{index}.txt", f"{RIVERS} {index}".encode()) for index in range(3)]
    batch = client.vector_stores.file_batches.upload_and_poll(store.id, files=files)
    assert (batch.status, batch.file_counts.completed) == ("completed", 3)
    assert client.vector_stores.file_batches.retrieve(batch.id, vector_store_id=store.id) == batch
    assert len(list(client.vector_stores.files.list(store.id, limit=2, filter="completed"))) == 3


def test_cancelled_batch_leaves_its_files_cancelled(client: Any) -> None:
    store = client.vector_stores.create()
    content = " ".join(f"word{number}" for number in range(20_000)).encode()
    file_ids = [upload(client, f"{index}.txt", content) for index in range(3)]
    batch = client.vector_stores.file_batches.create(store.id, file_ids=file_ids)
    assert (batch.status, batch.file_counts.total) == ("in_progress", 3)
    cancelled = client.vector_stores.file_batches.cancel(batch.id, vector_store_id=store.id)
    assert (cancelled.status, cancelled.file_counts.in_progress) == ("cancelled", 0)
    assert cancelled.file_counts.cancelled > 0
    last = client.vector_stores.files.poll(file_ids[-1], vector_store_id=store.id)
    assert last.status == "cancelled"


def test_content_of_a_file_is_its_text_without_overlaps(client: Any) -> None:
    store = client.vector_stores.create()
    text = "\n".join(f"Line {number} of the long document." for number in range(60))
    chunking = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 50}}
    file = client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("long.md", text.encode()), chunking_strategy=chunking
    )
    parts = client.vector_stores.files.content(file.id, vector_store_id=store.id).data
    assert len(parts) > 5
    assert "".join(part.text for part in parts) == text


def test_file_in_progress_has_a_polling_header(client: Any) -> None:
    store = client.vector_stores.create()
    file_id = upload(client, "a.txt", RIVERS.encode())
    raw = client.vector_stores.files.with_raw_response.create(store.id, file_id=file_id)
    assert raw.headers["openai-poll-after-ms"] == "100"
    assert client.vector_stores.files.poll(file_id, vector_store_id=store.id).status == "completed"
    raw = client.vector_stores.files.with_raw_response.retrieve(file_id, vector_store_id=store.id)
    assert "openai-poll-after-ms" not in raw.headers
