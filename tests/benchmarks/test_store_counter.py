"""Counting the statements of a store."""

from pathlib import Path

import pytest
from benchmarks.store_counter import ConnectionWatch, Counts, read_counts


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        (["SELECT 1"], (1, 0)),
        (["insert into a values (1)"], (1, 1)),
        (["BEGIN", "INSERT INTO a VALUES (1)", "UPDATE a SET b = 1", "COMMIT"], (2, 1)),
        (["BEGIN IMMEDIATE", "SELECT 1", "COMMIT"], (1, 0)),
        (["BEGIN", "DELETE FROM a", "ROLLBACK", "SELECT 1"], (2, 0)),
        (["WITH x AS (SELECT 1) INSERT INTO a SELECT * FROM x"], (1, 1)),
        (["PRAGMA wal_checkpoint", "-- a trigger"], (0, 0)),
    ],
)
def test_statements_and_writing_transactions_are_counted(
    tmp_path: Path, statements: list[str], expected: tuple[int, int]
) -> None:
    path = tmp_path / "counts"
    watch = ConnectionWatch(Counts(path))
    for statement in statements:
        watch.count(statement)
    assert read_counts(path) == expected
