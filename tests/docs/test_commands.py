"""The commands and settings in the documentation are valid, and so are those of `deploy`."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.cli.arguments import build_parser
from antiphon.config.loading import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guides").glob("*.md"))]
# The file of a package, and the files of other programs.
OTHER_TOML = ("[project", "# ~/.codex")

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OPERATORS = frozenset({"&&", "|", ";", "&", ">", "<"})


def find_commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of `antiphon` in shell lines."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words = list(lexer)
        while words:
            end = next((index for index, word in enumerate(words) if word in _OPERATORS), len(words))
            call, words = words[:end], words[end + 1 :]
            start = next((index for index, word in enumerate(call) if Path(word).name == "antiphon"), None)
            if start is not None and all("=" in word for word in call[:start]):
                yield call[start + 1 :]


def list_shell_commands() -> list[str]:
    found = []
    for page in PAGES:
        for kind, block in _BLOCK.findall(page.read_text("utf-8")):
            if kind == "console":
                shell = "\n".join(line[2:] for line in block.splitlines() if line.startswith("$ "))
            else:
                shell = block if kind in ("sh", "bash") else ""
            found += [shlex.join(each) for each in find_commands(shell)]
    return list(dict.fromkeys(found))


def list_settings() -> list[str]:
    blocks = [block for page in PAGES for kind, block in _BLOCK.findall(page.read_text("utf-8")) if kind == "toml"]
    found = [block for block in blocks if not block.startswith(OTHER_TOML)]
    return [*found, (ROOT / "deploy" / "antiphon.toml").read_text("utf-8")]


@pytest.mark.parametrize("command", list_shell_commands())
def test_command_has_valid_arguments(command: str) -> None:
    arguments = shlex.split(command)
    assert build_parser().parse_args(arguments).command == arguments[0]


@pytest.mark.parametrize("text", list_settings())
def test_settings_are_valid(text: str, tmp_path: Path) -> None:
    path = tmp_path / "antiphon.toml"
    path.write_text(text)
    variables = dict.fromkeys(re.findall(r'_env = "(\w+)"', text), "sk-test")
    settings = load(path, variables | {"HOME": str(tmp_path)}, {})
    assert all(hasattr(settings, name) for name in tomllib.loads(text))


def test_commands_and_settings_are_found() -> None:
    assert {"serve", "keys create", "db export"} <= {
        " ".join(each.split()[:n]) for each in list_shell_commands() for n in (1, 2)
    }
    assert len(list_settings()) >= 15
