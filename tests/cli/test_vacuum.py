from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.store.sqlite.database import connect, create_file


def test_vacuum_prints_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(tmp_path))
    path = tmp_path / "antiphon.db"
    create_file(path)
    connection = connect(path)
    connection.execute("CREATE TABLE t (x)")
    connection.execute("INSERT INTO t VALUES (zeroblob(3000000))")
    connection.execute("DELETE FROM t")
    connection.close()
    assert main(["vacuum"]) == 0
    assert capsys.readouterr().out == f"{path} now has 0.0 MB. It had 3.0 MB.\n"


@pytest.mark.parametrize(
    ("store", "message"), [("memory:", "Only a SQLite store"), ("sqlite:///missing.db", "There is no store at")]
)
def test_vacuum_names_the_reason_of_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: str, message: str
) -> None:
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("ANTIPHON_STORE", store)
    monkeypatch.chdir(tmp_path)
    assert main(["vacuum"]) == 1
    assert message in capsys.readouterr().err
