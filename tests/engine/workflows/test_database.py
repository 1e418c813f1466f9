import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy

from antiphon.engine.workflows import database
from antiphon.engine.workflows.database import complete, connect, identify, prepare
from antiphon.errors import ConfigError


def test_what_was_read_in_a_transaction_stays_so_to_its_end(tmp_path: Path) -> None:
    engine = connect(f"sqlite:///{tmp_path}/new/dbos.db")
    assert engine is not None
    with engine.begin() as connection, closing(sqlite3.connect(tmp_path / "new" / "dbos.db", timeout=0)) as other:
        connection.execute(sqlalchemy.text("SELECT 1"))
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
    engine.dispose()


def test_tables_are_made_all_or_none(tmp_path: Path) -> None:
    path = tmp_path / "dbos.db"
    engine = connect(f"sqlite:///{path}")
    assert engine is not None
    with pytest.raises(ZeroDivisionError), engine.begin() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE one (id TEXT)"))
        1 / 0  # noqa: B018
    engine.dispose()
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == []
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_databases_are_left_to_dbos() -> None:
    assert connect("postgresql://ada@127.0.0.1/dbos") is None


def test_a_connection_to_a_server_is_not_believed_in_for_ever() -> None:
    assert complete("sqlite:///a.db") == "sqlite:///a.db"
    assert complete("postgresql://ada:secret@db/dbos?sslmode=require&keepalives_idle=5") == (
        "postgresql://ada:secret@db/dbos?keepalives_count=3&keepalives_idle=5&keepalives_interval=10&sslmode=require"
        "&tcp_user_timeout=30000"
    )


def test_a_file_that_cannot_be_written_to_is_told_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database.time, "sleep", pytest.fail)
    (tmp_path / "dbos.db").mkdir()
    with pytest.raises(ConfigError, match=r"dbos: its database .*/dbos.db cannot be used: unable to open"):
        connect(f"sqlite:///{tmp_path}/dbos.db")


def test_another_file_of_the_same_name_is_another_one(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/dbos.db"
    assert identify(url) is None
    prepare(url)
    first = identify(url)
    (tmp_path / "dbos.db").rename(tmp_path / "old.db")
    assert identify(url) is None
    prepare(url)
    assert None not in (first, identify(url))
    assert first != identify(url)
    assert identify("postgresql://ada@127.0.0.1/dbos") is None


def test_a_file_that_is_no_database_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "dbos.db").write_text("this is no database, and long enough to be taken for one" * 100)
    with pytest.raises(ConfigError, match=r"dbos: its database .*/dbos.db cannot be used: file is not a database"):
        connect(f"sqlite:///{tmp_path}/dbos.db")
