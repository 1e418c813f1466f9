"""Checkpoints that shorten the write-ahead log.

SQLite copies the log into the database every 1,000 pages and then reuses it, but only while no connection reads from
it. Under constant reads, or while another program holds a read transaction, the log grows.
"""

import logging
import sqlite3
import time

from antiphon.store.sqlite.files import DatabaseFiles

logger = logging.getLogger(__name__)

# Time that a checkpoint waits for readers. Writers wait meanwhile.
WAIT_MS = 200
# Interval between checkpoints of a log that is too long, and between warnings about it.
RETRY_SECONDS = 10.0
WARNING_SECONDS = 600.0


def truncate_log(connection: sqlite3.Connection) -> bool:
    """Copy the log into the database and truncate it. Return False if readers prevent that.

    The database file shrinks only here, if its last pages were freed. Not in a transaction.
    """
    (busy_timeout,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute(f"PRAGMA busy_timeout = {WAIT_MS}")
    try:
        (is_busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        connection.execute(f"PRAGMA busy_timeout = {busy_timeout}")
    return not is_busy


class LogLimiter:
    """Truncates the log of a database when it is longer than `max_bytes`."""

    def __init__(self, files: DatabaseFiles, *, max_bytes: int) -> None:
        self._files = files
        self._max_bytes = max_bytes
        self._next_try = self._next_warning = 0.0

    def apply(self, connection: sqlite3.Connection) -> None:
        """Truncate the log if it was too long at the last check of the files."""
        if self._files.wal_size <= self._max_bytes:
            return
        now = time.monotonic()
        if now < self._next_try:
            return
        self._next_try = now + RETRY_SECONDS
        try:
            reason = None if truncate_log(connection) else "another program holds a read transaction"
        except sqlite3.Error as error:  # the commit before it has succeeded
            reason = str(error)
        if reason is not None and now >= self._next_warning:
            self._next_warning = now + WARNING_SECONDS
            size = self._files.wal_size >> 20
            logger.warning(
                "the log of the store %s has %d MB and cannot be truncated: %s", self._files.path, size, reason
            )
