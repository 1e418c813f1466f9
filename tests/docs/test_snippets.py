"""Every Python snippet of the documentation runs, in order, against a real server.

A comment on a page selects the backend for its snippets: `<!-- server: scripted -->` with the example script,
`<!-- server: hosted -->` with tools that the server runs, `<!-- server: keyed -->` with the example script and a store
that commands in the snippets use too, or `<!-- server: embedded -->`, the default. The scripted backends answer the
same way every time, so a text block after a snippet must equal the output of the snippet.
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

from support.snippet_services import run_services

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8484"
STOP_TIMEOUT_SECONDS = 30
OPTIONS = {"scripted": ["--script", str(ROOT / "examples" / "scripted.json")], "embedded": []}
# Without example tool calls in the prompt: the embedded model needs minutes for them on a busy machine.
FAST_CONFIG = '[backends.embedded]\nkind = "embedded"\nbatch = 256\ntool_examples = false\n'

_SERVER = re.compile(r"^<!-- server: (\w+) -->$", re.MULTILINE)
_SNIPPET = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```$)?", re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    line: int
    code: str
    expected: str | None


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
    """Start `antiphon serve` in another process, without the settings of this machine, and yield its URL."""
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
            assert process.wait(STOP_TIMEOUT_SECONDS) == 0
        finally:
            process.kill()


def run(snippet: Snippet, path: Path, url: str, namespace: dict[str, Any]) -> str:
    """Run a snippet and return its output. Its line numbers are those of the page."""
    code = "\n" * snippet.line + snippet.code.replace(ADDRESS, url)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, path, "exec"), namespace)
    return printed.getvalue()


@contextmanager
def choose_options(server: str, folder: Path) -> Iterator[list[str]]:
    if server == "hosted":
        pytest.importorskip("mcp")
        with run_services(folder) as options:
            yield options
    elif server == "keyed":
        url = f"sqlite:///{folder}/antiphon.db"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ANTIPHON_STORE", url)
            yield [*OPTIONS["scripted"], "--store", url]
    else:
        yield OPTIONS[server]


@pytest.mark.parametrize("page", [page for page in PAGES if page.snippets], ids=lambda page: page.path.name)
def test_snippets_run_and_print_the_expected_output(page: Page, tmp_path: Path) -> None:
    if page.path.name == "files-and-search.md":
        pytest.importorskip("onnxruntime")
    if page.server == "embedded":
        (tmp_path / "antiphon.toml").write_text(FAST_CONFIG)
    with choose_options(page.server, tmp_path) as options, serving(options, tmp_path) as url:
        namespace: dict[str, Any] = {"__name__": page.path.name}
        printed = [run(snippet, page.path, url, namespace) for snippet in page.snippets]
        for client in (value for value in namespace.values() if isinstance(value, OpenAI)):
            client.close()  # pages omit it, but a test must not leave a socket open
    if page.path.name == "README.md":
        assert namespace["outcome"].kind == "final"
    if page.server != "embedded":
        assert printed == [snippet.expected or "" for snippet in page.snippets]


def test_pages_with_snippets_are_found() -> None:
    assert {page.path.name for page in PAGES if page.snippets} >= {"state.md", "background.md", "errors.md"}
