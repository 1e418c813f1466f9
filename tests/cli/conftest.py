"""The command in a process of its own, on a pipe or on a terminal, and a file server that misbehaves on request."""

import functools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "antiphon"]
PATIENCE_SECONDS = 30
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
    """None of the variables of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("ANTIPHON_")]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """An empty home and working directory."""
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


class Server:
    """`antiphon serve` that is up. `introduction` is what it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.introduction = [process.stdout.readline().rstrip("\n") for _ in range(6)]
        assert self.introduction[0], "it did not start"
        self.url = self.introduction[0].rpartition(" ")[2]

    def wait_for_log(self, words: str) -> str:
        """The next line of the log with these words."""
        assert self._process.stderr is not None
        return next(line for line in self._process.stderr if words in line)


@contextmanager
def start_server(*options: str, log: int = subprocess.PIPE, cwd: Path | None = None) -> Iterator[Server]:
    command = [*COMMAND, "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=cwd) as process:
        try:
            yield Server(process)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_SECONDS) == 0
        finally:
            process.kill()


@pytest.fixture
def start() -> Callable[..., AbstractContextManager[Server]]:
    """Start a server with these options alone."""
    return start_server


@pytest.fixture
def serve(script) -> Callable[..., AbstractContextManager[Server]]:
    """Start a server for one test."""
    return functools.partial(start_server, "--script", str(script))


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """A server for all tests that do not care what it has answered before."""
    directory = tmp_path_factory.mktemp("server")
    (directory / "script.json").write_text(json.dumps(SCRIPT))
    options = ("--script", "script.json", "--store", "memory:")
    with start_server(*options, log=subprocess.DEVNULL, cwd=directory) as running:
        yield running


# The first terminal that the leader of a session opens is the one whose Ctrl-C it hears.
TAKE_TERMINAL = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._screen, inside = pty.openpty()
        command = [sys.executable, "-c", TAKE_TERMINAL, *COMMAND, *arguments]
        self._process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True)
        os.close(inside)
        self._text = ""

    def read_until(self, words: str) -> str:
        """Everything shown since the last call, up to and with these words."""
        while words not in self._text:
            assert self._is_readable(PATIENCE_SECONDS), f"no {words!r} after {self._text!r}"
            shown = self._read()
            assert shown, f"it left, after {self._text!r}"
            self._text += shown
        shown, _, self._text = self._text.partition(words)
        return shown + words

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def press(self, key: str, *, until: str) -> None:
        """Press a key, and again if nothing comes of it: readline misses an interrupt between two looks for input."""
        while until not in self._text:
            self.type(key)
            while until not in self._text and self._is_readable(3):
                shown = self._read()
                assert shown, f"it left, after {self._text!r}"
                self._text += shown
        self.read_until(until)

    def leave_with(self, key: str) -> int:
        """Press a key until it has left. Its exit status."""
        while self._process.poll() is None:
            self.type(key)
            while self._is_readable(3) and self._read():
                pass
        return self.wait()

    def wait(self) -> int:
        """Its exit status, once it has left."""
        while self._is_readable(PATIENCE_SECONDS) and self._read():
            pass
        return self._process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._screen)

    def _is_readable(self, seconds: float) -> bool:
        return bool(select.select([self._screen], [], [], seconds)[0])

    def _read(self) -> str:
        try:
            return os.read(self._screen, 1 << 16).decode()
        except OSError:  # the other side is closed
            return ""


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


class FileServer(ThreadingHTTPServer):
    """Serves `files` by path. `asked` holds each request's path, Range and Authorization."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.asked: list[tuple[str, str | None, str | None]] = []
        self.knows_ranges = True
        self.cut_after: list[int] = []
        """For each of the next answers, after how many bytes the connection is cut."""
        self.damaged = 0
        """How many of the next answers have a wrong byte."""


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted, self.headers.get("Authorization")))
        if self.path in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = self.server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.knows_ranges else 0
        if start and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_body(body, start)

    def send_body(self, body: bytes, start: int) -> None:
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        rest = body[start:]
        if self.server.damaged:
            self.server.damaged -= 1
            rest = bytes([rest[0] ^ 1]) + rest[1:]
        if self.server.cut_after:
            rest = rest[: self.server.cut_after.pop(0)]
        self.wfile.write(rest)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def file_server() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
