"""`antiphon db`: the files of an export, and what an interrupted or failed export or import leaves."""

import asyncio
import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli.main import main
from antiphon.server.store_users import register_store_user
from antiphon.store.files.rows import FileRow
from antiphon.store.limits import DEFAULT_LIMITS
from antiphon.store.location import locate_files, locate_store
from antiphon.store.sqlite.database import connect
from support.cli_process import COMMAND, WAIT_SECONDS
from support.live_server import make_settings

# More than a pipe holds.
LARGE = 1_000_000
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
TEXTS = {f"file-{number}": b"text %d" % number for number in range(9)}


async def fill(url: str) -> None:
    """Create a store with small files and a prompt that is too large for a pipe."""
    store = locate_store(url)
    await store.open()
    await store.save_prompt("p", "pmpt_1", "1", json.dumps("x" * LARGE).encode(), 1)
    await store.close()
    database, contents = await locate_files(url).open(now=None, limits=DEFAULT_LIMITS)
    for name, text in TEXTS.items():
        writer = await contents.start_writing()
        await writer.write(text)
        await writer.commit(name)
        await database.save_file("p", FileRow(name, 1, None, name, len(text), "assistants"))
    await database.close()
    await contents.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    asyncio.run(fill(f"sqlite:///{path}"))
    return path


@pytest.fixture
def export(store: Path, tmp_path: Path) -> Path:
    path = tmp_path / "export"
    assert main(["db", "export", "--store", f"sqlite:///{store}", "--output", str(path)]) == 0
    return path


