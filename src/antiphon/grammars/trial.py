"""Trials of grammars in a process of their own, before a grammar is compiled in this one.

A compiler can need minutes and gigabytes for a short grammar, and it ends its process when memory runs out. A compiled
grammar cannot be sent to another process. So each new grammar is compiled in a worker process first, under limits of
CPU time and memory. A grammar that passes is cheap, and this process can compile it too.
"""

import asyncio
import logging
import signal
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from antiphon.config.settings import GrammarLimits
from antiphon.errors import ServerError, Unavailable
from antiphon.framed_process import FramedProcess
from antiphon.grammars.messages import Job, Ready, Setup, TrialResult, Vocabulary
from antiphon.turn_queue import QueueLimits, TurnQueue

logger = logging.getLogger(__name__)

_FIXED_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",  # an arena per thread would count as memory of the compiler
    "RUST_BACKTRACE": "0",  # the backtrace of a crash takes seconds
}

_CACHE_SIZE = 1000
# On a busy machine, CPU time passes slowly.
_WALL_FACTOR = 20
_START_SECONDS = 60.0
_RETRY_SECONDS = 5.0
_QUEUE_SECONDS = 60.0
# A project may have this part of the waiting grammars.
_PROJECT_SHARE = 4
_SHUTTING_DOWN = "The server is shutting down."
_TOO_LONG = "compiling it takes more than {0} seconds of CPU time (setting grammars.compile_seconds)."
_KILLED = "the process that compiled it was killed."
_TOO_LARGE = "compiling it takes more than {0} MB of memory (setting grammars.compile_megabytes), or fails."


class GrammarTrial:
    """A worker process for trials, one at a time. It starts with the first trial and stays until `close`.

    `load_vocabulary` returns the tokens of the model whose library compiles the grammars, and is called in a thread.
    Without it, the package llguidance compiles them.
    """

    def __init__(self, *, load_vocabulary: Callable[[], Vocabulary] | None = None) -> None:
        self._load_vocabulary = load_vocabulary
        self._worker: FramedProcess | None = None
        self._megabytes = 0  # the memory limit of the worker
        self._queue = TurnQueue(1)
        self._is_closed = False
        # The fault of each grammar, or None. Least recently used first.
        self._faults: OrderedDict[bytes, str | None] = OrderedDict()

    async def find_fault(
        self, syntax: str, definition: str, limits: GrammarLimits, *, project: str = "", is_repeated: bool = False
    ) -> str | None:
        """Return the reason why a grammar cannot be used, or None.

        Raises RateLimited or Unavailable if too many grammars are waiting. With `is_repeated`, an earlier result does
        not count. Cancelling the call ends the trial.
        """
        key = blake2b(f"{limits} {syntax} {definition}".encode(errors="replace"), digest_size=16).digest()
        if key in self._faults and not is_repeated:
            self._faults.move_to_end(key)
            return self._faults[key]
        self._queue.limits = QueueLimits(limits.queued, max(1, limits.queued // _PROJECT_SHARE), _QUEUE_SECONDS)
        slot = await self._queue.acquire(project)
        try:
            if key not in self._faults or is_repeated:
                fault = await self._run(syntax, definition, limits)
                if fault == _KILLED:  # perhaps because others use too much memory
                    return fault
                self._faults[key] = fault
            return self._faults[key]
        finally:
            slot.release()
            while len(self._faults) > _CACHE_SIZE:
                self._faults.popitem(last=False)

    async def close(self) -> None:
        """End the worker. Waiting grammars are refused."""
        self._is_closed = True
        self._queue.close(_SHUTTING_DOWN)
        await self.end_worker()

    async def _run(self, syntax: str, definition: str, limits: GrammarLimits) -> str | None:
        """Return the fault that a worker finds, or the reason why it died."""
        job = Job(syntax, definition.encode(errors="replace").decode(), limits.compile_seconds)
        if self._worker is not None and (self._megabytes != limits.compile_megabytes or self._worker.has_ended):
            await self.end_worker()
        is_new = self._worker is None
        exit_code, result = await self._send(job, limits)
        if result is None and not is_new and exit_code != -signal.SIGPROF:
            # The worker may have died before, for another reason.
            exit_code, result = await self._send(job, limits)
        if result is not None:
            return result.fault
        logger.warning("a grammar ended the process that compiled it on trial (exit code %s)", exit_code)
        if exit_code == -signal.SIGPROF:
            return _TOO_LONG.format(f"{limits.compile_seconds:g}")
        if exit_code == -signal.SIGKILL:
            if self._is_closed:
                raise Unavailable(_SHUTTING_DOWN)
            return _KILLED
        return _TOO_LARGE.format(limits.compile_megabytes)

    async def _send(self, job: Job, limits: GrammarLimits) -> tuple[int | None, TrialResult | None]:
        """Let a worker do a job. Return its exit code, and its result unless it died."""
        if self._is_closed:
            raise Unavailable(_SHUTTING_DOWN)
        if self._worker is None:
            self._worker = await self._start_worker(limits.compile_megabytes)
            self._megabytes = limits.compile_megabytes
        worker = self._worker
        is_reusable = False
        try:
            async with asyncio.timeout(_START_SECONDS + _WALL_FACTOR * limits.compile_seconds):
                await worker.send(job)
                result = await worker.receive(TrialResult)
            is_reusable = result is not None and not result.is_last
        except TimeoutError:
            raise Unavailable("The server is too busy to compile the grammar.", retry_after=_RETRY_SECONDS) from None
        finally:
            if not is_reusable:
                await asyncio.shield(self.end_worker())
        return worker.exit_code, result

    async def _start_worker(self, megabytes: int) -> FramedProcess:
        vocabulary = None
        if self._load_vocabulary is not None:
            vocabulary = await asyncio.to_thread(self._load_vocabulary)
        worker = await FramedProcess.start("antiphon.grammars.worker", _FIXED_VARIABLES)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await worker.send(Setup(megabytes=megabytes, vocabulary=vocabulary))
                ready = await worker.receive(Ready)
            if ready is None:
                raise ServerError("The process that compiles grammars cannot start.")
        except TimeoutError:
            await worker.end()
            raise Unavailable(
                "The process that compiles grammars does not start.", retry_after=_RETRY_SECONDS
            ) from None
        except BaseException:
            await asyncio.shield(worker.end())
            raise
        if vocabulary is not None and not ready.is_native:
            logger.warning("xllamacpp does not export llguidance: grammars are tried with the package llguidance")
        return worker

    async def end_worker(self) -> None:
        """End the worker process, if there is one. The next trial starts another one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.end()
