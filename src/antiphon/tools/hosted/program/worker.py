"""The process that runs one program in V8. It has no network, files or processes: a bare isolate has no such functions.

`antiphon.tools.hosted.program.runner` starts it, and ends it if the program takes too long.
"""

import os
import queue
import resource
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from antiphon.tools.hosted.program.messages import CallResults, ProgramSetup, ProgramStep
from antiphon.worker_frames import queue_frames, read_frame, write_frame

_OUT_OF_MEMORY = "The program needs more memory than it may use."
# The memory of the interpreter, V8 and its code, besides the heap of the program.
_BASE_BYTES = 512 * 1024 * 1024


class IsolatedProgram:
    """A program in an isolate of its own."""

    def __init__(self, setup: ProgramSetup) -> None:
        from py_mini_racer import MiniRacer

        self._setup = setup
        self._calls = 0
        self._arguments_chars = 0
        self._context = MiniRacer()
        self._context.set_hard_memory_limit(setup.memory_bytes)
        make_host: Any = self._context.eval(Path(__file__).with_name("prelude.js").read_text())
        self._host = make_host(msgspec.json.encode(setup).decode())

    def start(self) -> ProgramStep:
        """Run the program until it waits or ends."""
        return self._run("start", "")

    def resume(self, results: CallResults) -> ProgramStep:
        """Pass results to the program and run it until it waits or ends."""
        return self._run("settle", msgspec.json.encode(results.results).decode())

    def close(self) -> None:
        self._context.close()

    def _run(self, action: str, payload: str) -> ProgramStep:
        try:
            self._host(action, payload)
            step = msgspec.json.decode(self._host("state", ""), type=ProgramStep)
            self._check(step)
        except Exception as error:  # a program can change the functions that its environment uses
            if self._context.was_hard_memory_limit_reached():
                return ProgramStep(is_done=True, error=_OUT_OF_MEMORY)
            return ProgramStep(is_done=True, error=f"The program broke its environment: {type(error).__name__}")
        return step

    def _check(self, step: ProgramStep) -> None:
        """Raise ValueError for a step that an unchanged environment cannot return: beyond the limits, or out of order.

        A program that changes the functions of its environment can pass the checks that are written in JavaScript.
        """
        setup = self._setup
        self._arguments_chars += sum(len(call.arguments) for call in step.calls)
        numbers = [*range(self._calls, self._calls + len(step.calls))]
        self._calls += len(step.calls)
        if (
            len(step.output) > setup.output_chars
            or len(step.error) > setup.error_chars
            or self._calls > setup.calls
            or self._arguments_chars > setup.arguments_chars
            or [call.number for call in step.calls] != numbers
            or not {call.name for call in step.calls} <= {*setup.tools}
        ):
            raise ValueError("the step is not valid")


def limit_process(memory_bytes: int) -> None:
    """Limit the resources of this process: array buffers are not on the heap, and code may escape from its sandbox."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform == "linux":
        limit = memory_bytes + _BASE_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def work(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Run the program of the first frame, with the results of the further ones. The second frame has none."""
    frame = read_frame(stdin)
    if frame is None:
        return
    setup = msgspec.msgpack.decode(frame, type=ProgramSetup)
    inputs: queue.SimpleQueue[CallResults] = queue.SimpleQueue()
    threading.Thread(target=queue_frames, args=(stdin, inputs, CallResults), daemon=True).start()
    limit_process(setup.memory_bytes)
    program = IsolatedProgram(setup)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # the process needs no further files or sockets
    write_frame(stdout, ProgramStep())
    inputs.get()
    step = program.start()
    write_frame(stdout, step)
    while not step.is_done:
        step = program.resume(inputs.get())
        write_frame(stdout, step)


if __name__ == "__main__":
    os.nice(5)
    work(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # V8 has threads that would delay the end
