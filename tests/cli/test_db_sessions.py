"""`antiphon db`: the sessions of agents move with the store, and no table is forgotten."""

import asyncio
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.cli.run_options import LEDGER_FILE
from antiphon.session import Session
from antiphon.store.location import is_postgres, locate_store
from antiphon.store.migration_files import read_migrations
from antiphon.store.session import SqliteSession
from antiphon.store.transfer import ALL_TABLES

# Rows that are derived from others, that hold for a minute or a day, or that describe running processes. PostgreSQL has
# the contents of files in two tables.
NOT_MOVED = {
    "chunk_words",
    "configurations",
    "content_pieces",
    "conversation_counts",
    "deletions",
    "limit_counts",
    "revisions",
    "run_starts",
}


def create_store(url: str) -> str:
    async def create() -> None:
        store = locate_store(url)
        await store.open()
        await store.close()

    asyncio.run(create())
    return url


def open_session(url: str, folder: Path, session_id: str) -> Session:
    if is_postgres(url):
        from antiphon.store.postgres.session import PostgresSession

        return PostgresSession(url, session_id)
    return SqliteSession(folder / LEDGER_FILE, session_id)


async def write(session: Session, run_id: str, *texts: str, owner: str = "") -> None:
    if owner:
        assert await session.hold(session.session_id, owner, 1e9) is True
    await session.save_run(run_id, [{"role": "user", "content": text} for text in texts])
    await session.close()


async def read(url: str, folder: Path, session_id: str) -> list[str]:
    """Return the texts of a session. Without an owner, it can be held at once."""
    session = open_session(url, folder, session_id)
    assert await session.hold(session_id, "us", 1) is True
    await session.release(session_id, "us")
    texts = [item["content"] for item in await session.list_items()]
    await session.close()
    return texts


def move(source: str, target: str, file: Path) -> None:
    assert main(["db", "export", "--store", source, "--output", str(file)]) == 0
    assert main(["db", "import", "--store", target, str(file)]) == 0


def test_sessions_of_agents_move_between_databases(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = create_store(f"sqlite:///{tmp_path}/first.db"), f"sqlite:///{tmp_path}/second.db"
    folders = tmp_path / "one", tmp_path / "two"
    asyncio.run(write(SqliteSession(folders[0] / LEDGER_FILE, "chat ü"), "run_1", "a \x00 ü", "b", owner="dead"))
    asyncio.run(write(SqliteSession(folders[0] / LEDGER_FILE, "chat ü"), "run_2", "c"))
    asyncio.run(write(SqliteSession(tmp_path / "first.db", "in the store"), "", "d"))
    for source, target, folder in ((first, postgres_url, folders[0]), (postgres_url, second, folders[1])):
        monkeypatch.setenv("ANTIPHON_DATA_DIR", str(folder))
        move(source, target, tmp_path / f"{target[:4]}.jsonl")
    assert (tmp_path / "post.jsonl").read_text() == (tmp_path / "sqli.jsonl").read_text()
    for url, folder in ((postgres_url, tmp_path), (second, folders[1])):
        assert asyncio.run(read(url, folder, "chat ü")) == ["a \x00 ü", "b", "c"]
        assert asyncio.run(read(url, folder, "in the store")) == ["d"]
        # A resumed run replaces its own items only.
        asyncio.run(write(open_session(url, folder, "chat ü"), "run_1", "e"))
        assert asyncio.run(read(url, folder, "chat ü")) == ["e", "c"]


def test_import_leaves_sessions_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = create_store(f"sqlite:///{tmp_path}/first.db")
    folders = tmp_path / "one", tmp_path / "two"
    for folder, session_id, text in ((0, "a", "old"), (0, "b", "moved"), (1, "a", "new")):
        asyncio.run(write(SqliteSession(folders[folder] / LEDGER_FILE, session_id), "run_1", text))
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(folders[0]))
    assert main(["db", "export", "--store", source, "--output", str(tmp_path / "file.jsonl")]) == 0
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(folders[1]))
    assert main(["db", "import", "--store", f"sqlite:///{tmp_path}/second.db", str(tmp_path / "file.jsonl")]) == 0
    assert [asyncio.run(read(source, folders[1], each)) for each in ("a", "b")] == [["new"], ["moved"]]


def test_session_in_two_files_is_exported_from_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(tmp_path))
    store = create_store(f"sqlite:///{tmp_path}/store.db")
    asyncio.run(write(SqliteSession(tmp_path / LEDGER_FILE, "a"), "run_1", "of the ledger"))
    asyncio.run(write(SqliteSession(tmp_path / "store.db", "a"), "run_2", "of the store"))
    assert main(["db", "export", "--store", store]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    exported = [row["item"]["content"] for row in rows if row.get("table") == "agent_session_items"]
    assert exported == ["of the ledger"]


def test_store_whose_session_was_killed_while_it_was_created_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(tmp_path))
    store = create_store(f"sqlite:///{tmp_path}/store.db")
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        connection.execute("CREATE TABLE agent_sessions (session_id TEXT PRIMARY KEY, active_at REAL NOT NULL)")
    assert main(["db", "export", "--store", store]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["end"]["agent_sessions"] == 0


@pytest.mark.parametrize("kind", ["sqlite", "files", "postgres"])
def test_every_table_is_exported_or_named_as_an_exception(kind: str) -> None:
    scripts = "\n".join(migration.script for migration in read_migrations(kind))
    if kind == "postgres":
        tables = set(re.findall(r"^CREATE TABLE (\w+)", scripts, re.MULTILINE))
    else:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript(scripts)
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    own = {name for name in tables if not name.startswith(("sqlite_", "chunk_words_"))}
    assert own - {table.name for table in ALL_TABLES} <= NOT_MOVED
