"""Folders of containers: code in them may replace folders by links to files of the host."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from antiphon.engine.containers.files import LocalContainerFiles, SharedContainerFiles
from antiphon.engine.containers.folders import ContainerFolders
from antiphon.store.containers import ContainerFileRow
from antiphon.store.files.content import ContentFolder, Contents
from antiphon.store.memory.store import MemoryStore

ROW = ContainerFileRow(
    id="cfile_1",
    container_id="cntr_1",
    path="sub/a.txt",
    bytes=4,
    source="assistant",
    created_at=1,
    modified_ns=1,
    content="c1",
)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"host")
    return folder


@pytest.fixture
async def contents(tmp_path: Path) -> AsyncIterator[Contents]:
    opened = ContentFolder(tmp_path / "contents")
    opened.create()
    writer = await opened.start_writing()
    await writer.write(b"text")
    await writer.commit("c1")
    yield opened
    await opened.close()


def test_file_behind_a_link_is_not_deleted(tmp_path: Path, outside: Path) -> None:
    folders = ContainerFolders(tmp_path)
    folders.create("cntr_1")
    data = folders.locate("cntr_1") / "data"
    (data / "sub").symlink_to(outside)
    (data / "b.txt").write_bytes(b"b")
    folders.delete_file("cntr_1", "sub/a.txt")
    folders.delete_file("cntr_1", "none/a.txt")
    folders.delete_file("cntr_1", "b.txt")
    assert (outside / "a.txt").read_bytes() == b"host"
    assert [path.name for path in data.iterdir()] == ["sub"]


@pytest.mark.parametrize("link", ["sub", "sub/a.txt"])
async def test_copy_of_a_file_replaces_links(contents: Contents, outside: Path, link: str) -> None:
    async def open_contents() -> Contents:
        return contents

    files = SharedContainerFiles(open_contents, max_files=10)
    try:
        await files.prepare("p", "cntr_1", [ROW])
        copy = files.folders.locate("cntr_1") / "data" / "sub" / "a.txt"
        assert copy.read_bytes() == b"text"
        copy.unlink()
        if link == "sub":
            copy.parent.rmdir()
            copy.parent.symlink_to(outside)
        else:
            copy.symlink_to(outside / "a.txt")
        await files.prepare("p", "cntr_1", [ROW])
        assert copy.read_bytes() == b"text"
        assert not copy.parent.is_symlink()
        assert not copy.is_symlink()
        assert (outside / "a.txt").read_bytes() == b"host"
    finally:
        await files.close()


@pytest.mark.parametrize("is_shared", [True, False])
async def test_file_beyond_the_limit_is_not_taken_for_deleted(
    contents: Contents, tmp_path: Path, is_shared: bool
) -> None:
    async def open_contents() -> Contents:
        return contents

    shared = SharedContainerFiles(open_contents, max_files=2)
    files = shared if is_shared else LocalContainerFiles(MemoryStore(), tmp_path, max_files=2)
    try:
        await shared.prepare("p", "cntr_1", [ROW])
        await files.create("cntr_1")
        data = files.folders.locate("cntr_1") / "data"
        (data / "sub").mkdir(exist_ok=True)
        (data / "sub" / "a.txt").touch()
        for name in ("1.txt", "2.txt", "3.txt"):
            (data / name).write_bytes(b"new")
        changes = await files.collect("cntr_1", [ROW])
        assert ([row.path for row in changes.saved], changes.deleted) == (["1.txt", "2.txt"], [])
        (data / "sub" / "a.txt").unlink()
        assert (await files.collect("cntr_1", [ROW])).deleted == ["cfile_1"]
    finally:
        await files.close()
        await shared.close()


def test_deleted_container_has_no_files(tmp_path: Path) -> None:
    assert ContainerFolders(tmp_path).scan("cntr_1", limit=10) == []
