"""`antiphon db` with a damaged, empty or newer database of files beside a SQLite store."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from antiphon.cli.main import main


def test_database_of_files_that_cannot_be_exported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, database = f"sqlite:///{tmp_path}/store.db", tmp_path / "store.db-files" / "files.db"
    assert main(["db", "migrate", "--store", url]) == 0
    database.parent.mkdir()
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA user_version = 999")
    export = ["db", "export", "--store", url, "--output", str(tmp_path / "export")]
    assert main(export) == 1
    assert f"The store {database} has schema version 999, but " in capsys.readouterr().err
    database.write_bytes(b"no database " * 1000)
    assert main(export) == 1
    assert capsys.readouterr().err == f"antiphon: The store {database} cannot be used: file is not a database\n"


def test_database_of_files_without_tables_is_exported_as_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    assert main(["db", "migrate", "--store", url]) == 0
    (tmp_path / "store.db-files").mkdir()
    (tmp_path / "store.db-files" / "files.db").touch()  # a full disk leaves such a file
    assert main(["db", "export", "--store", url, "--output", str(tmp_path / "export")]) == 0
    assert main(["db", "status", "--store", url]) == 0
    assert capsys.readouterr().err == ""
