"""A queue of background responses in a process of its own, which does with them what it is told to.

    python -m benchmarks.drivers.NAME FOLDER PROCESS (says | holds) LEASE

FOLDER is for the databases, PROCESS is the name under which the process works. Its model says that name and a few
words, at once; one that `holds` stops after the first until there is a file named `go`. LEASE is the seconds after
which a process is taken for dead.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_PAUSE = 0.01
WORDS = (" says", " that", " the", " train", " is", " late.")


class Place(NamedTuple):
    """What the command names."""

    folder: Path
    process: str
    holds: bool
    lease: float


class Model:
    def __init__(self, place: Place) -> None:
        self._place = place
        self.asked = 0
        self.resumed = 0

    async def speak(self) -> AsyncIterator[list[str]]:
        """The pieces of an answer, read by read."""
        self.asked += 1
        pieces = [self._place.process, *WORDS]
        if self._place.holds:
            yield pieces[:1]
            gate = self._place.folder / "go"
            while not gate.exists():  # noqa: ASYNC110, it is another process that makes it
                await asyncio.sleep(_PAUSE)
            self.resumed += 1
            yield pieces[1:3]
            pieces = pieces[3:]
        yield pieces


class Record(NamedTuple):
    """What is kept of a response: its text, once it has ended, and how many entries the log of its events has."""

    text: str | None
    entries: int


class Queue(Protocol):
    """What is to be done with a queue."""

    model: Model

    async def answer(self) -> str:
        """Accept a response, and hear it to its last event."""

    async def accept(self) -> str:
        """Accept a response; gives its id."""

    async def stop_short(self) -> str:
        """Do what accepting a response does up to its first commit, and nothing more; gives its id."""

    async def look(self, ids: list[str]) -> list[Record]: ...


Open = Callable[[Place], Coroutine[Any, Any, Queue]]


def serve(open_queue: Open) -> None:
    """Do what the lines of the standard input say, until it ends."""
    folder, process, model, lease = sys.argv[1:]
    asyncio.run(_serve(open_queue, Place(Path(folder), process, model == "holds", float(lease))))


async def _serve(open_queue: Open, place: Place) -> None:
    queue = await open_queue(place)
    # Not in a thread: the threads of the event loop are what is measured.
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("ready", flush=True)
    while line := await lines.readline():
        verb, *arguments = json.loads(line)
        print(json.dumps(await _do(queue, verb, arguments)), flush=True)


async def _do(queue: Queue, verb: str, arguments: list[Any]) -> Any:
    async def begin(count: int) -> list[str]:
        ids = await _repeat(queue.accept, count)
        while queue.model.asked < count:  # noqa: ASYNC110, once
            await asyncio.sleep(_PAUSE)
        return ids

    async def count_resumed() -> int:
        return queue.model.resumed

    verbs: dict[str, Callable[..., Awaitable[Any]]] = {
        "answer": lambda count, at_once: _answer(queue, count, at_once),
        "idle": _idle,
        "begin": begin,
        "stop_short": lambda count: _repeat(queue.stop_short, count),
        "look": queue.look,
        "count_resumed": count_resumed,
    }
    return await verbs[verb](*arguments)


async def _idle(seconds: float) -> float:
    """The CPU time that is used while nothing is to be done."""
    cpu = time.process_time()
    await asyncio.sleep(seconds)
    return time.process_time() - cpu


async def _repeat(do: Callable[[], Awaitable[str]], count: int) -> list[str]:
    return list(await asyncio.gather(*(do() for _ in range(count))))


async def _answer(queue: Queue, count: int, at_once: int) -> tuple[float, float, list[float], list[str]]:
    """Seconds of CPU and of the clock for so many responses, those of each of them, and what they said."""
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
