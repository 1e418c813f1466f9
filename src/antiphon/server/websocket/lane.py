"""A lane of a WebSocket: its responses run one after the other, beside those of other lanes."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress

import msgspec

from antiphon.engine.background.queue import BackgroundRun
from antiphon.engine.respond.run import Run
from antiphon.errors import AntiphonError, ServerError
from antiphon.protocol import events
from antiphon.protocol.events import Event
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown
from antiphon.protocol.websocket import SteerAccepted, SteerPending
from antiphon.server.http import ClientGone
from antiphon.server.keepalive import encode_beat_line
from antiphon.server.log import AccessLine, write_line
from antiphon.server.websocket.peer import Peer, make_label
from antiphon.server.websocket.steering import QueuedSteer, explain, find_required, prepend, succeed
from antiphon.stream.sse import encode_json_line

logger = logging.getLogger(__name__)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request of `size` bytes that waits for its turn. `steers` go with it; one that they made is `automatic`."""

    request: CreateRequest
    size: int = 0
    warnings: Sequence[str] = ()
    steers: Sequence[QueuedSteer] = ()
    automatic: bool = False


class Lane:
    """Works off its jobs with one task, which is there only while there are some."""

    def __init__(self, peer: Peer, stream_id: str | None, *, on_idle: Callable[["Lane"], object]) -> None:
        self.stream_id = stream_id
        self.run: Run | None = None
        self.task: asyncio.Task[None] | None = None
        self.sent = 0
        self._peer = peer
        self._on_idle = on_idle
        self._label = None if stream_id is None else make_label(stream_id)
        self._jobs: deque[Job] = deque()
        self._steers: list[QueuedSteer] = []
        self._beat: asyncio.Task[None] | None = None
        self._stopping = False

    # What waits

    def add(self, job: Job) -> None:
        self._jobs.append(job)
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self._work())

    @property
    def waiting(self) -> Sequence[Job]:
        return self._jobs

    @property
    def uncommitted(self) -> int:
        """How many pieces of steering input wait for the response to end that runs here."""
        return len(self._steers)

    def stop(self) -> None:
        """Break off: there is nobody left to work for."""
        self._stopping = True
        if self.task is not None:
            self.task.cancel()

    async def refuse_waiting(self, error: AntiphonError) -> None:
        """Answer everything that has not begun with this error."""
        while self._jobs:
            job = self._jobs.popleft()
            await self._refuse(job, error, self._peer.begin_line())

    async def steer(self, run: Run, steer: QueuedSteer) -> None:
        """Take over input for the response that runs here."""
        # The number is taken, and the place in line with it, before the model's next words can have either.
        accepted = SteerAccepted(run.take_sequence_number(), steer.receipt)
        self._steers.append(steer)
        self._peer.steered.setdefault(run.response.id, asyncio.Event())
        run.steer()
        await self._write([accepted])

    # Work

    async def _work(self) -> None:
        try:
            with suppress(ClientGone):
                while self._jobs:
                    await self._play(self._jobs.popleft())
        finally:
            self.task = None
            if self._beat is not None:
                self._beat.cancel()
            self._on_idle(self)

    async def _play(self, job: Job) -> None:
        owed = await self._peer.take_owed(job.request.previous_response_id)
        line = self._peer.begin_line()
        if owed:
            job = msgspec.structs.replace(job, steers=owed, request=prepend(owed, job.request))
        line.model = job.request.model
        line.warnings = list(job.warnings)
        try:
            run = await self._peer.engine.create(job.request, project=self._peer.project, session=self._peer.session)
        except Exception as error:
            await self._refuse(job, _as_known(error, self._peer.upgrade.id), line)
            return
        assert not isinstance(run, BackgroundRun), "a connection takes no background responses"
        try:
            await self._stream(run, line)
            await self._follow_up(run)
        finally:
            self._peer.settle(run.response.id)

    async def _stream(self, run: Run, line: AccessLine) -> None:
        self.run, self.sent = run, 0
        line.model, line.response_id, line.error = run.response.model, run.response.id, "client_gone"
        line.warnings += run.warnings
        try:
            with self._peer.keepalive.watch(self) as pulse:
                async with aclosing(run.events()) as batches:
                    async for batch in batches:
                        pulse.last = batch[-1]
                        await self._write(batch)
            line.error = run.response.error.code if run.response.error is not None else None
        except ClientGone:
            raise
        except asyncio.CancelledError:
            if self._stopping or self.task is None:
                raise
            # Somebody cancelled the response, and did not wait for this client to read on. It will hear of it then.
            self.task.uncancel()
            line.error = None
            await self._write([events.Incomplete(run.take_sequence_number(), run.response)])
        except Exception as error:  # only an engine that breaks its promise gets here
            await self._refuse(Job(request=run.request), _as_known(error, self._peer.upgrade.id), line)
            return
        finally:
            self.run = None
            self._peer.note_end(run.response.id, run.response.status)
            if line.status == 200:
                self._log(line, self.sent)

    async def _refuse(self, job: Job, error: AntiphonError, line: AccessLine) -> None:
        line.status, line.error = error.status, error.code or error.type
        size = 0
        try:
            if not job.automatic:
                size = await self._peer.write_error(error, self.stream_id)
            for steer in job.steers:
                await self._write([steer.give_back(0, "successor_creation_failed", explain(error))])
        finally:
            self._log(line, size)

    def _log(self, line: AccessLine, size: int) -> None:
        line.ms = round(time.perf_counter() * 1000 - line.ms, 2)
        line.bytes = size
        write_line(line)

    async def _follow_up(self, run: Run) -> None:
        """The response is over: what the client had to say to it goes on with it, waits, or goes back."""
        steers, self._steers = self._steers, []
        if not steers:
            return
        response = run.response
        required = find_required(response.output)
        if response.status not in ("completed", "incomplete"):
            for steer in steers:
                message = f"The response has ended as {response.status}."
                await self._write([steer.give_back(run.take_sequence_number(), "response_not_active", message)])
        elif required:
            self._peer.owed[response.id] = steers
            for steer in steers:
                await self._write([SteerPending(run.take_sequence_number(), steer.receipt, required)])
        else:
            self._jobs.appendleft(Job(request=succeed(run, steers), steers=steers, automatic=True))

    # Sending

    async def _write(self, told: Sequence[Event | Unknown]) -> None:
        lines = self._mark([encode_json_line(event) for event in self._peer.rename(told)])
        self.sent += self._peer.count(lines)
        if not self._peer.wire.write_now(lines):
            await self._peer.wire.write(lines)

    def _mark(self, lines: list[bytes]) -> list[bytes]:
        return lines if self._label is None else [line[:-1] + self._label for line in lines]

    @property
    def is_writing(self) -> bool:
        return self._peer.wire.is_writing or self._beat is not None

    def start_beat(self, number: int) -> None:
        self._beat = asyncio.get_running_loop().create_task(self._send_beat(number))

    async def _send_beat(self, number: int) -> None:
        try:
            with suppress(ClientGone):
                self.sent += await self._peer.write(self._mark([encode_beat_line(number)]))
        finally:
            self._beat = None


def _as_known(error: Exception, request_id: str) -> AntiphonError:
    if isinstance(error, AntiphonError) and error.__cause__ is None:
        return error
    logger.error("the request failed", exc_info=error, extra={"request_id": request_id})
    if isinstance(error, AntiphonError):
        return error
    return ServerError(f"The server had an error. The request id is {request_id}.")
