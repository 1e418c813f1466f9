from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.engine.sealing import load_secrets


def test_rotate_adds_a_new_first_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(tmp_path))
    before = load_secrets(tmp_path / "seal.keys")
    assert main(["rotate"]) == 0
    assert load_secrets(tmp_path / "seal.keys")[1:] == before
    assert "now has 2 keys." in capsys.readouterr().out


def test_rotate_rejects_keys_from_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("ANTIPHON_SEAL_KEYS", "a2V5")
    assert main(["rotate"]) == 1
    assert "add the new key there, as the first one." in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
