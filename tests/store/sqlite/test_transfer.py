"""Imports into a SQLite store that another process uses, too."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from antiphon.store.files.content import Contents
from antiphon.store.files.rows import FileRow
from antiphon.store.limits import DEFAULT_LIMITS
from antiphon.store.location import FileLocation, locate_files, locate_store
from antiphon.store.sqlite.transfer import open_sqlite
from antiphon.store.transfer import CONTENTS


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[Path]:
    """The path of an empty store that is open."""
    path = tmp_path / "store.db"
    store = locate_store(f"sqlite:///{path}")
    await store.open()
    yield path
    await store.close()


@pytest.fixture
def location(path: Path) -> FileLocation:
    return locate_files(f"sqlite:///{path}")


async def write(contents: Contents, name: str) -> None:
    writer = await contents.start_writing()
    await writer.write(b"text")
    await writer.commit(name)


def list_contents(location: FileLocation) -> dict[str, bytes]:
    assert location.folder is not None
    return {each.name: each.read_bytes() for each in (location.folder / "contents").iterdir()}


async def test_failed_import_leaves_the_files_of_others(path: Path, location: FileLocation) -> None:
    database, contents = await location.open(now=None, limits=DEFAULT_LIMITS)
    writer = await contents.start_writing()
    await writer.write(b"text")
    with (
        pytest.raises(KeyboardInterrupt),
        open_sqlite(path, ledger=path.with_name("runs.db"), is_import=True) as transfer,
    ):
        await transfer.import_rows(CONTENTS, [("file-imported", 0, b"a"), ("file-imported", 1, b"b")])
        assert list_contents(location)["file-imported"] == b"ab"
        await writer.commit("file-1")
        await write(contents, "file-2")
        raise KeyboardInterrupt
    await write(contents, "file-3")
    names = ["file-1", "file-2", "file-3"]
    for name in names:
        await database.save_file("p", FileRow(name, 1, None, name, 4, "assistants"))
    assert list_contents(location) == dict.fromkeys(names, b"text")
    await database.close()
    await contents.close()


async def test_failed_import_leaves_a_new_database_of_files_that_another_process_has_opened(
    path: Path, location: FileLocation
) -> None:
    assert location.folder is not None
    with (
        pytest.raises(KeyboardInterrupt),
        open_sqlite(path, ledger=path.with_name("runs.db"), is_import=True),
    ):
        other = sqlite3.connect(location.folder / "files.db", isolation_level=None)
        assert other.execute("SELECT id FROM files").fetchall() == []
        raise KeyboardInterrupt
    database, contents = await location.open(now=None, limits=DEFAULT_LIMITS)
    await write(contents, "file-1")
    await database.save_file("p", FileRow("file-1", 1, None, "name", 4, "assistants"))
    await database.close()
    await contents.close()
    assert other.execute("SELECT id FROM files").fetchall() == [("file-1",)]
    other.close()


@pytest.mark.parametrize("name", ["store.db", "store.db-files/files.db"])
async def test_import_locks_both_databases(path: Path, name: str) -> None:
    with (
        open_sqlite(path, ledger=path.with_name("runs.db"), is_import=True),
        closing(sqlite3.connect(path.parent / name, timeout=0, isolation_level=None)) as other,
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        other.execute("BEGIN IMMEDIATE")


async def test_import_deletes_the_files_of_containers_that_a_killed_one_has_left(
    path: Path, location: FileLocation
) -> None:
    database, contents = await location.open(now=None, limits=DEFAULT_LIMITS)
    await database.close()
    await contents.close()
    left = path.with_name("store.db-containers") / "cntr_1" / "data" / "code.txt"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"code")
    with open_sqlite(path, ledger=path.with_name("runs.db"), is_import=True):
        assert not left.exists()
