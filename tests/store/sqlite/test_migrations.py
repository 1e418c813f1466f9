import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from antiphon.errors import ConfigError
from antiphon.store.migration_files import Migration, read_migrations
from antiphon.store.sqlite.migrations import migrate

FIRST = Migration(1, "001_a.sql", "-- A comment; with a semicolon.\nCREATE TABLE a (x TEXT DEFAULT ';');\n")
SECOND = Migration(2, "002_b.sql", "CREATE TABLE b (y);\nINSERT INTO b VALUES (1);\nINSERT INTO b VALUES (2)")
BROKEN = Migration(3, "003_c.sql", "CREATE TABLE c (z);\nINSERT INTO nowhere VALUES (1);\n")


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as connection:
        yield connection


def read_state(connection: sqlite3.Connection) -> tuple[int, list[str]]:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return version, [name for (name,) in connection.execute("SELECT name FROM sqlite_master ORDER BY name")]


def test_migrations_are_numbered_from_one_without_gaps() -> None:
    migrations = read_migrations("sqlite")
    assert [migration.version for migration in migrations] == list(range(1, len(migrations) + 1))


def test_migrations_run_in_order_and_once(connection: sqlite3.Connection) -> None:
    migrate(connection, [FIRST], path="store.db")
    assert read_state(connection) == (1, ["a"])
    migrate(connection, [FIRST, SECOND], path="store.db")
    migrate(connection, [FIRST, SECOND], path="store.db")
    assert read_state(connection) == (2, ["a", "b"])
    assert connection.execute("SELECT y FROM b").fetchall() == [(1,), (2,)]


def test_failed_migration_leaves_the_file_unchanged(connection: sqlite3.Connection) -> None:
    migrate(connection, [FIRST], path="store.db")
    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        migrate(connection, [FIRST, SECOND, BROKEN], path="store.db")
    assert read_state(connection) == (1, ["a"])


def test_file_of_a_newer_version_is_rejected(connection: sqlite3.Connection) -> None:
    migrate(connection, [FIRST, SECOND], path="store.db")
    with pytest.raises(ConfigError, match=r"store\.db has schema version 2, .* up to 1\."):
        migrate(connection, [FIRST], path="store.db")
    assert read_state(connection) == (2, ["a", "b"])


def test_file_with_tables_of_another_program_is_rejected(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE b (z)")
    with pytest.raises(ConfigError) as error:
        migrate(connection, [FIRST, SECOND], path="store.db")
    assert str(error.value) == (
        "The store store.db cannot be opened: it has tables of another program (b). Use another file."
    )
    assert read_state(connection) == (0, ["b"])


def test_migration_from_version_1_keeps_responses(connection: sqlite3.Connection) -> None:
    migrations = read_migrations("sqlite")
    migrate(connection, migrations[:1], path="store.db")
    rows = [("p", f"resp_{n}", f"resp_{n - 1}", 1.5 + n, b"[]", b"[%d]" % n, b"x" * 20_000 * n) for n in range(5)]
    connection.executemany("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    migrate(connection, migrations, path="store.db")
    rows_after = connection.execute("SELECT * FROM responses ORDER BY id").fetchall()
    assert rows_after == [(*row[:4], 1, None, *row[4:], 0) for row in rows]
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("SELECT name FROM sqlite_master WHERE name LIKE '%001%'").fetchall() == []


def test_migration_from_version_2_keeps_responses_and_expiry(connection: sqlite3.Connection) -> None:
    migrations = read_migrations("sqlite")
    migrate(connection, migrations[:2], path="store.db")
    rows = [("p", f"resp_{n}", f"resp_{n - 1}", 1.5, 1, n or None, b"[]", b"[]", b"x" * 20_000 * n) for n in range(5)]
    connection.executemany("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    migrate(connection, migrations, path="store.db")
    assert connection.execute("SELECT * FROM responses ORDER BY id").fetchall() == [(*row, 0) for row in rows]
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_migration_from_version_5_finds_the_blocks_of_responses(connection: sqlite3.Connection) -> None:
    migrations = read_migrations("sqlite")
    migrate(connection, migrations[:5], path="store.db")
    ended, failed, running = ("resp_" + letter * 44 for letter in "abc")
    rows = [("p", each, 1.5, each != running, b"[]", b"[]", b"{}") for each in (ended, failed, running)]
    insert = "INSERT INTO responses (project, id, created_at, final, input, output, body) VALUES (?, ?, ?, ?, ?, ?, ?)"
    connection.executemany(insert, rows)
    notes = [(ended, "msg_mine"), (failed, "msg_other"), (running, "msg_mine"), (running, "msg_first")]
    connection.executemany("INSERT INTO foreign_items VALUES ('p', ?, ?)", notes)
    ids = [("msg_first", "conv_1"), ("msg_mine", "conv_1"), ("msg_" + "a" * 44 + "0000", "conv_1"), (None, "conv_1")]
    connection.executemany("INSERT INTO items (project, item_id, conversation_id, content) VALUES ('p', ?, ?, '')", ids)
    connection.execute("INSERT INTO conversations (project, id, created_at, metadata) VALUES ('p', 'conv_1', 1, '{}')")
    migrate(connection, migrations, path="store.db")
    assert connection.execute("SELECT * FROM blocks").fetchall() == [("p", "conv_1", ended, 1)]
    connection.execute("DELETE FROM conversations")
    assert connection.execute("SELECT * FROM blocks").fetchall() == []


def test_migration_from_version_15_keeps_the_rows_of_renamed_columns(connection: sqlite3.Connection) -> None:
    migrations = read_migrations("sqlite")
    migrate(connection, migrations[:15], path="store.db")
    rows = {
        "items": ("place, project, conversation_id, item_id, content", (7, "p", "conv_1", "msg_1", b"{}")),
        "deleted_items": ("project, conversation_id, place, item_id", ("p", "conv_1", 8, "msg_2")),
        "blocks": ("project, conversation_id, response_id, place", ("p", "conv_1", "resp_1", 6)),
        "prompts": ("place, project, id, version, created_at, body", (5, "p", "pmpt_1", "1", 1, b"{}")),
        "runs": ("place, project, response_id, request, model, home", (4, "p", "resp_1", b"{}", "m", "here")),
        "homes": ("home, alive_until", ("here", 2.5)),
    }
    for table, (columns, row) in rows.items():
        values = ", ".join("?" * len(row))
        connection.execute(f"INSERT INTO {table} ({columns}) VALUES ({values})", row)
    migrate(connection, migrations, path="store.db")
    for old_table, (old_columns, row) in rows.items():
        table = "configurations" if old_table == "homes" else old_table
        columns = old_columns.replace("place", "position").replace("home", "configuration_id")
        assert connection.execute(f"SELECT {columns} FROM {table}").fetchall() == [row]
    schema = " ".join(sql or "" for (sql,) in connection.execute("SELECT sql FROM sqlite_master"))
    assert {"place", "home", "homes"} & set(re.findall(r"\w+", re.sub(r"--.*", "", schema))) == set()
    connection.execute("INSERT INTO conversations (project, id, created_at, metadata) VALUES ('p', 'conv_1', 1, '{}')")
    connection.execute("DELETE FROM conversations")  # its triggers still apply
    for table in ("items", "deleted_items", "blocks"):
        assert connection.execute(f"SELECT * FROM {table}").fetchall() == []
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
