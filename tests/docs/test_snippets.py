"""Every Python snippet of the documentation runs, in order, against a real server.

A comment on a page selects the backend for its snippets: `<!-- server: scripted -->` with the example script,
`<!-- server: hosted -->` with tools that the server runs, `<!-- server: keyed -->` with the example script and a store
that commands in the snippets use too, or `<!-- server: embedded -->`, the default. The scripted backends answer the
same way every time, so a text block after a snippet must equal the output of the snippet. The pages with the embedded
model are slow tests. The snippets of the README also run with scripted answers.
"""

import functools
import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import OpenAI

from support.forked_command import ForkedCommand
from support.snippet_services import run_services

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8484"
STOP_TIMEOUT_SECONDS = 30
OPTIONS = {"scripted": ["--script", str(ROOT / "examples" / "scripted.json")], "embedded": []}
# Pages whose snippets need a package of an extra.
EXTRAS = {"files-and-search.md": "onnxruntime", "programs.md": "py_mini_racer"}
# Without example tool calls in the prompt: the embedded model needs minutes for them on a busy machine.
FAST_CONFIG = '[backends.embedded]\nkind = "embedded"\nbatch = 256\ntool_examples = false\n'
WEATHER = {"city": "Paris", "unit": "c"}
TEMPERATURE = '{"city": "Paris", "degrees": 18}'
# The conversations of the README. The rules also show that the server sends the history and the tool outputs.
README_SCRIPT = {
    "models": ["smollm2-135m"],
    "rules": [
        {"last_item": "function_call_output", "text": "18 degrees and sunny", "answers": ["It is sunny."]},
        {"last_item": "function_call_output", "text": "18 degrees in Paris", "answers": [TEMPERATURE]},
        {"user": "weather", "answers": [[{"tool_call": {"name": "get_weather", "arguments": WEATHER}}]]},
        {"user": "How warm", "answers": [[{"tool_call": {"name": "get_temperature", "arguments": {"city": "Paris"}}}]]},
        {"user": "Which language", "text": "I am learning Python.", "answers": ["Python."]},
        {"user": "Ada is 36", "answers": ['{"name": "Ada", "age": 36}']},
        {"user": "Count to five.", "answers": ["One to five."]},
        {"user": "capital of France", "answers": ["Paris."]},
    ],
}
README_OUTPUT = [
    "Paris.\nOne to five.",
    "Python.\n",
    f"get_weather {WEATHER}\nIt is sunny.\n",
    "name='Ada' age=36\n",
    "final Temperature(city='Paris', degrees=18)\n",
]

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
    command = ["serve", "--port", "0", "--store", "memory:", *options]
    with Path(os.devnull).open("w") as errors:
        process = ForkedCommand(command, cwd=home, stderr=errors, env=env | {"HOME": str(home)})
    try:
        yield process.stdout.readline().strip().rpartition(" ")[2]
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_SECONDS) == 0
    finally:
        process.kill()
        process.close()


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


@pytest.fixture(scope="module")
def find_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Return a function that returns the URL of a server with a backend. Pages with the same backend share it."""
    with ExitStack() as stack:

        @functools.cache
        def start(server: str) -> str:
            folder = tmp_path_factory.mktemp(server)
            if server == "embedded":
                (folder / "antiphon.toml").write_text(FAST_CONFIG)
            return stack.enter_context(serving(stack.enter_context(choose_options(server, folder)), folder))

        yield start


def make_case(page: Page) -> Any:
    marks = [pytest.mark.slow] if page.server == "embedded" else []
    return pytest.param(page, id=page.path.name, marks=marks)


@pytest.mark.parametrize("page", [make_case(page) for page in PAGES if page.snippets])
def test_snippets_run_and_print_the_expected_output(
    page: Page, find_server: Callable[[str], str], tmp_path: Path
) -> None:
    if page.path.name in EXTRAS:
        pytest.importorskip(EXTRAS[page.path.name])
    if page.server == "keyed":  # commands in its snippets use the store
        with choose_options(page.server, tmp_path) as options, serving(options, tmp_path) as url:
            check_page(page, url)
    else:
        check_page(page, find_server(page.server))


def run_page(page: Page, url: str) -> tuple[list[str], dict[str, Any]]:
    """Return the output of each snippet, and the variables after the last one."""
    namespace: dict[str, Any] = {"__name__": page.path.name}
    printed = [run(snippet, page.path, url, namespace) for snippet in page.snippets]
    for value in namespace.values():
        # The client of LangChain is an attribute.
        if isinstance(client := getattr(value, "root_client", value), OpenAI):
            client.close()  # pages omit it, but a test must not leave a socket open
    return printed, namespace


def check_page(page: Page, url: str) -> None:
    printed, namespace = run_page(page, url)
    if page.path.name == "README.md":
        assert namespace["outcome"].kind == "final"
    if page.server != "embedded":
        assert printed == [snippet.expected or "" for snippet in page.snippets]


def test_readme_snippets_print_scripted_answers(tmp_path: Path) -> None:
    script = tmp_path / "readme.json"
    script.write_text(json.dumps(README_SCRIPT))
    with serving(["--script", str(script)], tmp_path) as url:
        printed, _ = run_page(PAGES[0], url)
    assert printed == README_OUTPUT
    assert README_OUTPUT[-1].strip() in PAGES[0].path.read_text("utf-8")


def test_pages_with_snippets_are_found() -> None:
    assert {page.path.name for page in PAGES if page.snippets} >= {"state.md", "background.md", "errors.md"}
