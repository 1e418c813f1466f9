"""The folder of a sandbox: its limits, and paths that leave it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.tools.hosted.code_interpreter.folder import LimitedFolder


@pytest.fixture
def folder(tmp_path: Path) -> LimitedFolder:
    (tmp_path / "data").mkdir()
    return LimitedFolder(tmp_path / "data", max_bytes=100, max_entries=4)


def test_files_and_folders_are_written_listed_and_removed(folder: LimitedFolder) -> None:
    folder.mkdir("/sub")
    folder.write("/sub/a.txt", b"text")
    folder.write("/b.txt", b"")
    assert folder.list("/") == [("b.txt", "file"), ("sub", "dir")]
    assert folder.read("/sub/a.txt") == b"text"
    assert folder.stat("/sub/a.txt")[:2] == ("file", 4)
    assert folder.stat("/sub")[:2] == ("dir", 0)
    folder.rename("/sub/a.txt", "/b.txt")
    assert folder.read("/b.txt") == b"text"
    folder.remove("/b.txt")
    folder.rmdir("/sub")
    assert folder.list("/") == []


def test_sizes_of_all_files_are_limited_together(folder: LimitedFolder) -> None:
    folder.write("/a", b"x" * 60)
    with pytest.raises(OSError, match="No space left"):
        folder.write("/b", b"x" * 41)
    folder.write("/a", b"x" * 100)
    with pytest.raises(OSError, match="No space left"):
        folder.write("/a", b"x" * 101)
    assert folder.read("/a") == b"x" * 100
    folder.remove("/a")
    folder.write("/b", b"x" * 100)


def test_number_of_entries_is_limited(folder: LimitedFolder) -> None:
    folder.mkdir("/sub")
    for name in "abc":
        folder.write(f"/sub/{name}", b"")
    for create in (lambda: folder.mkdir("/other"), lambda: folder.write("/d", b"")):
        with pytest.raises(OSError, match="No space left"):
            create()
    folder.write("/sub/a", b"again")
    with pytest.raises(OSError, match="name too long"):
        folder.write("/x" * 40, b"")


def test_limit_counts_files_that_the_server_added(folder: LimitedFolder, tmp_path: Path) -> None:
    (tmp_path / "data" / "upload").write_bytes(b"x" * 30)
    folder.measure(50)
    with pytest.raises(OSError, match="No space left"):
        folder.write("/a", b"x" * 21)
    folder.write("/a", b"x" * 20)


@pytest.mark.parametrize("path", ["/../secret", "/sub/../../secret", "/link", "/links/secret", "/pipe"])
def test_paths_cannot_leave_the_folder(folder: LimitedFolder, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("secret")
    folder.mkdir("/sub")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "data" / "links").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "data" / "pipe")
    calls: list[Callable[[], object]] = [
        lambda: folder.read(path),
        lambda: folder.stat(path),
        lambda: folder.list(path),
        lambda: folder.remove(path),
        lambda: folder.rename(path, "/sub/moved"),
    ]
    for call in calls:
        with pytest.raises(OSError, match=r"Operation not permitted|No such file"):
            call()
    assert folder.list("/") == [("sub", "dir")]
    assert (tmp_path / "secret").read_text() == "secret"


def test_wrong_kinds_are_refused(folder: LimitedFolder) -> None:
    folder.mkdir("/sub")
    folder.write("/a", b"x")
    wrong: list[tuple[Callable[[], object], type[OSError]]] = [
        (lambda: folder.read("/sub"), IsADirectoryError),
        (lambda: folder.write("/sub", b""), IsADirectoryError),
        (lambda: folder.remove("/sub"), IsADirectoryError),
        (lambda: folder.rmdir("/a"), NotADirectoryError),
        (lambda: folder.list("/a"), NotADirectoryError),
        (lambda: folder.write("/a/b", b""), NotADirectoryError),
        (lambda: folder.mkdir("/a"), FileExistsError),
        (lambda: folder.write("/none/b", b""), FileNotFoundError),
        (lambda: folder.rename("/none", "/b"), FileNotFoundError),
    ]
    for call, error in wrong:
        with pytest.raises(error):
            call()
    for busy in (lambda: folder.rmdir("/"), lambda: folder.rename("/", "/b"), lambda: folder.rename("/a", "/")):
        with pytest.raises(OSError, match="busy"):
            busy()
