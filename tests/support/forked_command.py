"""`antiphon` commands in processes that are forked from a template, which has imported the server.

A command of its own interpreter imports for half a second of CPU time. As a program, this module is the template: it
reads orders from the socket that is its standard input. An order is JSON with the arguments, the folder and the
environment, and has three file descriptors: for the output, for the errors, and for the process id and exit code.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_LENGTH_BYTES = 4
_NUMBER_WIDTH = 16
_MODULES = [
    "antiphon.cli.run",
    "antiphon.cli.runs",
    "antiphon.cli.serve",
    "antiphon.engine.assembly",
    "antiphon.server.process",
    "antiphon.backends.scripted.script",
    "antiphon.store.sqlite.store",
    "antiphon.retrieval.process",
    "antiphon.tools.hosted.mcp.session",
    "antiphon.tools.hosted.web_search.actions",
    "antiphon.tools.hosted.image_generation.endpoint",
    "uvicorn.loops.uvloop",
]


class ForkedCommand:
    """A running command. It has the methods and attributes of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        stderr: IO[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the command. Without a file for `stderr`, `communicate` reads it."""
        order = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(os.environ if env is None else env)}
        data = json.dumps(order).encode()
        (output, output_end), (errors, errors_end), (self._status, status_end) = (os.pipe() for _ in range(3))
        self.stdout, self.stderr = os.fdopen(output), os.fdopen(errors)
        self.returncode: int | None = None
        self._communicated: tuple[str, str] | None = None
        files = [output_end, errors_end if stderr is None else stderr.fileno(), status_end]
        orders = _start_template()
        socket.send_fds(orders, [len(data).to_bytes(_LENGTH_BYTES)], files)
        orders.sendall(data)
        for file in (output_end, errors_end, status_end):
            os.close(file)
        self.pid = self._read_number()

    def poll(self) -> int | None:
        """Return the exit code, or None while the command runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the command and return its exit code: the negative signal number if one ended it."""
        if self.returncode is None:
            ready, _, _ = select.select([self._status], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired("antiphon", timeout or 0)
            self.returncode = self._read_number()
            os.close(self._status)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the output and the errors up to the end of the command. A second call returns them again."""
        if self._communicated is not None:
            return self._communicated
        texts = []
        for file in (self.stderr, self.stdout):
            data = b""
            while select.select([file], [], [], timeout)[0]:
                if not (chunk := os.read(file.fileno(), 65536)):
                    break
                data += chunk
            else:
                raise subprocess.TimeoutExpired("antiphon", timeout or 0)
            texts.append(data.decode())
        self.close()
        self.wait(timeout)
        self._communicated = texts[1], texts[0]
        return self._communicated

    def close(self) -> None:
        """Close the pipes of the output and the errors."""
        self.stdout.close()
        self.stderr.close()

    def _read_number(self) -> int:
        return int(os.read(self._status, _NUMBER_WIDTH))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _start_template() -> socket.socket:
    """Start the template of this process and return the socket for its orders."""
    own, other = socket.socketpair()
    command = [sys.executable, "-P", __file__]
    process = subprocess.Popen(command, stdin=other)
    other.close()

    def stop() -> None:
        own.close()
        process.wait()

    atexit.register(stop)
    return own


def _serve_orders() -> None:
    _import_server()
    orders = socket.socket(fileno=sys.stdin.fileno())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that ended children leave no entry
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, which closes the socket
    while True:
        length, files, _, _ = socket.recv_fds(orders, _LENGTH_BYTES, 3)
        if not length:
            return
        data = orders.recv(int.from_bytes(length), socket.MSG_WAITALL)
        if not os.fork():
            os.dup2(os.open(os.devnull, os.O_RDONLY), orders.detach())
            _watch_command(json.loads(data), *files)
        for file in files:
            os.close(file)


def _import_server() -> None:
    """Import the modules of a server. None of them starts a thread."""
    for name in _MODULES:
        importlib.import_module(name)


def _watch_command(order: dict[str, object], output: int, errors: int, status: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if not child:
        os.close(status)
        _run_command(order, output, errors)
    os.close(output)
    os.close(errors)
    _write_number(status, child)
    _, code = os.waitpid(child, 0)
    _write_number(status, os.waitstatus_to_exitcode(code))
    os._exit(0)


def _write_number(file: int, number: int) -> None:
    os.write(file, str(number).ljust(_NUMBER_WIDTH).encode())


def _run_command(order: dict[str, object], output: int, errors: int) -> None:
    from antiphon.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    code = 1
    try:
        os.chdir(str(order["cwd"]))
        os.environ.clear()
        os.environ.update(order["env"])  # type: ignore[call-overload]
        sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        sys.argv = ["antiphon", *order["arguments"]]  # type: ignore[misc]
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve_orders()
