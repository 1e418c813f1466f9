"""Every Python snippet of the documentation runs, in order, against a real server.

A page says with a comment which backend its snippets are written for: `<!-- server: scripted -->`, on the example
script, or `<!-- server: embedded -->`, which is also meant when it says nothing. On the scripted backend, which answers
the same way every time, a text block that follows a snippet is what the snippet prints.
"""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import OpenAI

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8484"
PATIENCE_SECONDS = 30
OPTIONS = {"scripted": ["--script", str(ROOT / "examples" / "scripted.json")], "embedded": []}
# Most of its time, the embedded model would read examples of calls: on a busy machine, for minutes.
QUICK = '[backends.embedded]\nkind = "embedded"\nbatch = 256\ntool_examples = false\n'

_SERVER = re.compile(r"^<!-- server: (\w+) -->$", re.MULTILINE)
_SNIPPET = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```$)?", re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    line: int
    code: str
    printed: str | None


class Page(NamedTuple):
    path: Path
    server: str
    snippets: list[Snippet]


def read_page(path: Path) -> Page:
    text = path.read_text("utf-8")
    server = _SERVER.search(text)
    snippets = [
        Snippet(text.count("\n", 0, found.start("code")), found["code"], found["printed"])
        for found in _SNIPPET.finditer(text)
    ]
    return Page(path, server[1] if server else "embedded", snippets)


DOCS = (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md"))
PAGES = [read_page(path) for path in (ROOT / "README.md", *sorted(DOCS))]


@contextmanager
def serving(options: list[str], home: Path) -> Iterator[str]:
    """The address of `antiphon serve` in a process of its own, without anyone's settings."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ANTIPHON_", "XDG_"))}
    command = [sys.executable, "-m", "antiphon", "serve", "--port", "0", "--store", "memory:", *options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=home,
        env=env | {"HOME": str(home)},
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip().rpartition(" ")[2]
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_SECONDS) == 0
        finally:
            process.kill()


def run(snippet: Snippet, path: Path, url: str, namespace: dict[str, Any]) -> str:
    """What the snippet prints. Its lines have the numbers that they have on the page."""
    code = "\n" * snippet.line + snippet.code.replace(ADDRESS, url)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, path, "exec"), namespace)
    return printed.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if page.snippets], ids=lambda page: page.path.name)
def test_the_snippets_run_and_print_what_they_say(page: Page, tmp_path: Path) -> None:
    if page.server == "embedded":
        (tmp_path / "antiphon.toml").write_text(QUICK)
    with serving(OPTIONS[page.server], tmp_path) as url:
        namespace: dict[str, Any] = {"__name__": page.path.name}
        printed = [run(snippet, page.path, url, namespace) for snippet in page.snippets]
        for client in (value for value in namespace.values() if isinstance(value, OpenAI)):
            client.close()  # a page need not say it, but a test leaves no socket open
    if page.server == "scripted":
        said = [snippet.printed or "" for snippet in page.snippets]
        assert printed == said


def test_there_are_pages_with_snippets() -> None:
    assert {page.path.name for page in PAGES if page.snippets} >= {"state.md", "background.md", "errors.md"}


def test_the_pages_link_to_files_that_are_there() -> None:
    broken = [
        f"{page.path.name}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.path.read_text("utf-8"))
        if not (page.path.parent / link).exists()
    ]
    assert broken == []
