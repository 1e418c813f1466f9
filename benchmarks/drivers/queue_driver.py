"""The main loop of a queue driver: an engine with background responses, controlled over standard input.

    python -m benchmarks.drivers.NAME FOLDER PROCESS (answers | holds) LEASE

FOLDER holds the databases. PROCESS is a name for the process; its model answers with that name and a few words. A model
that `holds` stops after the first delta until a file named `go` exists. LEASE is the lease time in seconds.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_PAUSE = 0.01
WORDS = (" reports", " that", " the", " train", " is", " late.")


class Arguments(NamedTuple):
    """The command-line arguments."""

    folder: Path
    process: str
    holds: bool
    lease: float


class Model:
    """The model of a driver, with counters for the tests of crashes."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self.started = 0
        self.resumed = 0

    async def answer(self) -> AsyncIterator[list[str]]:
        """Yield the deltas of an answer, one list per read."""
        self.started += 1
        pieces = [self._arguments.process, *WORDS]
        if self._arguments.holds:
            yield pieces[:1]
            gate = self._arguments.folder / "go"
            while not gate.exists():  # noqa: ASYNC110, another process creates the file
                await asyncio.sleep(_PAUSE)
            self.resumed += 1
            yield pieces[1:3]
            pieces = pieces[3:]
        yield pieces


class Record(NamedTuple):
    """The stored text of a response, or None before its end, and the number of its logged events."""

    text: str | None
    entries: int


class Queue(Protocol):
    """The operations on a queue."""

    model: Model

    async def answer(self) -> str:
        """Create a response, read it to its last event, and return its text."""

    async def accept(self) -> str:
        """Create a response and return its id."""

    async def accept_only(self) -> str:
        """Create a response, stop after the first commit, and return its id."""

    async def read_records(self, ids: list[str]) -> list[Record]: ...


Open = Callable[[Arguments], Coroutine[Any, Any, Queue]]


def serve(open_queue: Open) -> None:
    """Execute the commands on standard input until it ends."""
    folder, process, model, lease = sys.argv[1:]
    asyncio.run(_serve(open_queue, Arguments(Path(folder), process, model == "holds", float(lease))))


async def _serve(open_queue: Open, arguments: Arguments) -> None:
    queue = await open_queue(arguments)
    # Not in a thread, because the CPU time of all threads is measured.
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("ready", flush=True)
    while line := await lines.readline():
        command, *values = json.loads(line)
        print(json.dumps(await _execute(queue, command, values)), flush=True)


async def _execute(queue: Queue, command: str, values: list[Any]) -> Any:
    async def start(count: int) -> list[str]:
        ids = await _repeat(queue.accept, count)
        while queue.model.started < count:  # noqa: ASYNC110, once per measurement
            await asyncio.sleep(_PAUSE)
        return ids

    async def count_resumed() -> int:
        return queue.model.resumed

    commands: dict[str, Callable[..., Awaitable[Any]]] = {
        "answer": lambda count, at_once: _answer(queue, count, at_once),
        "idle": _idle,
        "start": start,
        "accept_only": lambda count: _repeat(queue.accept_only, count),
        "read_records": queue.read_records,
        "count_resumed": count_resumed,
    }
    return await commands[command](*values)


async def _idle(seconds: float) -> float:
    """Return the CPU time of an idle period, in seconds."""
    cpu = time.process_time()
    await asyncio.sleep(seconds)
    return time.process_time() - cpu


async def _repeat(operation: Callable[[], Awaitable[str]], count: int) -> list[str]:
    return list(await asyncio.gather(*(operation() for _ in range(count))))


async def _answer(queue: Queue, count: int, at_once: int) -> tuple[float, float, list[float], list[str]]:
    """Return CPU time and wall-clock time of all responses, the wall-clock time of each, and their texts."""
    took: list[float] = []
    texts: list[str] = []

    async def work() -> None:
        for _ in range(count // at_once):
            began = time.perf_counter()
            text = await queue.answer()
            took.append(time.perf_counter() - began)
            texts.append(text)

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(at_once)))
    return time.process_time() - cpu, time.perf_counter() - began, took, texts
