"""One client's WebSocket connection: parses its messages and passes them to lanes, within limits."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from antiphon.config.settings import Settings
from antiphon.engine.respond.run import Run
from antiphon.errors import (
    AntiphonError,
    InvalidApiKey,
    InvalidRequest,
    MissingParameter,
    RateLimited,
    UnsupportedParameter,
)
from antiphon.offload import mark_large
from antiphon.protocol import codec
from antiphon.protocol.codec import Decoded
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.websocket import CREATE, STEER, MessageHeader, ReturnedSteer, SteerError, SteerFailed
from antiphon.server.http import ClientDisconnected
from antiphon.server.request_body import decode_body
from antiphon.server.websocket.lane import Lane, LaneRequest
from antiphon.server.websocket.socket import GOING_AWAY
from antiphon.server.websocket.state import ConnectionState
from antiphon.server.websocket.steering import SteerRefused, check_steerable, parse_steer

T = TypeVar("T")

MAX_LANES = 32
MAX_WAITING = 64
MAX_STEERS = 16
MAX_STREAM_ID_LENGTH = 256
# While a connection is closing, a client that takes nothing for this time is disconnected.
_CLOSING_STALL_SECONDS = 10.0


class WebSocketConnection:
    """Reads messages until the client disconnects, or until a graceful close is complete."""

    def __init__(
        self,
        state: ConnectionState,
        settings: Settings,
        *,
        check_key: Callable[[], Awaitable[None]],
    ) -> None:
        self._state = state
        self._check_key = check_key
        self._max_bytes = settings.max_body_bytes
        self._max_values = settings.max_body_values
        self._max_seconds = settings.websocket_max_seconds
        self._stall_seconds = min(_CLOSING_STALL_SECONDS, settings.write_timeout_seconds)
        self._stall_timer: asyncio.TimerHandle | None = None
        self._lanes: dict[str | None, Lane] = {}
        self._closing_error: AntiphonError | None = None
        self._closing_task: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        expiry = asyncio.get_running_loop().call_later(self._max_seconds, self._expire)
        try:
            with suppress(ClientDisconnected):
                while (message := await self._state.socket.read()) is not None:
                    await self._handle_message(message)
                    del message  # not held while the next one is awaited
        finally:
            expiry.cancel()
            await self._stop()
            self._state.close_shares()

    def close_gracefully(self, error: AntiphonError, *, send_error: bool = False) -> None:
        """Refuse new requests with this error, let the running ones end, and close.

        With `send_error` the client also gets the error as the last message.
        """
        if self._closing_error is None:
            self._closing_error = error
            self._closing_task = asyncio.get_running_loop().create_task(self._close(error, send_error=send_error))
            self._start_stall_timer()

    def _start_stall_timer(self) -> None:
        self._stall_timer = asyncio.get_running_loop().call_later(
            self._stall_seconds, self._check_stall, self._state.upgrade.bytes_sent
        )

    def _check_stall(self, bytes_sent: int) -> None:
        """Disconnect a client that does not read. It would delay the close forever."""
        if self._state.socket.is_writing and self._state.upgrade.bytes_sent == bytes_sent:
            self._state.socket.abort()
        else:
            self._start_stall_timer()

    def _expire(self) -> None:
        error = InvalidRequest(
            f"This connection has reached its limit of {self._max_seconds:g} seconds: open a new one.",
            code="websocket_connection_limit_reached",
        )
        self.close_gracefully(error, send_error=True)

    async def _close(self, error: AntiphonError, *, send_error: bool) -> None:
        with suppress(ClientDisconnected):
            for lane in tuple(self._lanes.values()):
                await lane.refuse_waiting(error)
            await self._wait_for_lanes()
            if send_error:
                await self._state.write_error(error)
            await self._state.socket.close(GOING_AWAY)

    async def _stop(self) -> None:
        """Cancel all running responses: the client has disconnected."""
        if self._closing_task is not None:
            self._closing_task.cancel()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        for lane in self._lanes.values():
            lane.stop()
        await self._wait_for_lanes()

    async def _wait_for_lanes(self) -> None:
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    # Messages

    async def _handle_message(self, message: str | bytes) -> None:
        try:
            await self._check_key()
        except AntiphonError as refusal:
            await self._state.write_error(refusal)
            if isinstance(refusal, InvalidApiKey):  # it was revoked or has expired
                self.close_gracefully(refusal)
            return
        if isinstance(message, bytes):
            error = InvalidRequest("A message must be JSON in a text frame; this one is binary.", code="invalid_json")
            await self._state.write_error(error)
            return
        body = message.encode()
        try:
            decoded = await self._decode(codec.decode_request, body)
            if decoded.body.type is None:
                raise MissingParameter("Missing required parameter: 'type'.", param="type")
        except InvalidRequest as error:
            await self._handle_other(body, error)
        else:
            await self._handle_request(decoded, len(body))

    async def _decode(self, decode: Callable[[bytes], T], body: bytes) -> T:
        try:
            return await decode_body(decode, body, max_values=self._max_values)
        finally:
            mark_large(is_large=False)  # the lane marks its own task

    async def _handle_other(self, body: bytes, error: InvalidRequest) -> None:
        """Handle a message that is not a valid request: a steering message, or an invalid one."""
        try:
            header = await self._decode(codec.decode_header, body)
        except InvalidRequest:
            header = MessageHeader(type=CREATE)
        if header.type == STEER:
            await self._handle_steer(body, header)
            return
        if header.type not in (None, CREATE):
            error = InvalidRequest(
                f"A message must be of type '{CREATE}' or '{STEER}'.", param="type", code="invalid_value"
            )
        elif isinstance(header.previous_response_id, str):
            self._state.memory.forget(header.previous_response_id)
        await self._state.write_error(error, _check_stream_id(header.stream_id))

    async def _handle_request(self, decoded: Decoded[CreateRequest], size: int) -> None:
        request = decoded.body
        lane = self._lanes.get(request.stream_id)
        try:
            self._check_capacity(lane, size)
        except AntiphonError as error:
            await self._state.write_error(error, _check_stream_id(request.stream_id))
            return
        try:
            _check_parameters(request)
        except AntiphonError as error:
            self._state.release_request(size)
            self._state.memory.forget(request.previous_response_id)
            await self._state.write_error(error, _check_stream_id(request.stream_id))
            return
        request.stream = True
        if lane is None:
            lane = self._lanes[request.stream_id] = Lane(self._state, request.stream_id, on_idle=self._remove_lane)
        warnings = [f"ignored: {', '.join(decoded.ignored)}"] if decoded.ignored else []
        lane.add(LaneRequest(request=request, size=size, warnings=warnings))

    def _check_capacity(self, lane: Lane | None, size: int) -> None:
        if self._closing_error is not None:
            raise self._closing_error
        if lane is None and len(self._lanes) >= MAX_LANES:
            raise RateLimited(f"This connection has {MAX_LANES} lanes in use already.", code="too_many_lanes")
        waiting = [queued for each in self._lanes.values() for queued in each.waiting]
        if waiting and (len(waiting) >= MAX_WAITING or size + sum(queued.size for queued in waiting) > self._max_bytes):
            raise RateLimited(
                f"{len(waiting)} requests are waiting on this connection: wait until some of them end.",
                code="too_many_waiting_requests",
            )
        self._state.hold_request(size)

    def _remove_lane(self, lane: Lane) -> None:
        """Remove an idle lane. It is made again when it is needed."""
        self._lanes.pop(lane.stream_id, None)

    # Steering

    async def _handle_steer(self, body: bytes, header: MessageHeader) -> None:
        target = header.previous_response_id
        if not isinstance(target, str) or not bytes(header.input):
            missing = "input" if isinstance(target, str) else "previous_response_id"
            error = MissingParameter(f"Missing required parameter: '{missing}'.", param=missing)
            await self._state.write_error(error)
            return
        try:
            steer = await self._decode(lambda message: parse_steer(message, header.input), body)
            lane, run = self._find_target(target)
            check_steerable(run.request)
            if self._count_steers() >= MAX_STEERS:
                raise SteerRefused("too_many_pending_steers", f"{MAX_STEERS} steering messages are waiting already.")
        except SteerRefused as refused:
            failure = SteerFailed(0, SteerError(refused.code, refused.message), ReturnedSteer(target, header.input))
            await self._state.write([codec.encode(failure)])
        else:
            await lane.steer(run, steer)

    def _count_steers(self) -> int:
        """Return the number of steering messages that wait for the response they become input of."""
        queued = sum(each.queued_steers for each in self._lanes.values())
        return queued + sum(map(len, self._state.pending_steers.values()))

    def _find_target(self, response_id: str) -> tuple[Lane, Run]:
        for lane in self._lanes.values():
            if lane.run is not None and lane.run.response.id == response_id:
                if lane.run.finished:
                    break
                return lane, lane.run
        else:
            status = self._state.ended.get(response_id)
            if status is None:
                raise SteerRefused("response_not_found", f"No response with id '{response_id}' on this connection.")
            if status in ("failed", "cancelled"):
                raise SteerRefused("response_not_active", f"The response has the status '{status}'.")
        raise SteerRefused("response_already_completed", "The response has already ended.")


def _check_parameters(request: CreateRequest) -> None:
    """Raise if a parameter is not allowed on a WebSocket."""
    if request.stream is False:
        raise UnsupportedParameter("A WebSocket always streams: omit 'stream'.", param="stream")
    if request.background:
        raise UnsupportedParameter("A WebSocket does not support background responses: use POST.", param="background")
    if request.stream_id is not None and len(request.stream_id) > MAX_STREAM_ID_LENGTH:
        raise InvalidRequest(
            f"'stream_id' may have at most {MAX_STREAM_ID_LENGTH} characters.", param="stream_id", code="invalid_value"
        )


def _check_stream_id(stream_id: object) -> str | None:
    """Return the lane to reply on, or None if the message has no valid `stream_id`."""
    return stream_id if isinstance(stream_id, str) and len(stream_id) <= MAX_STREAM_ID_LENGTH else None
