"""The command `antiphon` in a process of its own: a server, or any command on a terminal."""

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from support.loop_blocks import assert_no_block

COMMAND = [sys.executable, "-m", "antiphon"]
WAIT_SECONDS = 30
# The first terminal that a session leader opens becomes its controlling terminal, which delivers Ctrl-C.
TAKE_TERMINAL = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"


class Server:
    """A running `antiphon serve`. `banner` are the lines that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._log: list[str] = []
        assert process.stdout is not None
        self.banner = [process.stdout.readline().rstrip("\n") for _ in range(6)]
        assert self.banner[0], "the server did not start"
        self.url = self.banner[0].rpartition(" ")[2]

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_log(self, words: str) -> str:
        """Read the log up to a line with these words and return it."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line)
            if words in line:
                return line
        raise AssertionError(f"no {words!r} in {self._log}")

    def read_log(self) -> str:
        """Return the whole log, after the end of the process."""
        assert self._process.stderr is not None
        return "".join([*self._log, *self._process.stderr])


@contextmanager
def start_server(*options: str, log: int | IO[str] = subprocess.PIPE, cwd: Path | None = None) -> Iterator[Server]:
    """Start a server, and stop it at the end. A block of its event loop fails the test."""
    command = [*COMMAND, "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=cwd) as process:
        try:
            server = Server(process)
            yield server
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_SECONDS) == 0
            if process.stderr is not None:
                assert_no_block(server.read_log())
        finally:
            process.kill()


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._screen, inside = pty.openpty()
        command = [sys.executable, "-c", TAKE_TERMINAL, *COMMAND, *arguments]
        self._process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True)
        os.close(inside)
        self._text = ""

    def read_until(self, words: str) -> str:
        """Return the output since the last call, up to and including these words."""
        while words not in self._text:
            assert self._is_readable(WAIT_SECONDS), f"no {words!r} after {self._text!r}"
            shown = self._read()
            assert shown, f"the command ended after {self._text!r}"
            self._text += shown
        shown, _, self._text = self._text.partition(words)
        return shown + words

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def press(self, key: str, *, until: str) -> None:
        """Press a key and wait until the text appears."""
        self.type(key)
        while until not in self._text:
            if self._is_readable(1):
                shown = self._read()
                assert shown, f"the command ended after {self._text!r}"
                self._text += shown
            else:
                self._wake()
        self.read_until(until)

    def leave_with(self, key: str) -> int:
        """Press a key that ends the command, and return its exit status."""
        self.type(key)
        while self._process.poll() is None:
            while self._is_readable(1) and self._read():
                pass
            self._wake()
        return self.wait()

    def hang_up(self) -> int:
        """Close the terminal, and return the exit status of the command."""
        os.close(self._screen)
        self._screen = -1
        return self._process.wait(WAIT_SECONDS)

    def wait(self) -> int:
        """Wait until the command ends, and return its exit status."""
        while self._is_readable(WAIT_SECONDS) and self._read():
            pass
        return self._process.wait(WAIT_SECONDS)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._screen >= 0:
            os.close(self._screen)

    def _wake(self) -> None:
        """Let readline look for an interrupt: it misses one between two polls for input."""
        self._process.send_signal(signal.SIGWINCH)

    def _is_readable(self, seconds: float) -> bool:
        return bool(select.select([self._screen], [], [], seconds)[0])

    def _read(self) -> str:
        try:
            return os.read(self._screen, 1 << 16).decode()
        except OSError:  # the other side is closed
            return ""
