"""One client's WebSocket: its messages are read and handed to lanes, within bounds."""

import asyncio
from contextlib import suppress

from antiphon.engine.respond.run import Run
from antiphon.errors import AntiphonError, InvalidRequest, MissingParameter, RateLimited, UnsupportedParameter
from antiphon.protocol import codec
from antiphon.protocol.codec import DecodedRequest
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.websocket import CREATE, STEER, MessageHeader, ReturnedSteer, SteerError, SteerFailed
from antiphon.server.http import ClientGone
from antiphon.server.websocket.lane import Job, Lane
from antiphon.server.websocket.peer import Peer
from antiphon.server.websocket.steering import SteerRefused, check_support, read_steer
from antiphon.server.websocket.wire import GOING_AWAY

MOST_LANES = 32
MOST_WAITING = 64
MOST_STEERS = 16
LONGEST_STREAM_ID = 256


class Connection:
    """Reads until the client leaves, or until it is told to stop and has come to an end."""

    def __init__(self, peer: Peer, *, max_bytes: int, max_seconds: float) -> None:
        self._peer = peer
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._lanes: dict[str | None, Lane] = {}
        self._ending: AntiphonError | None = None
        self._retirement: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        expiry = asyncio.get_running_loop().call_later(self._max_seconds, self._expire)
        try:
            with suppress(ClientGone):
                while (message := await self._peer.wire.read()) is not None:
                    await self._take(message)
        finally:
            expiry.cancel()
            await self._stop()

    def retire(self, error: AntiphonError, *, tell: bool = False) -> None:
        """Answer new requests with this error, let the running ones end, and close. `tell`: say why, too."""
        if self._ending is None:
            self._ending = error
            self._retirement = asyncio.get_running_loop().create_task(self._retire(error, tell=tell))

    def _expire(self) -> None:
        error = InvalidRequest(
            f"This connection has reached its limit of {self._max_seconds:g} seconds: open a new one.",
            code="websocket_connection_limit_reached",
        )
        self.retire(error, tell=True)

    async def _retire(self, error: AntiphonError, *, tell: bool) -> None:
        with suppress(ClientGone):
            for lane in tuple(self._lanes.values()):
                await lane.refuse_waiting(error)
            await self._wait_for_lanes()
            if tell:
                await self._peer.write_error(error)
            await self._peer.wire.close(GOING_AWAY)

    async def _stop(self) -> None:
        """The client is gone: nobody needs what is still being said."""
        if self._retirement is not None:
            self._retirement.cancel()
        for lane in self._lanes.values():
            lane.stop()
        await self._wait_for_lanes()

    async def _wait_for_lanes(self) -> None:
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    # Messages

    async def _take(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            error = InvalidRequest("A message must be JSON in a text frame; this one is binary.", code="invalid_json")
            await self._peer.write_error(error)
            return
        body = message.encode()
        try:
            decoded = codec.decode_request(body)
            if decoded.request.type is None:
                raise MissingParameter("Missing required parameter: 'type'.", param="type")
        except InvalidRequest as error:
            await self._take_other(body, error)
        else:
            await self._take_request(decoded, len(body))

    async def _take_other(self, body: bytes, error: InvalidRequest) -> None:
        """A message that is no valid request: something else, or something wrong."""
        try:
            seen = codec.decode_header(body)
        except InvalidRequest:
            seen = MessageHeader(type=CREATE)
        if seen.type == STEER:
            await self._take_steer(body, seen)
            return
        if seen.type not in (None, CREATE):
            error = InvalidRequest(
                f"A message must be of type '{CREATE}' or '{STEER}'.", param="type", code="invalid_value"
            )
        elif isinstance(seen.previous_response_id, str):
            self._peer.session.forget(seen.previous_response_id)
        await self._peer.write_error(error, _name_lane(seen.stream_id))

    async def _take_request(self, decoded: DecodedRequest, size: int) -> None:
        request = decoded.request
        lane = self._lanes.get(request.stream_id)
        try:
            self._check_room(lane, size)
        except AntiphonError as error:
            await self._peer.write_error(error, _name_lane(request.stream_id))
            return
        try:
            _check_transport(request)
        except AntiphonError as error:
            self._peer.session.forget(request.previous_response_id)
            await self._peer.write_error(error, _name_lane(request.stream_id))
            return
        request.stream = True
        if lane is None:
            lane = self._lanes[request.stream_id] = Lane(self._peer, request.stream_id, on_idle=self._drop)
        warnings = [f"ignored: {', '.join(decoded.ignored)}"] if decoded.ignored else []
        lane.add(Job(request=request, size=size, warnings=warnings))

    def _check_room(self, lane: Lane | None, size: int) -> None:
        if self._ending is not None:
            raise self._ending
        if lane is None and len(self._lanes) >= MOST_LANES:
            raise RateLimited(f"This connection has {MOST_LANES} lanes in use already.", code="too_many_lanes")
        waiting = [job for each in self._lanes.values() for job in each.waiting]
        if waiting and (len(waiting) >= MOST_WAITING or size + sum(job.size for job in waiting) > self._max_bytes):
            raise RateLimited(
                f"{len(waiting)} requests are waiting on this connection: let some of them end first.",
                code="too_many_waiting_requests",
            )

    def _drop(self, lane: Lane) -> None:
        """A lane without work is made anew when it is needed."""
        self._lanes.pop(lane.stream_id, None)

    # Steering

    async def _take_steer(self, body: bytes, seen: MessageHeader) -> None:
        target = seen.previous_response_id
        if not isinstance(target, str) or not bytes(seen.input):
            missing = "input" if isinstance(target, str) else "previous_response_id"
            error = MissingParameter(f"Missing required parameter: '{missing}'.", param=missing)
            await self._peer.write_error(error)
            return
        try:
            steer = read_steer(body, seen.input)
            lane, run = self._find_target(target)
            check_support(run.request)
            if self._count_steers() >= MOST_STEERS:
                raise SteerRefused("too_many_pending_steers", f"{MOST_STEERS} pieces of input are waiting already.")
        except SteerRefused as refused:
            refusal = SteerFailed(0, SteerError(refused.code, refused.message), ReturnedSteer(target, seen.input))
            await self._peer.write([codec.encode(refusal)])
        else:
            await lane.steer(run, steer)

    def _count_steers(self) -> int:
        """How many pieces of steering input wait for the response that they go into."""
        waiting = sum(each.uncommitted for each in self._lanes.values())
        return waiting + sum(map(len, self._peer.owed.values()))

    def _find_target(self, response_id: str) -> tuple[Lane, Run]:
        for lane in self._lanes.values():
            if lane.run is not None and lane.run.response.id == response_id:
                if lane.run.finished:
                    break
                return lane, lane.run
        else:
            status = self._peer.ended.get(response_id)
            if status is None:
                raise SteerRefused("response_not_found", f"No response with id '{response_id}' on this connection.")
            if status in ("failed", "cancelled"):
                raise SteerRefused("response_not_active", f"The response has ended as {status}.")
        raise SteerRefused("response_already_completed", "The response has come to its end.")


def _check_transport(request: CreateRequest) -> None:
    """Raise on what has no place in a message of a WebSocket."""
    if request.stream is False:
        raise UnsupportedParameter("A WebSocket always streams: leave 'stream' out.", param="stream")
    if request.background:
        raise UnsupportedParameter("A WebSocket takes no background responses: use POST for them.", param="background")
    if request.stream_id is not None and len(request.stream_id) > LONGEST_STREAM_ID:
        raise InvalidRequest(
            f"'stream_id' may have at most {LONGEST_STREAM_ID} characters.", param="stream_id", code="invalid_value"
        )


def _name_lane(stream_id: object) -> str | None:
    """The lane to answer on, if the message names one that can be repeated."""
    return stream_id if isinstance(stream_id, str) and len(stream_id) <= LONGEST_STREAM_ID else None
