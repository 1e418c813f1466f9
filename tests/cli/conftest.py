"""An empty home folder, servers, terminals and a file server for the tests of the command line."""

import functools
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from support.cli_process import Server, Terminal, start_server
from support.file_server import FileServer
from support.loop_blocks import assert_no_block

SCRIPT = {
    "models": ["scripted"],
    "rules": [
        {"user": "wait", "answers": [[{"text": "One two "}, {"wait": "never"}, {"text": "three"}]]},
        {"user": "think", "answers": [[{"reasoning": "Let me see."}, {"text": "Done."}]]},
        {"user": "fail", "answers": [[{"text": "I begin"}, {"failure": {"message": "The model fell over."}}]]},
        {"user": "refuse", "answers": [[{"raise": {"message": "Not that.", "status": 400}}]]},
        {"user": "long", "answers": [[{"text": "and so on"}, {"finish": "length"}]]},
        {"user": "call", "answers": [[{"tool_call": {"name": "look", "arguments": {"at": "it"}}}]]},
        {"user": "colour", "answers": ["\u001b[31mred\u001b[0m"]},
    ],
    "default": "You said: {input} ({history})",
}


@pytest.fixture(scope="session", autouse=True)
def _no_settings() -> Iterator[None]:
    """Remove the ANTIPHON_ variables of the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("ANTIPHON_")]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Return an empty folder, set as home and working directory."""
    directory = tmp_path / "home"
    directory.mkdir()
    monkeypatch.setenv("HOME", str(directory))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def script(home) -> Path:
    path = home / "script.json"
    path.write_text(json.dumps(SCRIPT))
    return path


@pytest.fixture
def start() -> Callable[..., AbstractContextManager[Server]]:
    """Return a function that starts a server with the given options only."""
    return start_server


@pytest.fixture
def serve(script) -> Callable[..., AbstractContextManager[Server]]:
    """Return a function that starts a server with the scripted model."""
    return functools.partial(start_server, "--script", str(script))


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """Yield a server that many tests share, because they do not depend on its state."""
    directory = tmp_path_factory.mktemp("server")
    (directory / "script.json").write_text(json.dumps(SCRIPT))
    options = ("--script", "script.json", "--store", "memory:")
    log_path = directory / "server.log"
    with log_path.open("w") as log, start_server(*options, log=log, cwd=directory) as running:
        yield running
    assert_no_block(log_path.read_text())


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.fixture
def file_server() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
