"""A lane of a WebSocket: its responses run one after the other, concurrently with those of other lanes."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress

import msgspec

from antiphon.engine.background.responses import BackgroundRun
from antiphon.engine.respond.run import Run
from antiphon.errors import AntiphonError, RateLimited
from antiphon.offload import LARGE_BYTES, is_large, mark_large, run_in_thread
from antiphon.protocol import events
from antiphon.protocol.events import Event, is_delta
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown
from antiphon.protocol.websocket import SteerAccepted, SteerPending
from antiphon.server.error_response import make_internal_error
from antiphon.server.http import LARGE_STREAM_BYTES, ClientDisconnected
from antiphon.server.include import add_include
from antiphon.server.log import AccessLine, log_line
from antiphon.server.websocket.state import ConnectionState, encode_stream_id
from antiphon.server.websocket.steering import (
    QueuedSteer,
    explain_failed_successor,
    find_required_input,
    make_successor,
    prepend_steers,
)
from antiphon.stream.sse import encode_json_line

logger = logging.getLogger(__name__)


class LaneRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A queued request. `steers` are part of its input. The server makes an `automatic` one from steering input."""

    request: CreateRequest
    size: int = 0
    warnings: Sequence[str] = ()
    steers: Sequence[QueuedSteer] = ()
    automatic: bool = False


