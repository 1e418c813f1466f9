import os
import sqlite3
from pathlib import Path

import pytest

from antiphon.store.sqlite.open_errors import describe_open_error


def test_file_or_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the answer of the system is replaced."""
    path = tmp_path / "store.db"
    path.mkdir()
    with pytest.raises(sqlite3.OperationalError) as refused:
        sqlite3.connect(path)
    assert describe_open_error(path, refused.value) == "unable to open database file"
    for denied in (path, tmp_path):
        monkeypatch.setattr(os, "access", lambda checked, _, denied=denied: checked != denied)
        assert describe_open_error(path, refused.value) == (
            f"{denied} cannot be written to, because of its permissions or a read-only file system"
        )
    assert describe_open_error(path, sqlite3.DatabaseError("file is not a database")) == "file is not a database"
