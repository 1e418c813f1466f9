"""A worker: a server process on the socket of its supervisor. The supervisor starts it with two file descriptors."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable

from antiphon.config import Settings
from antiphon.engine.assembly import build_engine
from antiphon.engine.engine import Engine
from antiphon.errors import AntiphonError
from antiphon.server.log import configure_logging
from antiphon.server.process import Server, prepare_process
from antiphon.server.workers.messages import (
    Answer,
    Answers,
    Channel,
    Question,
    Reload,
    Reloaded,
    WorkerFailed,
    WorkerReady,
    decode_for_worker,
    encode_frame,
    receive_start,
)

logger = logging.getLogger(__name__)

# Time for which a question waits for the answers of the other workers.
_ANSWER_SECONDS = 5.0

AnswerQuestion = Callable[[bytes], Awaitable[bytes]]


class WorkerServer(Server):
    """The server of a worker. Ctrl-C reaches all processes of a terminal: the supervisor handles it."""

    stop_signals = (signal.SIGTERM,)


class SupervisorLink:
    """The connection of a worker to its supervisor, and through it to the other workers.

    `answers` has the function that answers each kind of question. An announcement is a question without an answer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._channel: Channel | None = None
        self._waiting: dict[int, asyncio.Future[list[bytes]]] = {}
        self._last_id = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.answers: dict[str, AnswerQuestion] = {}
        self.on_end: Callable[[], None] | None = None
        self.apply_settings: Callable[[Settings], Awaitable[object]] | None = None

    async def open(self, ready: WorkerReady) -> None:
        """Report that this worker is ready, and handle messages from now on."""
        self._channel = await Channel.open(self._connection)
        self._channel.send(ready)
        self._run(self._read(self._channel))

    async def ask(self, kind: str, payload: bytes = b"") -> list[bytes]:
        """Return the answers of the other workers, without the empty ones."""
        if self._channel is None:
            return []
        self._last_id += 1
        question_id = self._last_id
        waiting: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[question_id] = waiting
        self._channel.send(Question(kind, payload, question_id))
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await waiting
        except TimeoutError:
            return []
        finally:
            del self._waiting[question_id]

    def announce(self, kind: str, payload: bytes = b"") -> None:
        """Send an announcement to the other workers."""
        if self._channel is not None:
            self._channel.send(Question(kind, payload))

    async def _read(self, channel: Channel) -> None:
        while (frame := await channel.receive()) is not None:
            message = decode_for_worker(frame)
            if isinstance(message, Answers):
                waiting = self._waiting.get(message.id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message.answers)
            elif isinstance(message, Reload):
                self._run(self._reload(channel, message.settings))
            elif isinstance(message, Question):
                self._run(self._answer(channel, message))
        logger.error("the supervisor has ended")
        if self.on_end is not None:
            self.on_end()

    async def _reload(self, channel: Channel, settings: Settings) -> None:
        try:
            if self.apply_settings is not None:
                await self.apply_settings(settings)
        except (AntiphonError, OSError) as error:
            channel.send(Reloaded(" ".join(str(error).split())))
        except Exception as error:
            logger.exception("the settings were not reloaded")
            channel.send(Reloaded(f"{type(error).__name__}: see the log of the server."))
        else:
            channel.send(Reloaded())

    async def _answer(self, channel: Channel, question: Question) -> None:
        payload = b""
        try:
            answer = self.answers.get(question.kind)
            if answer is not None:
                payload = await answer(question.payload)
        except Exception:
            logger.exception("a question of another worker failed")
        if question.id is not None:
            channel.send(Answer(question.id, payload))

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def run_worker(connection: socket.socket, listener: socket.socket) -> int:
    """Serve until the supervisor ends this process. Return the exit status."""
    start = receive_start(connection)
    if start is None:
        return 1
    sys.path[:] = start.module_path
    try:
        _serve(start.settings, connection, listener)
    except (AntiphonError, OSError) as error:
        connection.setblocking(True)
        connection.sendall(encode_frame(WorkerFailed(" ".join(str(error).split()))))
        return 1
    return 0


def _serve(settings: Settings, connection: socket.socket, listener: socket.socket) -> None:
    configure_logging(settings)
    engine = build_engine(settings)
    settings = prepare_process(engine, settings)
    link = SupervisorLink(connection)
    opening: list[asyncio.Task[None]] = []

    def connect(_: str) -> None:
        ready = WorkerReady([model.id for model in engine.models()], needs_key(engine, settings))
        opening.append(asyncio.get_running_loop().create_task(link.open(ready)))

    server = WorkerServer(engine, settings, on_ready=connect)

    link.on_end = server.request_stop
    link.apply_settings = server.apply_settings
    server.run(sockets=[listener])


def needs_key(engine: Engine, settings: Settings) -> bool:
    """Return True if requests need an API key."""
    return bool(settings.api_keys) or engine.has_stored_keys


def main() -> int:
    # The supervisor handles the signals of the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    connection, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    return run_worker(connection, listener)


if __name__ == "__main__":
    sys.exit(main())
