"""Programs in processes of their own: one process per program, ended with it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from antiphon.config.tools import ProgramSettings
from antiphon.framed_process import FramedProcess
from antiphon.tools.hosted.program.messages import CallResult, CallResults, ProgramSetup, ProgramStep
from antiphon.turn_queue import QueueLimits, TurnQueue

logger = logging.getLogger(__name__)

MAX_ARGUMENTS_CHARS = 4 * 1024 * 1024
# More than the largest output and all arguments in UTF-8. The process is not trusted: code may escape from the isolate.
_MAX_STEP_BYTES = 64 * 1024 * 1024
_WORKER = "antiphon.tools.hosted.program.worker"
# The start of the interpreter and of V8, on a busy machine.
_START_SECONDS = 60.0
_SHUTTING_DOWN = "The server is shutting down."


class ProgramRunner:
    """Starts programs. The number of programs that run at the same time is limited."""

    def __init__(self, settings: ProgramSettings) -> None:
        self.settings = settings
        self._queue = TurnQueue(settings.processes)
        self._queue.limits = QueueLimits(settings.queued, max(1, settings.queued // 4), settings.queue_seconds)

    def close(self) -> None:
        """Refuse programs that wait."""
        self._queue.close(_SHUTTING_DOWN)

    @asynccontextmanager
    async def open(
        self, project: str, *, code: str, tools: list[str], text_tools: list[str], clock_ms: int, seed: int
    ) -> AsyncIterator["RunningProgram"]:
        """Start a process for a program. Leaving the context ends it.

        Raises Unavailable or RateLimited if too many programs wait, and ServerError if the process does not start.
        """
        settings = self.settings
        setup = ProgramSetup(
            code=code,
            tools=tools,
            text_tools=text_tools,
            clock_ms=clock_ms,
            seed=seed,
            memory_bytes=settings.memory_bytes,
            output_chars=settings.output_chars,
            calls=settings.calls,
            arguments_chars=MAX_ARGUMENTS_CHARS,
        )
        slot = await self._queue.acquire(project)
        try:
            process = await FramedProcess.start(_WORKER, {"TZ": "UTC"})
            try:
                yield RunningProgram(process, setup, settings.seconds)
            finally:
                await asyncio.shield(process.end())
        finally:
            slot.release()


class RunningProgram:
    """A program in its process. Only the time in which the program itself runs counts."""

    def __init__(self, process: FramedProcess, setup: ProgramSetup, seconds: float) -> None:
        self._process = process
        self._setup = setup
        self._limit = seconds
        self._left = seconds

    async def start(self) -> ProgramStep:
        """Run the program until it waits for results or ends."""
        step = await self._exchange(self._setup, _START_SECONDS)
        return step if step.is_done else await self.resume([])

    async def resume(self, results: list[CallResult]) -> ProgramStep:
        """Pass results to the program and run it until it waits or ends."""
        began_at = time.monotonic()
        step = await self._exchange(CallResults(results), self._left)
        self._left = max(0.0, self._left - (time.monotonic() - began_at))
        return step

    async def _exchange(self, message: ProgramSetup | CallResults, seconds: float) -> ProgramStep:
        try:
            async with asyncio.timeout(seconds):
                await self._process.send(message)
                step = await self._process.receive(ProgramStep, max_bytes=_MAX_STEP_BYTES)
        except TimeoutError:
            return ProgramStep(is_done=True, error=f"The program ran longer than {self._limit:g} seconds.")
        if step is None:
            code = self._process.exit_code
            logger.warning("the process of a program ended with code %s", code)
            return ProgramStep(is_done=True, error="The program was stopped: it needs more memory than it may use.")
        return step
