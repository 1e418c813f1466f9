"""Reading of files in a process of their own. It starts when there is work, and ends when it is idle."""

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator
from importlib.util import find_spec

from antiphon.config.limits import FileLimits
from antiphon.errors import InvalidRequest, ServerError, Unavailable
from antiphon.framed_process import FramedProcess
from antiphon.retrieval.extract import INVALID, Unreadable
from antiphon.retrieval.local_model import find_missing_packages
from antiphon.retrieval.messages import ReadChunk, ReaderReady, ReaderSetup, ReadJob, ReadProgress

logger = logging.getLogger(__name__)

_PARSERS = ("mammoth", "pypdfium2", "selectolax")
_START_SECONDS = 60.0
# Time without a result. Eight chunks take less than a second on an idle processor.
_PROGRESS_SECONDS = 120.0
# On a busy machine, CPU time passes slowly.
_WALL_FACTOR = 10


def check_packages(*, embed: bool) -> None:
    """Raise InvalidRequest if the packages that read files are missing. `embed`: the local model is needed too."""
    missing = [name for name in _PARSERS if find_spec(name) is None]
    if embed:
        missing += find_missing_packages()
    elif find_spec("numpy") is None:
        missing.append("numpy")
    if missing:
        raise InvalidRequest(
            "This server cannot index files, because packages are not installed on it "
            f"({', '.join(missing)}): pip install 'antiphon[search]'",
            code="missing_extra",
        )


class FileReader:
    """Reads one file at a time. With `embed`, chunks have vectors of the local model."""

    def __init__(self, limits: FileLimits, *, embed: bool) -> None:
        self._limits = limits
        self._embed = embed
        self._process: FramedProcess | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def read(
        self, path: str, filename: str, *, chunk_tokens: int = 0, overlap_tokens: int = 0
    ) -> AsyncGenerator[list[ReadChunk], None]:
        """Yield the chunks of a file; without `chunk_tokens`, the parts of its text.

        Raises Unreadable if the file cannot be read. Closing the generator ends the process.
        """
        limits = self._limits
        job = ReadJob(
            path=path,
            filename=filename,
            chunk_tokens=chunk_tokens,
            overlap_tokens=overlap_tokens,
            parse_seconds=limits.parse_seconds,
            max_text_bytes=limits.max_text_bytes,
            max_tokens=limits.max_file_tokens,
        )
        async with self._lock:
            process = await self._start()
            is_done = False
            try:
                await process.send(job)
                while not is_done:
                    progress = await self._receive(process)
                    is_done = progress.is_last
                    if progress.code:
                        raise Unreadable(progress.code, progress.message)
                    if progress.chunks:
                        yield progress.chunks
            finally:
                if is_done:
                    loop = asyncio.get_running_loop()
                    self._idle_timer = loop.call_later(limits.idle_seconds, self._end_idle)
                else:
                    await asyncio.shield(self._end())

    async def read_text(self, path: str, filename: str) -> str:
        """Return the text of a file. Raises Unreadable."""
        return "".join([chunk.text async for chunks in self.read(path, filename) for chunk in chunks])

    async def close(self) -> None:
        self._is_closed = True
        await self._end()
        await asyncio.gather(*self._ending)

    async def _receive(self, process: FramedProcess) -> ReadProgress:
        seconds = _PROGRESS_SECONDS + _WALL_FACTOR * self._limits.parse_seconds
        try:
            async with asyncio.timeout(seconds):
                progress = await process.receive(ReadProgress)
        except TimeoutError:
            raise Unreadable("server_error", f"Reading the file made no progress for {seconds:g} seconds.") from None
        if progress is not None:
            return progress
        if self._is_closed:
            raise Unavailable("The server is shutting down.")
        logger.warning("a file ended the process that read it (exit code %s)", process.exit_code)
        if process.exit_code == -signal.SIGPROF:
            message = f"Reading the file takes more than {self._limits.parse_seconds:g} seconds of CPU time."
            raise Unreadable(INVALID, message)
        if process.exit_code == -signal.SIGKILL:  # perhaps because others use too much memory
            raise Unreadable("server_error", "The process that read the file was killed.")
        raise Unreadable(INVALID, "The file makes its reader crash, or needs too much memory.")

    async def _start(self) -> FramedProcess:
        """Return the running process, or a new one."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._is_closed:
            raise Unavailable("The server is shutting down.")
        if self._process is not None and not self._process.has_ended:
            return self._process
        process = await FramedProcess.start("antiphon.retrieval.worker", {"MALLOC_ARENA_MAX": "2"})
        self._process = process
        try:
            async with asyncio.timeout(_START_SECONDS):
                await process.send(ReaderSetup(megabytes=self._limits.worker_megabytes, embed=self._embed))
                ready = await process.receive(ReaderReady)
        except TimeoutError:
            ready = None
        except BaseException:
            await asyncio.shield(self._end())
            raise
        if ready is None:
            await self._end()
            raise ServerError("The process that reads files cannot start.")
        return process

    def _end_idle(self) -> None:
        self._idle_timer = None
        task = asyncio.ensure_future(self._end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        process, self._process = self._process, None
        if process is not None:
            await process.end()
