"""Compilation of the interpreter of the WebAssembly sandbox, in processes of their own while the server runs.

The first stage is quick, and interpreters can then start. The second stage replaces its result by faster code.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from antiphon.errors import AntiphonError, ServerError, Unavailable
from antiphon.framed_process import FramedProcess
from antiphon.tasks import cancel_tasks
from antiphon.tools.hosted.code_interpreter.messages import CompilationJob, CompilationResult
from antiphon.tools.hosted.code_interpreter.prepare import STAGES, Stage, find_stage, is_prepared, name_compiled_file

logger = logging.getLogger(__name__)

_COMPILER = "antiphon.tools.hosted.code_interpreter.compiler"
# Compiling takes about a minute on two idle cores, and much longer on a busy machine.
_WAIT_SECONDS = 1800.0
_RETRY_SECONDS = 30.0
_SHUTTING_DOWN = "The server is shutting down."


class Compilation:
    """The compiled interpreter in a folder. Belongs to one event loop.

    Several processes can use one folder. One of them compiles at a time, and the others use its result.
    """

    def __init__(
        self, cache_dir: Path, *, compile_stage: Callable[[Path, Stage], Awaitable[None]] | None = None
    ) -> None:
        self._cache_dir = cache_dir
        self._compile_stage = compile_stage or run_compiler
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Compile in the background if that is necessary. An error is logged."""
        if self._is_closed:
            return
        if self._task is None and name_compiled_file() is not None and find_stage(self._cache_dir) != STAGES[-1]:
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run_in_background(self._ready))

    async def wait(self) -> None:
        """Wait until an interpreter can start. Start to compile if that is necessary.

        Raises ServerError if it cannot be compiled, and Unavailable if it takes too long.
        """
        if is_prepared(self._cache_dir):
            return
        if self._is_closed:
            raise Unavailable(_SHUTTING_DOWN)
        self.start()
        if self._ready is None:
            return
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise Unavailable("The code interpreter is being compiled.", retry_after=_RETRY_SECONDS) from None

    async def run(self) -> None:
        """Compile the last stage only: no call waits for the first one. Raises ServerError."""
        await self._compile(STAGES[-1])

    async def close(self) -> None:
        """End the compilation. Calls that wait for it are refused."""
        self._is_closed = True
        await cancel_tasks(self._task)

    async def _run_in_background(self, ready: asyncio.Future[None]) -> None:
        try:
            for stage in STAGES:
                await self._compile(stage)
                if not ready.done():
                    ready.set_result(None)
        except AntiphonError as error:
            logger.error("%s", error.message)
            _refuse(ready, error)
        finally:
            self._task = None
            _refuse(ready, Unavailable(_SHUTTING_DOWN))

    async def _compile(self, stage: Stage) -> None:
        """Compile one stage, unless the folder has it or a later one."""
        found = find_stage(self._cache_dir)
        if found is not None and STAGES.index(found) >= STAGES.index(stage):
            return
        if stage == STAGES[0]:
            logger.info(
                "compiling the Python interpreter of the code sandbox into %s, once for all servers of this user: "
                "code runs after about a minute",
                self._cache_dir,
            )
        started = time.monotonic()
        await self._compile_stage(self._cache_dir, stage)
        seconds = time.monotonic() - started
        logger.info("the interpreter of the code sandbox is compiled (%s, %.0f s)", stage, seconds)


async def run_compiler(cache_dir: Path, stage: Stage) -> None:
    """Compile one stage in a process, which ends if this is cancelled. Raises ServerError."""
    process = await FramedProcess.start(_COMPILER, {})
    try:
        await process.send(CompilationJob(cache_dir=str(cache_dir), stage=stage))
        result = await process.receive(CompilationResult)
    finally:
        await asyncio.shield(process.end())
    if result is None or result.error:
        reason = result.error if result is not None else f"its process ended with code {process.exit_code}"
        raise ServerError(f"The code interpreter cannot be compiled: {reason}.")


def _refuse(ready: asyncio.Future[None], error: AntiphonError) -> None:
    if not ready.done():
        ready.set_exception(error)
        ready.exception()  # there may be no call that waits
