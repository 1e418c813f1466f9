"""Tools loaded from modules and files."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.errors import ConfigError
from antiphon.tools.loading import load_tools

CODE = '''
from antiphon import tool

@tool
def look(at: str) -> str:
    """Look at something."""
    return at

@tool
def listen() -> str:
    """Listen."""
    return "psst"

same = look

def plain() -> None: ...
'''


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "senses_of_a_test.py").write_text(CODE)
    (tmp_path / "broken_for_a_test.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "empty_for_a_test.py").write_text("")
    before, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("names", "loaded"),
    [
        (["senses_of_a_test"], ["look", "listen"]),
        (["senses_of_a_test:listen"], ["listen"]),
        (["senses_of_a_test.py"], ["look", "listen"]),
        (["senses_of_a_test.py:look", "senses_of_a_test.py:listen"], ["look", "listen"]),
        ([], []),
    ],
)
def test_each_tool_is_loaded_once_in_order(folder: Path, names: list[str], loaded: list[str]) -> None:
    assert [tool.name for tool in load_tools(names, directory=folder)] == loaded


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "There is no module 'nowhere' to load tools from."),
        ("no where", "'no where' is not a valid module name: use module, module:name or file.py."),
        ("senses_of_a_test:plain", "'senses_of_a_test:plain' is not a tool: decorate it with @tool."),
        (
            "senses_of_a_test:smell",
            "There is no tool 'senses_of_a_test:smell'. Tools of this module: look, listen, same.",
        ),
        ("empty_for_a_test", "There are no tools in 'empty_for_a_test': decorate functions with @tool."),
        (
            "broken_for_a_test",
            ("Cannot load tools from 'broken_for_a_test': ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ),
    ],
)
def test_loading_error_names_the_cause(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_tools([name], directory=folder)
    assert refused.value.message == message


def test_file_that_exits_is_named_in_the_error(folder: Path) -> None:
    (folder / "script.py").write_text("raise SystemExit('no arguments')")
    with pytest.raises(ConfigError, match=r"Cannot load tools from '.*/script.py': SystemExit: no arguments"):
        load_tools(["script.py"], directory=folder)


def test_missing_file_is_named_in_the_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no file .*/nowhere\.py to load tools from\."):
        load_tools(["nowhere.py"], directory=folder)
