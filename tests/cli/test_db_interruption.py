"""`antiphon db`: the files of an export, and what an interrupted or failed export or import leaves."""

import os
import stat
from pathlib import Path

from antiphon.cli.main import main


def test_export_is_a_file_that_only_its_user_can_read(tmp_path: Path) -> None:
    url, export = f"sqlite:///{tmp_path}/store.db", tmp_path / "export"
    assert main(["db", "migrate", "--store", url]) == 0
    before = os.umask(0o022)
    try:
        assert main(["db", "export", "--store", url, "--output", str(export)]) == 0
    finally:
        os.umask(before)
    assert stat.filemode(export.stat().st_mode) == "-rw-------"