@contextmanager
def start_command(*arguments: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*COMMAND, *arguments], **streams) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def start_import(target: Path, export: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start an import that has written the contents of files and waits for the rest of its input."""
    command = ("db", "import", "--store", f"sqlite:///{target}")
    with start_command(*command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(export.read_bytes().rpartition(b'{"end"')[0])
        process.stdin.write(b" " * LARGE)  # more than a pipe holds: all lines before have been read
        process.stdin.flush()
        assert (target.with_name(f"{target.name}-files") / "contents" / "file-0").read_bytes() == TEXTS["file-0"]
        yield process


def list_contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (Path(f"{store}-files") / "contents").iterdir()}


def test_export_is_a_file_that_only_its_user_can_read(store: Path, tmp_path: Path) -> None:
    export = tmp_path / "export"
    before = os.umask(0o022)
    try:
        assert main(["db", "export", "--store", f"sqlite:///{store}", "--output", str(export)]) == 0
    finally:
        os.umask(before)
    assert stat.filemode(export.stat().st_mode) == "-rw-------"


@SIGNALS
def test_interrupted_export_leaves_no_file(store: Path, tmp_path: Path, number: signal.Signals) -> None:
    content, export = Path(f"{store}-files") / "contents" / "file-0", tmp_path / "export"
    content.unlink()
    os.mkfifo(content)
    command = ("db", "export", "--store", f"sqlite:///{store}", "--output", str(export))
    with start_command(*command, stderr=subprocess.PIPE) as process:
        with content.open("wb"):  # waits until the command opens it, too
            assert export.exists()
            process.send_signal(number)
        assert (process.communicate(timeout=WAIT_SECONDS)[1], process.returncode) == (b"", 130)
    assert not export.exists()


@SIGNALS
def test_export_to_a_pipe_without_a_reader_is_interrupted(store: Path, number: signal.Signals) -> None:
    command = ("db", "export", "--store", f"sqlite:///{store}")
    with start_command(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b'{"antiphon_export":1}\n'
        assert process.stdout.read(1) == b"{"  # the command is in the middle of a line that no pipe holds
        process.send_signal(number)
        assert process.wait(WAIT_SECONDS) == 130
        assert process.stderr.read() == b""


@SIGNALS
def test_interrupted_import_leaves_no_file(export: Path, tmp_path: Path, number: signal.Signals) -> None:
    target = tmp_path / "new" / "target.db"
    with start_import(target, export) as process:
        process.send_signal(number)
        assert (process.communicate(timeout=WAIT_SECONDS)[1], process.returncode) == (b"", 130)
    assert list(target.parent.iterdir()) == []


def test_import_can_be_repeated_after_it_was_killed(export: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "target.db"
    with start_import(target, export) as process:
        process.kill()
        process.wait(WAIT_SECONDS)
    broken = tmp_path / "broken"
    broken.write_bytes(export.read_bytes().rpartition(b'{"end"')[0])
    for _ in range(2):
        assert main(["db", "import", "--store", f"sqlite:///{target}", str(broken)]) == 1
    assert main(["db", "import", "--store", f"sqlite:///{target}", str(export)]) == 0
    assert list_contents(target) == TEXTS


def test_interrupt_during_the_commit_of_an_import_leaves_the_files(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target.db"

    class InterruptedConnection:
        """A connection that gets an interrupt during its commit, which Python raises after it."""

        def __init__(self, path: Path) -> None:
            self._connection = connect(path)

        def execute(self, statement: str, *parameters: object) -> object:
            result = self._connection.execute(statement, *parameters)
            if statement == "COMMIT" and self._connection.execute("SELECT 1 FROM prompts").fetchone():
                raise KeyboardInterrupt
            return result

        def __getattr__(self, name: str) -> object:
            return getattr(self._connection, name)

    def connect_interrupted(path: Path) -> object:
        return InterruptedConnection(path) if path == target else connect(path)

    with monkeypatch.context() as patch:
        patch.setattr("antiphon.store.sqlite.transfer.connect", connect_interrupted)
        assert main(["db", "import", "--store", f"sqlite:///{target}", str(export)]) == 130
    assert list_contents(target) == TEXTS
    copy = tmp_path / "copy"
    assert main(["db", "export", "--store", f"sqlite:///{target}", "--output", str(copy)]) == 0
    assert copy.read_bytes() == export.read_bytes()


def test_import_refuses_folders_that_may_be_needed(
    store: Path, export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, container_file = Path(f"{store}-files"), Path(f"{store}-containers") / "cntr_1" / "data" / "code.txt"
    container_file.parent.mkdir(parents=True)
    container_file.write_bytes(b"code")
    for path in tmp_path.glob("store.db*"):
        if path.is_file():
            path.unlink()
    before = sorted(tmp_path.rglob("*"))
    arguments = ["db", "import", "--store", f"sqlite:///{store}", str(export)]
    assert main(arguments) == 1
    assert capsys.readouterr().err == (
        f"antiphon: The store {store} is not empty: it has files. Import into a new store.\n"
    )
    assert sorted(tmp_path.rglob("*")) == before
    (folder / "files.db").unlink()
    assert main(arguments) == 1
    assert capsys.readouterr().err == (
        f"antiphon: The store {store} is not empty: there is {folder}. "
        "Import into a new store, or delete the folder if nothing needs it.\n"
    )
    before.remove(folder / "files.db")
    assert sorted(tmp_path.rglob("*")) == before
    assert (list_contents(store), container_file.read_bytes()) == (TEXTS, b"code")


def test_import_is_refused_while_a_server_uses_the_store(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/target.db"
    server = register_store_user(make_settings(store=url), "http://127.0.0.1:1")
    assert server is not None
    before = sorted(tmp_path.rglob("*"))
    assert main(["db", "import", "--store", url, str(export)]) == 1
    assert capsys.readouterr().err == (
        f"antiphon: A server uses the store {tmp_path}/target.db: "
        f"http://127.0.0.1:1 (process {os.getpid()} on {os.uname().nodename}). Stop it first.\n"
    )
    assert sorted(tmp_path.rglob("*")) == before
    server.remove()
    assert main(["db", "import", "--store", url, str(export)]) == 0


def test_import_does_not_write_to_a_store_that_a_failed_import_deletes(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target.db"

    def connect_and_replace(path: Path) -> object:
        connection = connect(path)
        if path == target:
            connection.set_trace_callback(lambda statement: replace() if statement == "BEGIN IMMEDIATE" else None)
        return connection

    def replace() -> None:
        target.unlink()
        target.touch()

    monkeypatch.setattr("antiphon.store.sqlite.transfer.connect", connect_and_replace)
    assert main(["db", "import", "--store", f"sqlite:///{target}", str(export)]) == 1
    assert "was replaced while the import waited for it. Import again." in capsys.readouterr().err
