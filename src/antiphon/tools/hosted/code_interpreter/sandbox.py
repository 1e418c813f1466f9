"""The interpreters of the containers: one process each, started by the first call and ended when it is no longer
needed.

The number of processes is limited. If a container needs one more, the one that has been idle longest ends: its
container loses the variables, but no files.
"""

import asyncio
import logging
import secrets
import shutil
from pathlib import Path
from typing import NamedTuple

from antiphon.config.tools import CodeInterpreterSettings
from antiphon.errors import ServerError, Unavailable
from antiphon.framed_process import FramedProcess
from antiphon.tools.hosted.code_interpreter.compilation import Compilation
from antiphon.tools.hosted.code_interpreter.messages import CodeJob, CodeResult, SandboxReady, SandboxSetup
from antiphon.turn_queue import QueueLimits, TurnQueue

logger = logging.getLogger(__name__)

DATA_FOLDER = "data"
_SHUTTING_DOWN = "The server is shutting down."
_WORKER = "antiphon.tools.hosted.code_interpreter.worker"
# Compiling is not part of it. An interpreter that was compiled for another kind of processor is compiled again by the
# new process.
_START_SECONDS = 900.0
_GRACE_SECONDS = 30.0
_TEMPORARY_BYTES = 64 * 1024 * 1024
_RETRY_SECONDS = 5.0
_SCRATCH = "scratch"


class SandboxTarget(NamedTuple):
    """The part of a container that its interpreter needs. The files are in the folder `data` below `folder`."""

    id: str
    project: str
    folder: Path
    memory_bytes: int
    folder_bytes: int


class SandboxRun(NamedTuple):
    """The result of a call, and the name of the interpreter that ran it. No other interpreter has the same name."""

    result: CodeResult
    interpreter: str


