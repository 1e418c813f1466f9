"""The reasons why a SQLite file cannot be opened."""

import os
import sqlite3
from pathlib import Path

_NO_ACCESS = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)


def describe_open_error(path: Path, error: Exception) -> str:
    """Return the reason of an error. SQLite does not report that it must be able to create files in the folder."""
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_ACCESS:
        for checked in (path, path.absolute().parent):
            if checked.exists() and not os.access(checked, os.W_OK):
                return f"{checked} cannot be written to, because of its permissions or a read-only file system"
    return str(error)
