"""The queue of the indexing and the text search, in both databases."""

from pathlib import Path
from typing import Any

import pytest

from antiphon.store.files.database import FileDatabase
from antiphon.store.files.location import FileLocation
from antiphon.store.files.rows import ChunkRow, FileRow, IndexingLost, NewEntry, StoreRow, Tally
from antiphon.store.limits import DEFAULT_LIMITS

NOW = 1_700_000_000
VECTOR = bytes(8)
TEXTS = [
    "The quick brown fox jumps over the lazy dog. Foxes are quick.",
    "A café in Zürich serves coffee; the cafe is open daily.",
    "Running runners ran a run: the runner's running shoes.",
    "Version 3.11 of e-mail clients uses snake_case and a/b tests.",
    "naïve résumé NAIVE Resume 2024 2,024 x1 x-1",
    "the of and to in is it the of and to in is it",
    "日本語 テキスト with a few English words about dogs and foxes",
    "A NUL \x00 in the text, and \x01 too.",
]
QUERIES = """\
fox
foxes dog
cafe
café coffee
running runner
mail snake
3 11
naive resume
2024
the
x1
日本語
nul
absent
e b version
"""


async def add_store(database: FileDatabase, store_id: str = "vs_1", *, files: int = 1, project: str = "p") -> None:
    for number in range(files):
        file = FileRow(f"file-{store_id}-{number}", NOW, None, f"{number}.txt", 10, "assistants")
        await database.save_file(project, file)
    row = StoreRow(store_id, NOW, NOW, "", None, None, None, "model")
    entries = [NewEntry(f"file-{store_id}-{number}", None, 800, 400) for number in range(files)]
    await database.create_vector_store(project, row, entries)


async def index(database: FileDatabase, texts: list[str], owner: str = "one") -> int:
    """Index the next file with these chunks. Return its position."""
    job = await database.claim_indexing(owner, lease=10)
    assert job is not None
    await database.append_chunks(owner, job.position, [ChunkRow(0, text, VECTOR) for text in texts], lease=10)
    await database.finish_indexing(owner, job.position, "completed")
    return job.position


async def match(database: FileDatabase, store_id: str, words: list[str], **options: Any) -> dict[str, float]:
    """Return the ranks of the matching chunks by their texts."""
    store = await database.load_vector_store("p", store_id)
    assert store is not None
    found = await database.match_words(store.scope, words, limit=100, **options)
    texts = await database.load_chunk_texts([each.chunk_id for each in found])
    return {texts[each.chunk_id]: each.rank for each in found}


async def test_words_have_the_same_ranks_in_both_databases(tmp_path: Path, postgres_url: str) -> None:
    queries = [line.split() for line in QUERIES.splitlines()]
    ranks: list[list[dict[str, float]]] = []
    for location in (FileLocation(tmp_path / "files"), FileLocation(url=postgres_url)):
        database, contents = await location.open(now=None, limits=DEFAULT_LIMITS)
        await add_store(database)
        await index(database, TEXTS)
        ranks.append([await match(database, "vs_1", words) for words in queries])
        await database.close()
        await contents.close()
    for words, one, other in zip(queries, *ranks, strict=True):
        assert other == pytest.approx(one, rel=1e-5), words


async def test_words_match_only_in_their_store_and_entries(database: FileDatabase) -> None:
    await add_store(database, files=2)
    first, second = await index(database, ["a red apple"]), await index(database, ["a red pear"])
    await add_store(database, "vs_2")
    await index(database, ["a red cherry"])
    assert set(await match(database, "vs_1", ["red"])) == {"a red apple", "a red pear"}
    assert set(await match(database, "vs_1", ["red"], entries=[second])) == {"a red pear"}
    assert set(await match(database, "vs_2", ["red"])) == {"a red cherry"}
    assert await match(database, "vs_2", ["red"], entries=[first]) == {}
    assert await match(database, "vs_1", []) == {}


async def test_chunks_match_only_when_their_file_is_complete(database: FileDatabase) -> None:
    await add_store(database)
    job = await database.claim_indexing("one", lease=10)
    assert job is not None
    await database.append_chunks("one", job.position, [ChunkRow(0, "a red apple", VECTOR)], lease=10)
    assert await match(database, "vs_1", ["red"]) == {}
    await database.finish_indexing("one", job.position, "completed")
    assert set(await match(database, "vs_1", ["red"])) == {"a red apple"}
    assert await database.detach_file("p", "vs_1", "file-vs_1-0")
    assert await match(database, "vs_1", ["red"]) == {}


