"""Questions to the other processes that share a database, over its notifications.

A process that listens holds a shared advisory lock. PostgreSQL releases it when the connection ends, so the locks are
the list of the processes that can answer. The payload of a notification is limited, so a message is sent in parts.
"""

import asyncio
import base64
import logging
import secrets
import time
import zlib
from collections.abc import Awaitable
from contextlib import suppress
from typing import cast

import msgspec
from msgspec import Struct

from antiphon import offload
from antiphon.bounds import remove_oldest
from antiphon.errors import AntiphonError
from antiphon.store.peer_link import AnswerQuestion, PeersUnresponsive
from antiphon.store.postgres.notifications import LISTENERS, Notifications
from antiphon.store.postgres.pool import PostgresPool
from antiphon.tasks import cancel_tasks

logger = logging.getLogger(__name__)

# Time for which a question waits for answers.
ANSWER_SECONDS = 5.0
# A question is sent again after this time: it may be lost, or its answer.
RESEND_SECONDS = 1.0
# Time after a lost connection for which other processes may not listen again yet.
SETTLE_SECONDS = 3.0
# Questions that wait at once. Each is sent to all processes.
MAX_QUESTIONS = 16
# PostgreSQL refuses payloads of 8,000 bytes.
_PART_CHARACTERS = 7000
# Messages of which a part has arrived. More are left by connections that were lost.
_MAX_INCOMPLETE = 256


class PeerQuestion(Struct, tag="question"):
    """A question to all processes. `sender` is the listener that receives the answers."""

    id: str
    sender: int
    kind: str
    payload: bytes


class PeerAnswer(Struct, tag="answer"):
    """The answer of one process to a question. The payload may be empty."""

    id: str
    sender: int
    payload: bytes


_decode_message = msgspec.msgpack.Decoder(PeerQuestion | PeerAnswer).decode


class OpenQuestion:
    """A question, the listeners that have to answer it, those that have done so, and the answers, compressed."""

    def __init__(self) -> None:
        self.sender: int | None = None
        self.tries = 0
        self.missing: set[int] = set()
        self.answered: set[int] = set()
        self.answers: list[bytes] = []
        self.changed = asyncio.Event()


