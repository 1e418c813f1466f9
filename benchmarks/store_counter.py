"""Start our server and count the statements that it sends to its store.

    python -m benchmarks.store_counter COUNTS serve ...

COUNTS is a file with two numbers of eight bytes: statements, and transactions that write. The connections of SQLite
and of asyncpg report each statement. A batch of writes to PostgreSQL with the same text is one statement.
"""

import mmap
import re
import sqlite3
import struct
import sys
from pathlib import Path
from typing import Any

_FORMAT = "QQ"
SIZE = struct.calcsize(_FORMAT)
_WRITE = re.compile(r"\b(INSERT INTO|INSERT OR|REPLACE INTO|UPDATE|DELETE FROM)\b")


class Counts:
    """The counts in the file. One process writes them."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE)

    def add(self, *, statements: int = 0, transactions: int = 0) -> None:
        before = struct.unpack(_FORMAT, self._memory[:])
        self._memory[:] = struct.pack(_FORMAT, before[0] + statements, before[1] + transactions)


class ConnectionWatch:
    """Counts the statements of one connection."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._has_begun = self._has_written = False

    def count(self, statement: str) -> None:
        text = statement.lstrip().upper()
        if text.startswith("BEGIN"):
            self._has_begun, self._has_written = True, False
        elif text.startswith(("COMMIT", "ROLLBACK")):
            self._counts.add(transactions=int(self._has_written and text.startswith("COMMIT")))
            self._has_begun = False
        elif not text.startswith(("PRAGMA", "--")):  # lines that begin with -- are statements of triggers
            is_write = _WRITE.search(text) is not None
            self._has_written |= is_write
            self._counts.add(statements=1, transactions=int(is_write and not self._has_begun))


def read_counts(path: Path) -> tuple[int, int]:
    """Return the numbers of statements and of transactions that write."""
    statements, transactions = struct.unpack(_FORMAT, path.read_bytes())
    return statements, transactions


def watch_sqlite(counts: Counts) -> None:
    connect = sqlite3.connect

    def connect_watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(ConnectionWatch(counts).count)
        return connection

    sqlite3.connect = connect_watched


def watch_postgres(counts: Counts) -> None:
    try:
        import asyncpg
    except ImportError:
        return
    connect = asyncpg.connect

    async def connect_watched(*arguments: Any, **options: Any) -> Any:
        connection = await connect(*arguments, **options)
        watch = ConnectionWatch(counts)
        connection.add_query_logger(lambda record: watch.count(record.query))
        return connection

    asyncpg.connect = connect_watched


def main() -> int:
    counts = Counts(Path(sys.argv[1]))
    watch_sqlite(counts)
    watch_postgres(counts)
    from antiphon.cli.main import main as run

    del sys.argv[1]
    return run()


if __name__ == "__main__":
    sys.exit(main())
