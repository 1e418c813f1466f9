"""The connection of a worker to its supervisor, and through it to the other workers."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from antiphon.config.settings import Settings
from antiphon.server.reload import describe_failure
from antiphon.server.workers.messages import (
    Answer,
    Answers,
    Channel,
    Question,
    Reload,
    Reloaded,
    WorkerDied,
    WorkerReady,
    decode_for_worker,
)
from antiphon.store.peer_link import AnswerQuestion, PeersUnresponsive

logger = logging.getLogger(__name__)

# Time for which a question waits for the answers of the other workers.
_ANSWER_SECONDS = 5.0


class SupervisorLink:
    """The link of a worker to the others. Implements `store.peer_link.PeerLink`.

    An announcement is a question without an answer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._channel: Channel | None = None
        self._waiting: dict[int, asyncio.Future[Answers]] = {}
        self._last_id = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.answers: dict[str, AnswerQuestion] = {}
        self.on_end: Callable[[], None] | None = None
        self.on_death: Callable[[str], None] | None = None
        self.apply_settings: Callable[[Settings], Awaitable[object]] | None = None

    async def open(self, ready: WorkerReady) -> None:
        """Report that this worker is ready, and handle messages from now on."""
        self._channel = await Channel.open(self._connection)
        self._channel.send(ready)
        self._run(self._read(self._channel))

    async def ask(self, kind: str, payload: bytes = b"") -> list[bytes]:
        """Return the answers of the other workers, without the empty ones. Raises PeersUnresponsive."""
        given = await self._ask(kind, payload)
        if given.silent_seconds is not None and not given.answers:
            raise PeersUnresponsive(given.silent_seconds)
        return given.answers

    async def ask_all(self, kind: str, payload: bytes = b"") -> list[bytes]:
        return (await self._ask(kind, payload)).answers

    async def _ask(self, kind: str, payload: bytes) -> Answers:
        if self._channel is None:
            return Answers(0, [])
        self._last_id += 1
        question_id = self._last_id
        waiting: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self._waiting[question_id] = waiting
        self._channel.send(Question(kind, payload, question_id))
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await waiting
        except TimeoutError:  # the supervisor itself does not answer
            return Answers(question_id, [], _ANSWER_SECONDS)
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
                    waiting.set_result(message)
            elif isinstance(message, Reload):
                self._run(self._reload(channel, message.settings))
            elif isinstance(message, Question):
                self._run(self._answer(channel, message))
            elif isinstance(message, WorkerDied) and self.on_death is not None:
                self.on_death(message.owner)
        logger.error("the supervisor has ended")
        if self.on_end is not None:
            self.on_end()

    async def _reload(self, channel: Channel, settings: Settings) -> None:
        try:
            if self.apply_settings is not None:
                await self.apply_settings(settings)
        except Exception as error:
            channel.send(Reloaded(describe_failure(error)))
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