class PostgresPeerLink:
    """Asks the other processes with this database. Implements `store.peer_link.PeerLink`.

    A question waits for `seconds`, and is sent again meanwhile: notifications may be lost. A process that did not
    answer in time gets later questions, but is not waited for until it answers.
    """

    def __init__(self, notifications: Notifications, pool: PostgresPool, *, seconds: float = ANSWER_SECONDS) -> None:
        self._seconds = seconds
        self.answers: dict[str, AnswerQuestion] = {}
        self._notifications = notifications
        self._pool = pool
        self._pending: dict[str, OpenQuestion] = {}
        self._unresponsive: dict[int, float] = {}  # the time of the first question without an answer
        self._parts: dict[str, list[str]] = {}
        self._slots = asyncio.Semaphore(MAX_QUESTIONS)
        self._tasks: set[asyncio.Task[None]] = set()
        notifications.on_message = self._receive

    async def wait_connected(self) -> None:
        await self._notifications.listening.wait()

    async def ask(self, kind: str, payload: bytes = b"") -> list[bytes]:
        """Return the first answer that is not empty, or none if no process has one. Raises PeersUnresponsive."""
        answers = await self._ask(kind, payload, count=1)
        if not answers and self._notifications.can_listen:
            since = (
                [*self._unresponsive.values()] if self._notifications.is_listening else [self._notifications.lost_at]
            )
            if since:
                raise PeersUnresponsive(time.monotonic() - max(since))
        return answers

    async def ask_all(self, kind: str, payload: bytes = b"") -> list[bytes]:
        return await self._ask(kind, payload, count=None)

    async def _ask(self, kind: str, payload: bytes, *, count: int | None) -> list[bytes]:
        """Return the answers that are not empty. Do not wait for more than `count` of them.

        The question is sent again to processes that have not answered. They may receive it twice.
        """
        if not self._notifications.can_listen:
            return []
        async with self._slots:
            began_at = time.monotonic()
            question_id = secrets.token_hex(8)
            pending = self._pending[question_id] = OpenQuestion()
            try:
                async with asyncio.timeout(self._seconds):
                    await self._collect_answers(pending, PeerQuestion(question_id, 0, kind, payload), count)
            except TimeoutError:
                # Otherwise the answers were sent to a connection that was lost.
                if pending.sender == self._notifications.listener and pending.missing:
                    self._unresponsive |= dict.fromkeys(pending.missing, began_at)
                    logger.warning("processes that share the database did not answer: %d", len(pending.missing))
            finally:
                del self._pending[question_id]
        return [await offload.run_sized(len(each), zlib.decompress, each) for each in pending.answers]

    async def _collect_answers(self, pending: OpenQuestion, question: PeerQuestion, count: int | None) -> None:
        is_complete = False
        while not is_complete:
            await self._notifications.listening.wait()
            is_settled = await self._send_question(pending, question)
            with suppress(TimeoutError):
                async with asyncio.timeout(RESEND_SECONDS):
                    while (pending.missing or not is_settled) and (count is None or len(pending.answers) < count):
                        await pending.changed.wait()
                        pending.changed.clear()
                    is_complete = True

    async def _send_question(self, pending: OpenQuestion, question: PeerQuestion) -> bool:
        """Send a question to all processes. If it was sent before, send it to those that have not answered.

        Return False if connections were lost a moment ago: other processes may not listen again yet.
        """
        listeners = {row[0] for row in await self._pool.submit(LISTENERS, (self._notifications.channel,))}
        pending.sender = question.sender = self._notifications.listener or 0
        others = listeners - {question.sender}
        for listener in self._unresponsive.keys() - others:
            del self._unresponsive[listener]
        pending.missing = others - self._unresponsive.keys() - pending.answered
        message = msgspec.msgpack.encode(question)
        receivers = sorted(pending.missing) if pending.tries else [0] if others else []
        for receiver in receivers:
            self._send(receiver, f"{question.id}.{pending.tries}", message)
        pending.tries += bool(others)
        seconds = time.monotonic() - self._notifications.reconnected_at
        return question.sender in listeners and seconds >= SETTLE_SECONDS

    async def close(self) -> None:
        await cancel_tasks(*self._tasks)

    def _send(self, receiver: int, message_id: str, message: bytes) -> None:
        """Send a message to the process with this listener, or to all if it is 0."""
        text = base64.b64encode(message).decode()
        parts = [text[start : start + _PART_CHARACTERS] for start in range(0, len(text), _PART_CHARACTERS)]
        for index, part in enumerate(parts):
            self._notifications.send_message(f"{receiver} {message_id} {index} {len(parts)} {part}")

    def _receive(self, text: str) -> None:
        try:
            self._receive_part(text)
        except ValueError:  # another program uses the channel
            logger.warning("a notification cannot be read")

    def _receive_part(self, text: str) -> None:
        receiver, message_id, index, count, part = text.split(" ")
        listener = self._notifications.listener
        if listener is None or receiver not in ("0", str(listener)):
            return
        parts = self._parts.setdefault(message_id, [])
        if len(parts) != int(index):  # an earlier part is missing
            self._parts.pop(message_id)
            return
        parts.append(part)
        if len(parts) == int(count):
            self._handle(base64.b64decode("".join(self._parts.pop(message_id))))
        else:
            remove_oldest(self._parts, _MAX_INCOMPLETE)

    def _handle(self, message: bytes) -> None:
        try:
            decoded = _decode_message(message)
        except msgspec.DecodeError:  # of another version
            return
        if decoded.sender == self._notifications.listener:
            return
        self._unresponsive.pop(decoded.sender, None)
        if isinstance(decoded, PeerQuestion):
            self._run(self._answer(decoded))
            return
        pending = self._pending.get(decoded.id)
        if pending is not None:
            pending.missing.discard(decoded.sender)
            if decoded.payload and decoded.sender not in pending.answered:
                pending.answers.append(decoded.payload)
            pending.answered.add(decoded.sender)
            pending.changed.set()

    async def _answer(self, question: PeerQuestion) -> None:
        payload = b""
        answer = self.answers.get(question.kind)
        try:
            if answer is not None:
                payload = await answer(question.payload)
        except AntiphonError as error:
            logger.warning("a question of another process failed: %s", error.message)
        except Exception:
            logger.exception("a question of another process failed")
        listener = self._notifications.listener
        if listener is None:
            return
        if payload:
            payload = await offload.run_sized(len(payload), zlib.compress, payload, 1)
        message = msgspec.msgpack.encode(PeerAnswer(question.id, listener, payload))
        self._send(question.sender, f"{question.id}-{listener}", message)

    def _run(self, work: Awaitable[None]) -> None:
        task = cast("asyncio.Task[None]", asyncio.ensure_future(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
