"""A thread with a database connection of its own, fed from the event loop.

The loop hands over what came up in one of its turns at once, the thread takes whatever waits for it as one batch and
tells the loop about a whole batch in one call: under load, the price of waking each other is shared by everyone in it.
Waking the thread for each job would have the two fight over the interpreter, at several times the price of the job.
"""

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import Any

from antiphon.errors import AntiphonError, ServerError, Unavailable

# A statement, or a function that is called with the connection and the parameters and may execute several.
Work = str | Callable[..., object]


class Job:
    """Some work, the future of whoever waits for it, and what came of it: rows, a count, a result, or an error."""

    __slots__ = ("outcome", "parameters", "waiter", "work")

    def __init__(self, work: Work, parameters: Sequence[object], waiter: asyncio.Future[Any]) -> None:
        self.work = work
        self.parameters = parameters
        self.waiter = waiter
        self.outcome: object = None


Run = Callable[[sqlite3.Connection, list[Job]], None]


class Worker:
    """`run` executes a batch and leaves an outcome in each job; if it raises, the error is every job's outcome."""

    def __init__(self, name: str, connection: sqlite3.Connection, run: Run) -> None:
        self._connection = connection
        self._run = run
        self._jobs: queue.SimpleQueue[Sequence[Job] | None] = queue.SimpleQueue()
        self._outbox: list[Job] = []
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        # A process that ends without closing its store must not hang on this thread; nothing acknowledged is lost.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, work: Work, parameters: Sequence[object]) -> asyncio.Future[Any]:
        """Queue some work. It is executed even if the future is cancelled meanwhile."""
        if self._closing:
            raise Unavailable("The store is not open.")
        waiter = self._loop.create_future()
        if not self._outbox:
            self._loop.call_soon(self._send)
        self._outbox.append(Job(work, parameters, waiter))
        return waiter

    async def close(self) -> None:
        """Execute what is queued, then disconnect."""
        if not self._closing:
            self._closing = True
            self._send()
            self._jobs.put(None)
        await asyncio.shield(self._finished)

    def _send(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._jobs.put(outbox)

    def _work(self) -> None:
        closing = False
        while not closing:
            taken = [self._jobs.get()]
            taken += [self._jobs.get() for _ in range(self._jobs.qsize())]
            batch = [job for jobs in taken if jobs is not None for job in jobs]
            closing = None in taken
            if batch:
                self._execute(batch)
                self._call_loop(_answer, batch)
        self._connection.close()
        self._call_loop(self._finished.set_result, None)

    def _execute(self, batch: list[Job]) -> None:
        try:
            self._run(self._connection, batch)
        except Exception as error:
            for job in batch:
                job.outcome = error

    def _call_loop(self, callback: Callable[[Any], object], argument: object) -> None:
        # A closed loop has nobody left who waits; the jobs are done all the same.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, argument)


def _answer(batch: list[Job]) -> None:
    for job in batch:
        if job.waiter.done():  # cancelled: whoever asked has gone
            continue
        if isinstance(job.outcome, AntiphonError):  # raised by the job's own function
            job.waiter.set_exception(job.outcome)
        elif isinstance(job.outcome, Exception):
            # One error may be the outcome of many jobs, and each waiter raises one of its own.
            # What went wrong is for the log: a client has no use for it, and it may name tables and paths.
            failure = ServerError("The store failed.")
            failure.__cause__ = job.outcome
            job.waiter.set_exception(failure)
        else:
            job.waiter.set_result(job.outcome)
