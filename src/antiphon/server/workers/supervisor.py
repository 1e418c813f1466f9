"""The supervisor of the workers: starts them, restarts those that die, and forwards signals and messages.

It serves no requests itself, and imports neither the engine nor the application, so that it stays small.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from antiphon.config.changes import SettingChanges, compare_settings
from antiphon.config.settings import Settings
from antiphon.errors import ConfigError, ServerError
from antiphon.server.listener import format_url
from antiphon.server.reload import Reloader
from antiphon.server.running_servers import FOLDER, ServerFile
from antiphon.server.store_users import register_store_user
from antiphon.server.workers.messages import (
    Answer,
    Answers,
    Channel,
    Question,
    Reload,
    Reloaded,
    Start,
    WorkerDied,
    WorkerFailed,
    WorkerReady,
    decode_for_supervisor,
)

logger = logging.getLogger(__name__)

WORKER_MODULE = "antiphon.server.workers.worker"
# Delay before a worker that died is started again: none at first, then doubled at each death.
_FIRST_DELAY_SECONDS = 1.0
_MAX_DELAY_SECONDS = 30.0
# A worker that has lived this long starts with no delay again.
_STABLE_SECONDS = 60.0
# Time for a worker to end after its own bound for stopping, before it is killed.
_KILL_SECONDS = 25.0
# Time for a worker to start the backends of new settings.
_RELOAD_SECONDS = 600.0
# Time that the workers have to answer a question.
_ANSWER_SECONDS = 2.0


class WorkerProcess:
    """One process of a worker, from its start to its end."""

    def __init__(self, number: int, process: asyncio.subprocess.Process, channel: Channel) -> None:
        self.number = number
        self.process = process
        self.channel = channel
        self.owner = ""  # of background responses
        self.failure: str | None = None
        self.is_ready = False
        self.has_ended = False
        self.silent_since: float | None = None  # the time of the first question without an answer
        self.reloaded: asyncio.Future[str | None] | None = None

    @classmethod
    async def start(cls, number: int, settings: Settings, listener: socket.socket) -> "WorkerProcess":
        """Start the process and send it the settings. They are not read again: the file may be half edited."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                WORKER_MODULE,
                str(theirs.fileno()),
                str(listener.fileno()),
                pass_fds=(theirs.fileno(), listener.fileno()),
            )
        finally:
            theirs.close()
        channel = await Channel.open(ours)
        channel.send(Start(number, settings, sys.path))
        return cls(number, process, channel)

    async def reload(self, message: Reload) -> str | None:
        """Let the worker use other settings. Return the error, or None."""
        if self.has_ended:
            return "the worker has ended"
        self.reloaded = asyncio.get_running_loop().create_future()
        self.channel.send(message)
        try:
            async with asyncio.timeout(_RELOAD_SECONDS):
                return await self.reloaded
        except TimeoutError:
            return f"the worker has not answered in {_RELOAD_SECONDS:g} seconds"

    def end_reload(self, error: str | None) -> None:
        if self.reloaded is not None and not self.reloaded.done():
            self.reloaded.set_result(error)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """Runs the workers of a server on one listening socket.

    `on_ready` is called once all workers accept requests. `load_settings` reads the settings again, for a reload.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        *,
        on_ready: Callable[[WorkerReady], None],
        load_settings: Callable[[], Settings],
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._url = format_url(listener)
        self._on_ready = on_ready
        self._load_settings = load_settings
        self._workers: dict[int, WorkerProcess] = {}
        self._started: dict[int, asyncio.Future[WorkerReady | None]] = {}
        self._stopping = asyncio.Event()
        self._failed_stop = ""  # the end of a worker that did not stop as it should
        self._relay = QuestionRelay(self._workers, remembered_deaths=settings.workers)

    def run(self) -> None:
        """Run until a signal stops the workers.

        Raises ConfigError if the first worker cannot start, and ServerError if a worker did not stop as it should.
        """
        asyncio.run(self._run())
        if self._failed_stop:
            raise ServerError(f"Not all workers stopped: {self._failed_stop}.")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        numbers = range(1, self._settings.workers + 1)
        self._started = {number: loop.create_future() for number in numbers}
        # The first worker alone creates or migrates the database, and its error is that of all.
        first = loop.create_task(self._run_worker(1))
        await asyncio.wait((first, self._started[1]), return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            first.result()
            return
        tasks = [first, *(loop.create_task(self._run_worker(number)) for number in numbers[1:])]
        # The first worker serves requests already, so the server must be found: `antiphon reload`, a second server.
        store_user = register_store_user(self._settings, self._url)
        file = ServerFile.create(self._settings.data_dir / FOLDER, self._url)
        reloader = Reloader(
            self._load_settings, self._apply_settings, file=file, on_hangup=lambda: self._stop(signal.SIGHUP)
        )
        reloader.start()
        try:
            await asyncio.gather(*self._started.values())
            ready = self._started[1].result()
            if ready is not None and not self._stopping.is_set():
                self._on_ready(ready)
            await asyncio.gather(*tasks)
        finally:
            reloader.close()
            if store_user is not None:
                store_user.remove()

    async def _apply_settings(self, settings: Settings) -> SettingChanges:
        """Change the settings of all workers. If the first one cannot use them, no worker is changed."""
        changes = compare_settings(self._settings, settings)
        message = Reload(replace(changes.settings, warnings=()))
        if not self._workers:
            raise ConfigError("no worker is running")
        first = min(self._workers.values(), key=lambda worker: worker.number)
        error = await first.reload(message)
        if error is not None:
            raise ConfigError(error)
        self._settings = message.settings
        # A worker may have died and been started again meanwhile, with the old settings.
        others = [worker for worker in self._workers.values() if worker is not first]
        for worker, failure in zip(
            others, await asyncio.gather(*(each.reload(message) for each in others)), strict=True
        ):
            if failure is not None:
                logger.error("worker %d is started again, because it cannot reload: %s", worker.number, failure)
                worker.signal(signal.SIGTERM)
        return changes

    async def _run_worker(self, number: int) -> None:
        """Start a worker again whenever it dies."""
        delay = 0.0
        started = self._started[number]
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                end = await self._run_process(number)
            except OSError as error:
                if number == 1 and not started.done():
                    raise
                end = f"could not be started: {error}"
            if self._stopping.is_set():
                break
            if not started.done():
                started.set_result(None)
            if time.monotonic() - began >= _STABLE_SECONDS:
                delay = 0.0
            again = f"in {delay:g} s" if delay else "now"
            logger.error("worker %d %s; it is started again %s", number, end, again)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            delay = min(max(2 * delay, _FIRST_DELAY_SECONDS), _MAX_DELAY_SECONDS)
        if not started.done():
            started.set_result(None)

    async def _run_process(self, number: int) -> str:
        """Run one process of a worker to its end, and describe that. Raises if the first worker cannot start."""
        is_first_start = number == 1 and not self._started[number].done()
        # Each of the others would log the same warnings.
        current = self._settings
        settings = current if is_first_start else replace(current, warnings=())
        worker = await WorkerProcess.start(number, settings, self._listener)
        self._workers[number] = worker
        if self._settings is not current:  # a reload has ended since
            worker.channel.send(Reload(self._settings))
        if self._stopping.is_set():
            worker.signal(signal.SIGTERM)
        await self._read_messages(worker)
        status = await worker.process.wait()
        del self._workers[number]
        self._relay.forget(number)
        if status and worker.owner:
            self._relay.announce_death(worker.owner)
        if status and worker.is_ready and self._stopping.is_set():
            self._failed_stop = f"worker {number} {_describe_end(status)}"
        if number == 1 and not self._started[number].done() and not self._stopping.is_set():
            raise _explain_start(worker, status)
        return _describe_end(status) + ("" if worker.failure is None else f": {worker.failure}")

    async def _read_messages(self, worker: WorkerProcess) -> None:
        """Handle the messages of a worker until it ends."""
        started = self._started[worker.number]
        while (frame := await worker.channel.receive()) is not None:
            message = decode_for_supervisor(frame)
            if isinstance(message, WorkerReady):
                worker.is_ready, worker.owner = True, message.owner
                self._relay.report_deaths(worker)
                if not started.done():
                    started.set_result(message)
                else:
                    logger.warning("worker %d is ready again", worker.number)
            elif isinstance(message, WorkerFailed):
                worker.failure = message.message
            elif isinstance(message, Reloaded):
                worker.end_reload(message.error)
            elif isinstance(message, Question):
                self._relay.ask(worker, message)
            elif isinstance(message, Answer):
                self._relay.answer(worker, message)
        worker.has_ended = True
        worker.end_reload("the worker has ended")
        worker.channel.close()

    def _stop(self, number: signal.Signals) -> None:
        """Stop all workers gracefully. At a second signal, kill them."""
        if self._stopping.is_set():
            for worker in self._workers.values():
                worker.signal(signal.SIGKILL)
            os._exit(128 + number)
        logger.info("stopping %d workers", len(self._workers))
        self._stopping.set()
        # While this process has the socket open, connections are accepted that no worker serves.
        self._listener.close()
        for worker in self._workers.values():
            worker.signal(signal.SIGTERM)
        bound = self._settings.shutdown_drain_seconds + self._settings.shutdown_grace_seconds + _KILL_SECONDS
        asyncio.get_running_loop().call_later(bound, self._kill)

    def _kill(self) -> None:
        """Kill the workers that have not ended in time."""
        for worker in self._workers.values():
            logger.error("worker %d does not end: it is killed", worker.number)
            worker.signal(signal.SIGKILL)


class QuestionRelay:
    """Passes questions and announcements of a worker to all others, and their answers back.

    The last deaths are reported to workers that start, too: the others may have died at the same time.
    """

    def __init__(self, workers: Mapping[int, WorkerProcess], *, remembered_deaths: int = 1) -> None:
        self._workers = workers
        self._dead_owners: deque[str] = deque(maxlen=remembered_deaths)
        self._pending: dict[int, PendingQuestion] = {}
        self._last_id = 0

    def ask(self, sender: WorkerProcess, question: Question) -> None:
        others = [worker for worker in self._workers.values() if worker is not sender]
        if question.id is None:
            for worker in others:
                worker.channel.send(question)
            return
        # A worker that starts has no responses, and reads no messages yet.
        others = [worker for worker in others if worker.is_ready]
        self._last_id += 1
        key = self._last_id
        self._pending[key] = PendingQuestion(sender, question.id, {worker.number: worker for worker in others})
        for worker in others:
            worker.channel.send(Question(question.kind, question.payload, key))
        asyncio.get_running_loop().call_later(_ANSWER_SECONDS, self._finish, key)
        self._finish_complete(key)

    def answer(self, worker: WorkerProcess, answer: Answer) -> None:
        worker.silent_since = None
        pending = self._pending.get(answer.id)
        if pending is not None:
            pending.missing.pop(worker.number, None)
            if answer.payload:
                pending.answers.append(answer.payload)
            self._finish_complete(answer.id)

    def forget(self, number: int) -> None:
        """Wait no longer for the answers of a worker that has ended."""
        for key, pending in tuple(self._pending.items()):
            pending.missing.pop(number, None)
            self._finish_complete(key)

    def announce_death(self, owner: str) -> None:
        """Let the other workers take over the background responses of a worker that has died."""
        self._dead_owners.append(owner)
        for worker in self._workers.values():
            if worker.is_ready:
                worker.channel.send(WorkerDied(owner))

    def report_deaths(self, worker: WorkerProcess) -> None:
        """Report the last deaths to a worker that has started."""
        for owner in self._dead_owners:
            worker.channel.send(WorkerDied(owner))

    def _finish_complete(self, key: int) -> None:
        if not self._pending[key].missing:
            self._finish(key)

    def _finish(self, key: int) -> None:
        pending = self._pending.pop(key, None)
        if pending is not None:
            seconds = pending.measure_silence()
            pending.sender.channel.send(Answers(pending.question_id, pending.answers, seconds))


class PendingQuestion:
    """A question, the workers that have not answered it, by number, and the answers."""

    def __init__(self, sender: WorkerProcess, question_id: int, missing: dict[int, WorkerProcess]) -> None:
        self.sender = sender
        self.question_id = question_id
        self.missing = missing
        self.answers: list[bytes] = []
        self._began_at = time.monotonic()

    def measure_silence(self) -> float | None:
        """Return the time for which a worker has not answered. If there are several, take the last one that failed."""
        if not self.missing:
            return None
        for worker in self.missing.values():
            worker.silent_since = worker.silent_since or self._began_at
        return time.monotonic() - max(worker.silent_since or 0.0 for worker in self.missing.values())


def _explain_start(worker: WorkerProcess, status: int) -> Exception:
    if worker.failure is not None:
        return ConfigError(worker.failure)
    return ServerError(f"A worker {_describe_end(status)} before it was ready.")


def _describe_end(status: int) -> str:
    """Return the end of a process as words, from the status that `subprocess` uses."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by the signal {-status}"