async def test_expired_lease_is_claimed_by_another_process(database: FileDatabase, clock: Any) -> None:
    await add_store(database)
    first = await database.claim_indexing("one", lease=10)
    assert first is not None
    await database.append_chunks("one", first.position, [ChunkRow(0, "half", VECTOR)], lease=10)
    assert await database.claim_indexing("two", lease=10) is None
    assert await database.find_next_claim() == clock.time + 10
    clock.time += 11
    second = await database.claim_indexing("two", lease=10)
    assert second == first._replace(attempts=2)
    assert await database.renew_indexing("one", first.position, lease=10) is False
    with pytest.raises(IndexingLost):
        await database.append_chunks("one", first.position, [ChunkRow(0, "late", VECTOR)], lease=10)
    with pytest.raises(IndexingLost):
        await database.finish_indexing("one", first.position, "completed")
    await database.append_chunks("two", first.position, [ChunkRow(0, "whole", VECTOR)], lease=10)
    await database.finish_indexing("two", first.position, "completed")
    assert await database.load_entry_texts(first.position) == ["whole"]
    assert await database.count_entries("p", ["vs_1"]) == {"vs_1": Tally({"completed": 1}, len("whole") + len(VECTOR))}


async def test_released_attempt_does_not_count(database: FileDatabase) -> None:
    await add_store(database)
    job = await database.claim_indexing("one", lease=10)
    assert job is not None
    await database.release_indexing("one", job.position)
    assert await database.claim_indexing("two", lease=10) == job


async def test_projects_take_turns_in_the_queue(database: FileDatabase) -> None:
    await add_store(database, files=2)
    await add_store(database, "vs_2", project="q")
    claimed = [await database.claim_indexing("one", lease=10, recent=recent) for recent in ([], ["p"], ["p", "q"])]
    assert [job and job.project for job in claimed] == ["p", "q", "p"]


async def test_cancelled_batch_loses_its_chunks(database: FileDatabase) -> None:
    await add_store(database, files=2)
    entries = [NewEntry(f"file-vs_1-{number}", {"n": number}, 800, 400) for number in range(2)]
    await database.attach_files("p", "vs_1", entries, batch_id="vsfb_1")
    done = await index(database, ["a red apple"])
    job = await database.claim_indexing("one", lease=10)
    assert job is not None
    await database.append_chunks("one", job.position, [ChunkRow(0, "a red pear", VECTOR)], lease=10)
    assert await database.cancel_batch("p", "vs_1", "vsfb_1")
    with pytest.raises(IndexingLost):
        await database.append_chunks("one", job.position, [ChunkRow(0, "late", VECTOR)], lease=10)
    assert await database.count_batch("p", "vsfb_1") == Tally({"completed": 1, "cancelled": 1})
    assert await database.read_vectors(job.position, after=0, limit=10) == []
    assert [row.vectors for row in await database.read_vectors(done, after=0, limit=10)] == [VECTOR]
    assert not await database.cancel_batch("p", "vs_1", "vsfb_2")


async def test_deleted_store_leaves_no_chunks_but_its_files(database: FileDatabase) -> None:
    await add_store(database)
    position = await index(database, ["a red apple"])
    assert await database.delete_vector_store("p", "vs_1")
    assert not await database.delete_vector_store("p", "vs_1")
    assert await database.load_entry_texts(position) == []
    assert await database.load_file("p", "file-vs_1-0") is not None
    assert not await database.attach_files("p", "vs_1", [])


async def test_file_with_strange_ids_is_not_found(database: FileDatabase) -> None:
    for file_id in ("", "\x00", "x" * 10_000, "'; DROP TABLE files"):
        assert await database.load_file("p", file_id) is None
        assert await database.load_files("p", [file_id]) == {}


async def test_matches_of_each_word_are_counted_up_to_a_limit(database: FileDatabase) -> None:
    await add_store(database)
    await index(database, ["a red apple", "a red pear", "red apples", "green"])
    await add_store(database, "vs_2")
    await index(database, ["a green cherry"])
    store = await database.load_vector_store("p", "vs_1")
    assert store is not None
    words = ["red", "apple", "cherry", "_", "green"]
    assert await database.count_matches(store.scope, words, limit=10) == [3, 2, 0, 0, 1]
    assert await database.count_matches(store.scope, words, limit=2) == [2, 2, 0, 0, 1]
    assert await database.count_matches(store.scope, [], limit=2) == []
