"""Embeddings of an OpenAI-compatible server: batches, errors, rate limits and wrong answers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

import numpy as np

from antiphon.config.limits import FileLimits
from antiphon.config.settings import EmbeddingSettings
from antiphon.engine.files.embedding import EndpointEmbedder
from antiphon.engine.files.service import FileService
from antiphon.errors import AntiphonError, InvalidRequest, UpstreamError
from antiphon.protocol.files import FileForm
from antiphon.protocol.vector_stores import CreateFileBatch, CreateVectorStore, SearchVectorStore
from antiphon.store.files.location import FileLocation
from support.upstream_server import Reply, UpstreamServer, json_of, serve

KEY = "embeddings-key-1234"


def embed(*vectors: list[float], order: list[int] | None = None) -> Reply:
    """Return an answer with these vectors, listed in this order."""
    listed = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    data = [listed[index] for index in order] if order else listed
    return json_of({"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 3, "total_tokens": 3}})


@asynccontextmanager
async def open_embedder(server: UpstreamServer, **options: Any) -> AsyncIterator[EndpointEmbedder]:
    settings = EmbeddingSettings(base_url=server.url, model="m-embed", api_key=KEY, **options)
    embedder = EndpointEmbedder(settings)
    yield embedder
    await embedder.close()


async def test_texts_are_sent_in_batches_and_vectors_have_unit_length() -> None:
    replies = [embed([3.0, 4.0], [0.0, 2.0], order=[1, 0]), embed([1.0, 0.0])]
    async with serve(replies) as server, open_embedder(server, batch=2, dimensions=2) as embedder:
        stored = await embedder.embed_chunks(["a", "b", "c"])
    assert [np.frombuffer(each, "<f2").tolist() for each in stored] == [
        pytest.approx([0.6, 0.8], abs=1e-3),
        [0.0, 1.0],
        [1.0, 0.0],
    ]
    assert [request.json for request in server.requests] == [
        {"model": "m-embed", "input": ["a", "b"], "encoding_format": "float", "dimensions": 2},
        {"model": "m-embed", "input": ["c"], "encoding_format": "float", "dimensions": 2},
    ]
    assert server.requests[0].path == "/v1/embeddings"
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


async def test_rate_limit_is_retried_after_its_time() -> None:
    limited = json_of({"error": {"message": "slow down"}}, 429, Retry_After="0")
    async with serve([limited, embed([0.0, 2.0])]) as server, open_embedder(server) as embedder:
        assert (await embedder.embed_query("a")).tolist() == [0.0, 1.0]
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (embed([1.0, 0.0], [1.0, 0.0]), "returned 2 vectors for 1 texts"),
        (embed(), "returned 0 vectors for 1 texts"),
        (embed([]), "returned 1 vectors for 1 texts"),
        (embed([1.0, 0.0, 0.0]), "a vector of 3 dimensions instead of 2"),
        (json_of({"data": [{"index": 0, "embedding": "AAAA"}]}), "no list of embeddings"),
        (json_of({"object": "list"}), "no list of embeddings"),
        (Reply(body=b"\xff<html>"), "no list of embeddings"),
        (Reply(body=b'{"data": [], "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"), "no list of embeddings"),
    ],
)
async def test_wrong_answer_is_an_upstream_error(reply: Reply, message: str) -> None:
    async with serve([embed([1.0, 0.0]), reply]) as server, open_embedder(server) as embedder:
        await embedder.embed_query("first")
        with pytest.raises(UpstreamError, match=message):
            await embedder.embed_query("second")


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_refusal_of_the_server_has_its_message_and_no_key(status: int) -> None:
    refusal = json_of({"error": {"message": f"no such model, key {KEY}", "type": "invalid_request_error"}}, status)
    async with serve([refusal]) as server, open_embedder(server) as embedder:
        with pytest.raises(AntiphonError) as refused:
            await embedder.embed_query("a")
    assert KEY not in refused.value.message


async def make_store(service: FileService, text: str) -> tuple[str, Any]:
    """Index a file in a new vector store. Return the id of the store, and the file of the store."""
    writer = await service.files.start_upload()
    await writer.write(text.encode())
    file = await service.files.create("p", writer, "a.txt", FileForm("assistants"))
    store = await service.vector_stores.create("p", CreateVectorStore())
    batch = await service.vector_stores.create_batch("p", store.id, CreateFileBatch(file_ids=[file.id]))
    while batch.file_counts.in_progress:
        batch = await service.vector_stores.retrieve_batch("p", store.id, batch.id)
    return store.id, await service.vector_stores.retrieve_file("p", store.id, file.id)


async def test_file_is_indexed_and_found_with_a_server_of_embeddings(tmp_path: Path) -> None:
    pytest.importorskip("selectolax")
    refusal = json_of({"error": {"message": "input too long"}}, 400)
    replies = [embed([0.0, 3.0]), embed([0.0, 1.0]), refusal, embed([1.0, 0.0, 0.0])]
    async with serve(replies) as server:
        settings = EmbeddingSettings(base_url=server.url, model="m")
        location = FileLocation(tmp_path)
        service = FileService(location, limits=FileLimits(), embeddings=settings)
        store_id, file = await make_store(service, "The Danube flows through Vienna.")
        assert (file.status, file.last_error) == ("completed", None)
        page = await service.vector_stores.search("p", store_id, SearchVectorStore(query="river"))
        assert [(each.filename, each.score) for each in page.data] == [("a.txt", pytest.approx(0.8))]
        _, failed = await make_store(service, "Another text.")
        assert (failed.status, failed.last_error.code) == ("failed", "server_error")
        assert "input too long" in failed.last_error.message
        await service.close()
        # The model behind the name has changed: its vectors have another length.
        service = FileService(location, limits=FileLimits(), embeddings=settings)
        with pytest.raises(InvalidRequest) as refused:
            await service.vector_stores.search("p", store_id, SearchVectorStore(query="river"))
        assert refused.value.code == "embedding_model_changed"
        await service.close()
    assert json.loads(server.requests[0].body)["input"] == ["The Danube flows through Vienna."]