class _Entry:
    """A container in use. `users` is the number of calls that run or wait."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
        self.process: FramedProcess | None = None
        self.name = ""
        self.scratch: Path | None = None


class Sandboxes:
    """The interpreters of all containers of this server. Belongs to one event loop."""

    def __init__(self, settings: CodeInterpreterSettings, *, cache_dir: Path) -> None:
        self.settings = settings
        self._cache_dir = cache_dir
        self._compilation = Compilation(cache_dir) if settings.sandbox == "wasm" else None
        self._entries: dict[str, _Entry] = {}  # by container id, least recently used first
        self._queue = TurnQueue(settings.interpreters)
        self._queue.limits = QueueLimits(settings.queued, max(1, settings.queued // 4), settings.queue_seconds)
        self._is_closed = False

    def start_compilation(self) -> None:
        """Compile the interpreter in the background if that is necessary."""
        if self._compilation is not None:
            self._compilation.start()

    async def wait_until_compiled(self) -> None:
        """Wait until interpreters can start. Raises ServerError or Unavailable if they cannot."""
        if self._compilation is not None:
            await self._compilation.wait()

    def find_interpreter(self, container_id: str) -> str | None:
        """Return the name of the running interpreter of a container, or None if there is none."""
        entry = self._entries.get(container_id)
        if entry is None or entry.process is None or entry.process.has_ended:
            return None
        return entry.name

    def is_busy(self, container_id: str) -> bool:
        entry = self._entries.get(container_id)
        return entry is not None and entry.users > 0

    async def run(self, container: SandboxTarget, code: str) -> SandboxRun:
        """Run code in the interpreter of a container. Calls of one container run one after the other.

        Raises Unavailable or RateLimited if too many calls wait, and ServerError if the interpreter does not start.
        Cancelling the call ends the interpreter.
        """
        await self.wait_until_compiled()
        entry = self._entries.setdefault(container.id, _Entry())
        entry.users += 1
        try:
            async with entry.lock:
                slot = await self._queue.acquire(container.project)
                try:
                    return await self._run(container, code, entry)
                finally:
                    slot.release()
        finally:
            entry.users -= 1
            self._forget_unused(container.id, entry)

    async def end(self, container_id: str) -> None:
        """End the interpreter of a container, if it has one. A call that runs in it fails."""
        entry = self._entries.get(container_id)
        if entry is not None:
            await _end_process(entry)
            self._forget_unused(container_id, entry)

    async def close(self) -> None:
        """End all interpreters. Waiting calls are refused."""
        self._is_closed = True
        self._queue.close(_SHUTTING_DOWN)
        if self._compilation is not None:
            await self._compilation.close()
        await asyncio.gather(*(self.end(container_id) for container_id in tuple(self._entries)))

    def _forget_unused(self, container_id: str, entry: _Entry) -> None:
        if not entry.users and entry.process is None and self._entries.get(container_id) is entry:
            del self._entries[container_id]

    async def _run(self, container: SandboxTarget, code: str, entry: _Entry) -> SandboxRun:
        process = await self._get_process(container, entry)
        settings = self.settings
        job = CodeJob(
            code=code,
            folder_bytes=container.folder_bytes,
            seconds=settings.call_seconds,
            output_bytes=settings.output_bytes,
            image_bytes=settings.image_bytes,
            images=settings.images,
        )
        is_answered = False
        try:
            async with asyncio.timeout(settings.call_seconds + _GRACE_SECONDS):
                await process.send(job)
                result = await process.receive(CodeResult)
            is_answered = result is not None
        except TimeoutError:
            result = CodeResult(ending="timeout")
        finally:
            if not is_answered:
                await asyncio.shield(_end_process(entry))
        if result is None:
            if self._is_closed:
                raise Unavailable(_SHUTTING_DOWN)
            logger.warning("the interpreter of container %s ended with code %s", container.id, process.exit_code)
            result = CodeResult(ending="crashed", reason="its process ended")
        return SandboxRun(result, entry.name)

    async def _get_process(self, container: SandboxTarget, entry: _Entry) -> FramedProcess:
        if self._is_closed:
            raise Unavailable(_SHUTTING_DOWN)
        self._entries[container.id] = self._entries.pop(container.id, entry)  # the most recently used one is last
        if entry.process is not None and entry.process.has_ended:
            await _end_process(entry)
        if entry.process is None:
            await self._make_room(entry)
            entry.name = secrets.token_hex(8)
            # The sandbox library makes folders of many megabytes, and leaves them if it is killed.
            entry.scratch = container.folder / f"{_SCRATCH}-{entry.name}"
            entry.process = await self._start(container, entry.scratch)
        return entry.process

    async def _make_room(self, entry: _Entry) -> None:
        """End idle interpreters until one more may start. This call has a slot, so not all can be busy."""
        others = [(name, other) for name, other in self._entries.items() if other is not entry]
        excess = sum(other.process is not None for _, other in others) + 1 - self.settings.interpreters
        for name, other in others:
            if excess <= 0:
                break
            if other.process is not None and not other.users:
                await self.end(name)
                excess -= 1

    async def _start(self, container: SandboxTarget, scratch: Path) -> FramedProcess:
        settings = self.settings
        await asyncio.to_thread(_make_scratch, scratch)
        process = await FramedProcess.start(_WORKER, {"TMPDIR": str(scratch), "HOME": str(scratch)})
        setup = SandboxSetup(
            sandbox=settings.sandbox,
            folder=str(container.folder / DATA_FOLDER),
            cache_dir=str(self._cache_dir),
            memory_bytes=container.memory_bytes,
            folder_bytes=settings.container_bytes,
            folder_entries=settings.container_files,
            temporary_bytes=_TEMPORARY_BYTES,
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                await process.send(setup)
                ready = await process.receive(SandboxReady)
        except TimeoutError:
            await process.end()
            raise Unavailable("The code interpreter does not start.", retry_after=_RETRY_SECONDS) from None
        except BaseException:
            await asyncio.shield(process.end())
            raise
        if ready is None or ready.error:
            await process.end()
            logger.error("the code interpreter does not start: %s", ready.error if ready else process.exit_code)
            raise ServerError("The code interpreter does not start.")
        return process


def _make_scratch(scratch: Path) -> None:
    """Create the folder, and delete those that a server has left behind."""
    for other in scratch.parent.glob(f"{_SCRATCH}*"):
        shutil.rmtree(other, ignore_errors=True)
    scratch.mkdir(mode=0o700)


async def _end_process(entry: _Entry) -> None:
    process, entry.process = entry.process, None
    scratch = entry.scratch
    if process is not None and scratch is not None:
        await process.end()
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
