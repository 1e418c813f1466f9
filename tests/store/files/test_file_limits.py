"""Limits on the number of files, uploads, parts and vector stores of a project."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.errors import InvalidRequest
from antiphon.store.files.database import FileDatabase
from antiphon.store.files.location import FileLocation
from antiphon.store.files.rows import FileRow, NewEntry, PartRow, StoreRow, Tally, UploadRow
from antiphon.store.limits import StoreLimits

NOW = 1_700_000_000
LIMITS = StoreLimits(max_files=2, max_uploads=2, max_upload_parts=2, max_vector_stores=2, max_vector_store_files=2)


@pytest.fixture
async def database(location: FileLocation, clock: Any) -> AsyncIterator[FileDatabase]:
    database, contents = await location.open(now=clock, limits=LIMITS)
    yield database
    await database.close()
    await contents.close()


async def save_file(database: FileDatabase, name: str, project: str = "p") -> None:
    await database.save_file(project, FileRow(f"file-{name}", NOW, None, name, 1, "batch"))


async def save_upload(database: FileDatabase, name: str, project: str = "p") -> None:
    row = UploadRow(f"upload_{name}", NOW, NOW + 9, name, 1, "batch", "text/plain", None, "pending")
    await database.save_upload(project, row)


async def save_store(database: FileDatabase, name: str, files: int = 0, project: str = "p") -> None:
    await database.create_vector_store(
        project, StoreRow(f"vs_{name}", NOW, NOW, "", None, None, None, "model"), make_entries(files)
    )


def make_entries(count: int, start: int = 0) -> list[NewEntry]:
    return [NewEntry(f"file-{number}", None, 800, 400) for number in range(start, start + count)]


async def find_error(work: Any) -> tuple[str, str | None, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        await work
    return caught.value.message, caught.value.param, caught.value.code


def explain(objects: str, setting: str, *, hint: str = "Delete some first.") -> str:
    return f"There would be 3 {objects}, and at most 2 are allowed (setting files.{setting}). {hint}"


async def test_files_beyond_the_limit_are_refused(database: FileDatabase) -> None:
    await save_file(database, "a")
    await save_file(database, "b")
    expected = (explain("files in this project", "max_files"), "file", "file_quota_exceeded")
    assert await find_error(save_file(database, "c")) == expected
    await save_upload(database, "a")
    completed = database.complete_upload("p", "upload_a", FileRow("file-d", NOW, None, "d", 1, "batch"))
    assert await find_error(completed) == expected
    await save_file(database, "c", project="q")
    await database.delete_file("p", "file-a")
    await save_file(database, "c")


async def test_concurrent_files_do_not_exceed_the_limit(database: FileDatabase) -> None:
    outcomes = await asyncio.gather(*(save_file(database, str(number)) for number in range(6)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(InvalidRequest) == 4


async def test_uploads_and_parts_beyond_the_limit_are_refused(database: FileDatabase) -> None:
    await save_upload(database, "a")
    await save_upload(database, "b")
    hint = "Wait until some have expired: completed and cancelled ones count, too."
    expected = (explain("uploads in this project", "max_uploads", hint=hint), "filename", "file_quota_exceeded")
    assert await find_error(save_upload(database, "c")) == expected
    for number in range(2):
        assert await database.save_part("p", "upload_a", PartRow(f"part_{number}", NOW, 1))
    message = explain("parts of the upload", "max_upload_parts", hint="Send larger parts.")
    expected = (message, "data", "file_quota_exceeded")
    assert await find_error(database.save_part("p", "upload_a", PartRow("part_3", NOW, 1))) == expected


async def test_vector_stores_beyond_the_limit_are_refused(database: FileDatabase) -> None:
    await save_store(database, "a")
    await save_store(database, "b")
    expected = (explain("vector stores in this project", "max_vector_stores"), "name", "file_quota_exceeded")
    assert await find_error(save_store(database, "c")) == expected
    await save_store(database, "c", project="q")


async def test_files_of_a_vector_store_beyond_the_limit_are_refused(database: FileDatabase) -> None:
    message = explain("files in the vector store", "max_vector_store_files")
    assert await find_error(save_store(database, "a", files=3)) == (message, "file_ids", "file_quota_exceeded")
    await save_store(database, "a", files=2)
    # A file that the store has is indexed again.
    assert await database.attach_files("p", "vs_a", make_entries(1))
    one_more = database.attach_files("p", "vs_a", make_entries(1, start=5))
    assert await find_error(one_more) == (message, "file_id", "file_quota_exceeded")
    for number in range(2):
        assert await database.attach_files("p", "vs_a", make_entries(2), batch_id=f"vsfb_{number}")
    hint = "Wait until older batches are finished."
    message = explain("batches of the vector store", "max_vector_store_files", hint=hint)
    batch = database.attach_files("p", "vs_a", make_entries(2), batch_id="vsfb_3")
    assert await find_error(batch) == (message, "file_ids", "file_quota_exceeded")


async def test_oldest_finished_batches_give_way_to_new_ones(database: FileDatabase) -> None:
    await save_store(database, "a")
    for name in ("0", "1"):
        await save_file(database, name)
    for number, start in ((0, 0), (1, 1)):
        assert await database.attach_files("p", "vs_a", make_entries(1, start=start), batch_id=f"vsfb_{number}")
    second = database.attach_files("p", "vs_a", make_entries(1), batch_id="vsfb_2")
    assert await find_error(second) is not None
    job = await database.claim_indexing("one", lease=60)
    assert job is not None
    await database.finish_indexing("one", job.position, "completed")
    assert await database.attach_files("p", "vs_a", make_entries(1), batch_id="vsfb_2")
    remaining = [number for number in range(3) if await database.load_batch("p", "vs_a", f"vsfb_{number}")]
    assert remaining == [1, 2]
    assert await database.count_batch("p", "vsfb_0") == Tally({})
    assert await database.count_batch("p", "vsfb_2") == Tally({"in_progress": 1})


async def test_only_as_many_batches_give_way_as_needed(database: FileDatabase) -> None:
    await save_store(database, "a")
    for number in range(3):
        assert await database.attach_files("p", "vs_a", [], batch_id=f"vsfb_{number}")
    assert await list_batches(database, 3) == [1, 2]


async def test_batches_beyond_a_reduced_limit_give_way(location: FileLocation, clock: Any) -> None:
    database, contents = await location.open(now=clock, limits=LIMITS._replace(max_vector_store_files=150))
    await save_store(database, "a")
    for number in range(150):
        assert await database.attach_files("p", "vs_a", [], batch_id=f"vsfb_{number:03}")
    await database.close()
    await contents.close()
    database, contents = await location.open(now=clock, limits=LIMITS)
    for name in ("x", "y"):
        assert await database.attach_files("p", "vs_a", [], batch_id=f"vsfb_{name}")
    remaining = [
        name for name in ("099", "148", "149", "x", "y") if await database.load_batch("p", "vs_a", f"vsfb_{name}")
    ]
    assert remaining == ["x", "y"]
    await database.close()
    await contents.close()


async def list_batches(database: FileDatabase, count: int) -> list[int]:
    return [number for number in range(count) if await database.load_batch("p", "vs_a", f"vsfb_{number}")]
