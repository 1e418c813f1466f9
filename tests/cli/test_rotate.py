from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.engine.sealing import load_secrets


def test_rotating_makes_a_new_key_that_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(tmp_path))
    before = load_secrets(tmp_path / "seal.keys")
    assert main(["rotate"]) == 0
    assert load_secrets(tmp_path / "seal.keys")[1:] == before
    assert "has 2 keys now" in capsys.readouterr().out


def test_keys_that_are_in_the_settings_are_not_rotated_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("ANTIPHON_SEAL_KEYS", "a2V5")
    assert main(["rotate"]) == 1
    assert "put the new one in front" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