class Lane:
    """A queue of requests, served one at a time by a task that exists only while there are some."""

    def __init__(self, state: ConnectionState, stream_id: str | None, *, on_idle: Callable[["Lane"], object]) -> None:
        self.stream_id = stream_id
        self.run: Run | None = None
        self.task: asyncio.Task[None] | None = None
        self.bytes_sent = 0
        self._state = state
        self._on_idle = on_idle
        self._encoded_stream_id = None if stream_id is None else encode_stream_id(stream_id)
        self._queue: deque[LaneRequest] = deque()
        self._steers: list[QueuedSteer] = []
        self._keepalive_task: asyncio.Task[None] | None = None
        self._adapt_events = state.dialect.adapt_events
        self._stopping = False

    # The queue

    def add(self, queued: LaneRequest) -> None:
        self._queue.append(queued)
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self._serve_queue())

    @property
    def waiting(self) -> Sequence[LaneRequest]:
        return self._queue

    @property
    def queued_steers(self) -> int:
        """The number of steering messages that wait for the running response to end."""
        return len(self._steers)

    def stop(self) -> None:
        """Cancel the running response. The client has disconnected."""
        self._stopping = True
        if self.task is not None:
            self.task.cancel()

    async def refuse_waiting(self, error: AntiphonError) -> None:
        """Refuse all queued requests with this error."""
        while self._queue:
            queued = self._queue.popleft()
            self._state.release_request(queued.size)
            await self._refuse(queued, error, self._state.start_access_line())

    async def steer(self, run: Run, steer: QueuedSteer) -> None:
        """Queue steering input for the running response, and acknowledge it."""
        # The sequence number and the queue position are taken before the model's next event can get them.
        accepted = SteerAccepted(run.take_sequence_number(), steer.acknowledgement)
        self._steers.append(steer)
        self._state.unsettled.setdefault(run.response.id, asyncio.Event())
        run.steer()
        await self._write([accepted])

    # Serving

    async def _serve_queue(self) -> None:
        try:
            with suppress(ClientDisconnected):
                while self._queue:
                    queued = self._queue.popleft()
                    try:
                        with self._trace():
                            await self._serve(queued)
                    finally:
                        self._state.release_request(queued.size)
                        self._state.hold_memory()
        finally:
            self.task = None
            if self._keepalive_task is not None:
                self._keepalive_task.cancel()
            self._on_idle(self)

    def _trace(self) -> AbstractContextManager[object]:
        """Return the span of a response, or a context without effect if there are no traces."""
        spans = self._state.spans
        return nullcontext() if spans is None else spans.trace_message(self._state.upgrade)

    async def _serve(self, queued: LaneRequest) -> None:
        steers = await self._state.take_pending_steers(queued.request.previous_response_id)
        line = self._state.start_access_line()
        if steers:
            queued = msgspec.structs.replace(queued, steers=steers, request=prepend_steers(steers, queued.request))
        line.model = queued.request.model
        line.warnings = list(queued.warnings)
        mark_large(is_large=queued.size > LARGE_BYTES)
        permit = None
        limiter = self._state.get_limiter()
        if limiter is not None:
            try:
                permit = limiter.admit(self._state.project, self._state.upgrade.key_id)
            except RateLimited as error:
                await self._refuse(queued, error, line)
                return
        try:
            await self._respond(queued, line)
        finally:
            if permit is not None:
                permit.release()

    async def _respond(self, queued: LaneRequest, line: AccessLine) -> None:
        try:
            run = await self._state.engine.create(
                queued.request,
                project=self._state.project,
                key_id=self._state.upgrade.key_id,
                memory=self._state.memory,
            )
        except Exception as error:
            await self._refuse(queued, _as_antiphon_error(error, self._state.upgrade.id), line)
            return
        assert not isinstance(run, BackgroundRun), "background requests are refused before they are queued"
        try:
            await self._stream(run, line)
            await self._use_steers(run)
        finally:
            self._state.settle_steering(run.response.id)

    async def _stream(self, run: Run, line: AccessLine) -> None:
        self.run, self.bytes_sent = run, 0
        self._adapt_events = add_include(self._state.dialect, run.response, run.request.include).adapt_events
        line.model, line.response_id, line.error = run.response.model, run.response.id, "client_gone"
        line.warnings += run.warnings
        try:
            with self._state.keepalive.watch(self, self._state.dialect.encode_keepalive_message) as activity:
                async with aclosing(run.events()) as batches:
                    async for batch in batches:
                        activity.last_event = batch[-1]
                        if self.bytes_sent > LARGE_STREAM_BYTES or (is_large() and not is_delta(batch[-1])):
                            await self._write_singly(batch)
                            continue
                        lines = self._encode(batch)
                        if not self._state.socket.write_now(lines):
                            await self._state.socket.write(lines)
            line.error = run.response.error.code if run.response.error is not None else None
        except ClientDisconnected:
            raise
        except asyncio.CancelledError:
            if self._stopping or self.task is None:
                raise
            # Another request cancelled the response while this client read slowly. Send the client the end of it.
            self.task.uncancel()
            line.error = None
            await self._write([events.Incomplete(run.take_sequence_number(), run.response)])
        except Exception as error:  # the engine failed unexpectedly
            await self._refuse(
                LaneRequest(request=run.request), _as_antiphon_error(error, self._state.upgrade.id), line
            )
            return
        finally:
            self.run = None
            self._state.record_end(run.response.id, run.response.status)
            if line.status == 200:
                self._log(line, self.bytes_sent)

    async def _refuse(self, queued: LaneRequest, error: AntiphonError, line: AccessLine) -> None:
        line.status, line.error = error.status, error.code or error.type
        size = 0
        try:
            if not queued.automatic:
                size = await self._state.write_error(error, self.stream_id)
            for steer in queued.steers:
                await self._write([steer.make_failure(0, "successor_creation_failed", explain_failed_successor(error))])
        finally:
            self._log(line, size)

    def _log(self, line: AccessLine, size: int) -> None:
        line.ms = round(time.perf_counter() * 1000 - line.ms, 2)
        line.bytes = size
        if self._state.spans is not None:
            self._state.spans.record_line(self._state.upgrade, line)
        log_line(line)

    async def _use_steers(self, run: Run) -> None:
        """Use the steering input of a response that has ended.

        It becomes a new request, or waits for the outputs of tool calls, or is returned if the response failed.
        """
        steers, self._steers = self._steers, []
        if not steers:
            return
        response = run.response
        required = find_required_input(response.output)
        if response.status not in ("completed", "incomplete"):
            for steer in steers:
                message = f"The response has the status '{response.status}'."
                await self._write([steer.make_failure(run.take_sequence_number(), "response_not_active", message)])
        elif required:
            self._state.pending_steers[response.id] = steers
            for steer in steers:
                await self._write([SteerPending(run.take_sequence_number(), steer.acknowledgement, required)])
        else:
            self._queue.appendleft(LaneRequest(request=make_successor(run, steers), steers=steers, automatic=True))

    # Sending

    async def _write_singly(self, batch: Sequence[Event | Unknown]) -> None:
        """Send events one by one. The closing events repeat the whole output: a stalled client holds only one."""
        for event in batch:
            await self._state.socket.wait_until_writable()
            if is_delta(event):
                await self._write((event,))
            else:
                await self._state.socket.write(await run_in_thread(self._encode, (event,)))

    async def _write(self, batch: Sequence[Event | Unknown]) -> None:
        await self._state.socket.write(self._encode(batch))

    def _encode(self, batch: Sequence[Event | Unknown]) -> list[bytes]:
        """Encode and count events that are sent next."""
        lines = self._add_stream_id([encode_json_line(event) for event in self._adapt_events(batch)])
        self.bytes_sent += self._state.count_bytes(lines)
        return lines

    def _add_stream_id(self, lines: list[bytes]) -> list[bytes]:
        return lines if self._encoded_stream_id is None else [line[:-1] + self._encoded_stream_id for line in lines]

    @property
    def is_writing(self) -> bool:
        return self._state.socket.is_writing or self._keepalive_task is not None

    def send_keepalive(self, payload: bytes) -> None:
        self._keepalive_task = asyncio.get_running_loop().create_task(self._send_keepalive(payload))

    async def _send_keepalive(self, payload: bytes) -> None:
        try:
            with suppress(ClientDisconnected):
                self.bytes_sent += await self._state.write(self._add_stream_id([payload]))
        finally:
            self._keepalive_task = None


def _as_antiphon_error(error: Exception, request_id: str) -> AntiphonError:
    if isinstance(error, AntiphonError) and error.__cause__ is None:
        return error
    logger.error("the request failed", exc_info=error, extra={"request_id": request_id})
    if isinstance(error, AntiphonError):
        return error
    return make_internal_error(request_id)
