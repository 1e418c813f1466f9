"""`antiphon db` with a damaged, empty, newer or failing database of files beside a SQLite store."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.store.sqlite import transfer
from antiphon.store.sqlite.database import connect


def test_database_of_files_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    message = f"antiphon: The store {database} cannot be used: file is not a database\n"
    assert capsys.readouterr().err == message
    (tmp_path / "empty").touch()
    assert main(["db", "import", "--store", url, str(tmp_path / "empty")]) == 1
    assert capsys.readouterr().err == message


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


def test_import_can_be_repeated_after_the_disk_was_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    export, target = str(tmp_path / "export"), f"sqlite:///{tmp_path}/target.db"
    assert main(["db", "migrate", "--store", f"sqlite:///{tmp_path}/store.db"]) == 0
    assert main(["db", "export", "--store", f"sqlite:///{tmp_path}/store.db", "--output", export]) == 0

    def connect_full(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        if path.name == "files.db":
            connection.execute("PRAGMA max_page_count = 1")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "connect", connect_full)
        assert main(["db", "import", "--store", target, export]) == 1
    assert "disk is full" in capsys.readouterr().err
    assert main(["db", "import", "--store", target, export]) == 0
