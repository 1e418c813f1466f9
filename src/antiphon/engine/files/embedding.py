"""Embedding of queries and chunks: with the local model, or with an OpenAI-compatible endpoint."""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from antiphon.config.settings import EmbeddingSettings
from antiphon.errors import UpstreamError
from antiphon.protocol.json_text import read_json
from antiphon.upstream.client import UpstreamClient
from antiphon.upstream.options import UpstreamOptions

LOCAL_ID = "all-MiniLM-L6-v2-int8"
_LOCAL_DIMENSIONS = 384


class Embedder(Protocol):
    """Computes vectors. `id` identifies the model: vectors of two models cannot be compared.

    `is_local`: the process that reads files computes the vectors of chunks. `dimensions` is the length of a vector, or
    None if it is not known. Then each chunk has one vector.
    """

    id: str
    is_local: bool
    dimensions: int | None

    async def embed_query(self, text: str) -> Any:
        """Return the vector of a query as a NumPy array of unit length."""

    async def embed_chunks(self, texts: Sequence[str]) -> list[bytes]:
        """Return the vectors of chunks as they are stored. Only if not `is_local`."""

    async def close(self) -> None: ...


class LocalEmbedder:
    """The local model in a thread. It is loaded at the first query."""

    id = LOCAL_ID
    is_local = True
    dimensions: int | None = _LOCAL_DIMENSIONS

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="embedding")
        self._model: Any = None

    async def embed_query(self, text: str) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._embed, text)

    def _embed(self, text: str) -> Any:
        if self._model is None:
            from antiphon.retrieval.local_model import LocalModel

            self._model = LocalModel(threads=1)
        return self._model.embed_text(text)

    async def embed_chunks(self, texts: Sequence[str]) -> list[bytes]:
        raise NotImplementedError("the process that reads files computes these vectors")

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class _Embedding(msgspec.Struct):
    embedding: list[float]
    index: int


class _EmbeddingList(msgspec.Struct):
    data: list[_Embedding]


class EndpointEmbedder:
    """A server with `POST /embeddings`. Connections are opened at the first request."""

    is_local = False
    dimensions: int | None = None

    def __init__(self, settings: EmbeddingSettings) -> None:
        self.id = f"{settings.model}@{settings.base_url.rstrip('/')}"
        self._settings = settings
        headers = {} if settings.api_key is None else {"Authorization": f"Bearer {settings.api_key}"}
        options = UpstreamOptions(
            base_url=settings.base_url, api_key=settings.api_key, first_token_timeout=settings.timeout
        )
        self._client = UpstreamClient("embeddings", options, headers=headers)
        self._is_open = False

    async def embed_query(self, text: str) -> Any:
        import numpy as np

        (vector,) = await self._request([text])
        return np.array(vector, dtype=np.float32)

    async def embed_chunks(self, texts: Sequence[str]) -> list[bytes]:
        import numpy as np

        stored: list[bytes] = []
        size = self._settings.batch
        for start in range(0, len(texts), size):
            vectors = await self._request(texts[start : start + size])
            stored += [np.array(vector, dtype="<f2").tobytes() for vector in vectors]
        return stored

    async def _request(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the vectors of some texts, with unit length."""
        if not self._is_open:
            self._is_open = True
            await self._client.start()
        body: dict[str, object] = {"model": self._settings.model, "input": list(texts), "encoding_format": "float"}
        if self._settings.dimensions is not None:
            body["dimensions"] = self._settings.dimensions
        answer = await self._client.post_json("/embeddings", msgspec.json.encode(body))
        try:
            found = sorted(read_json(answer, _EmbeddingList).data, key=lambda each: each.index)
        except msgspec.DecodeError:
            raise UpstreamError("The embeddings server returned no list of embeddings.") from None
        if [each.index for each in found] != list(range(len(texts))) or not all(each.embedding for each in found):
            raise UpstreamError(f"The embeddings server returned {len(found)} vectors for {len(texts)} texts.")
        self._check_lengths([len(each.embedding) for each in found])
        return [_normalize(each.embedding) for each in found]

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        """Raise UpstreamError unless all vectors have the length of the first one. Others could not be compared."""
        expected = self._settings.dimensions or self.dimensions or lengths[0]
        for length in lengths:
            if length != expected:
                raise UpstreamError(
                    f"The embeddings server returned a vector of {length} dimensions instead of {expected}."
                )
        self.dimensions = expected

    async def close(self) -> None:
        if self._is_open:
            await self._client.close()


def make_embedder(settings: EmbeddingSettings | None) -> Embedder:
    return LocalEmbedder() if settings is None else EndpointEmbedder(settings)


def _normalize(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in vector)) or 1.0
    return [value / length for value in vector]
