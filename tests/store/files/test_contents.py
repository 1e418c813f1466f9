"""The contents of files, on disk and in PostgreSQL."""

import hashlib
import time

import pytest

pytest.importorskip("asyncpg")

from antiphon.errors import ServerError
from antiphon.store.files import content
from antiphon.store.files.content import Contents
from antiphon.store.files.database import FileDatabase
from antiphon.store.files.location import FileLocation
from antiphon.store.files.rows import FileRow
from antiphon.store.postgres import contents as postgres_contents

LARGE = bytes(range(256)) * 5000


async def write(contents: Contents, content_id: str, data: bytes) -> None:
    writer = await contents.start_writing()
    for start in range(0, len(data), 100_000):
        await writer.write(data[start : start + 100_000])
    assert writer.size == len(data)
    await writer.commit(content_id)
    writer.discard()  # without an effect


async def test_contents_are_read_as_they_were_written(contents: Contents) -> None:
    await write(contents, "a", LARGE)
    await write(contents, "empty", b"")
    assert b"".join([part async for part in contents.read("a")]) == LARGE
    assert await contents.read_whole("empty") == b""
    async with contents.use_path("a") as path:
        assert path.read_bytes() == LARGE
    assert await contents.join(["a", "empty", "a"], "joined") == (
        2 * len(LARGE),
        hashlib.md5(LARGE * 2, usedforsecurity=False).hexdigest(),
    )
    assert await contents.read_whole("joined") == LARGE * 2
    await contents.delete(["a", "unknown"])
    with pytest.raises(ServerError, match="missing"):
        await contents.read_whole("a")


def list_unfinished(location: FileLocation) -> list[str]:
    """Return the names of files that are not contents."""
    if location.folder is None:
        return []
    names = {path.name for path in (location.folder / "contents").iterdir()}
    return sorted(names - {"file-1", "unused"})


async def test_old_contents_without_a_row_are_found(
    contents: Contents, database: FileDatabase, location: FileLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content_id in ("file-1", "unused"):
        await write(contents, content_id, b"x")
    unfinished = await contents.start_writing()
    await unfinished.write(b"x")
    await database.save_file("p", FileRow("file-1", 1, None, "a", 1, "batch"))
    assert await database.find_unknown_contents(await contents.list_old()) == []
    with monkeypatch.context() as patch:  # the clock of this node is wrong
        wrong_time = time.time() + 2 * content.ORPHAN_SECONDS
        patch.setattr(time, "time", lambda: wrong_time)
        assert await database.find_unknown_contents(await contents.list_old()) == []
    monkeypatch.setattr(content, "ORPHAN_SECONDS", -1)
    monkeypatch.setattr(postgres_contents, "ORPHAN_SECONDS", -1)
    assert await database.find_unknown_contents(await contents.list_old()) == ["unused"]
    assert list_unfinished(location) == []
    unfinished.discard()
