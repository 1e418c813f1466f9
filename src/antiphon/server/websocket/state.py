"""State shared by the lanes of a WebSocket connection, and the encoding of its errors."""

import asyncio
import time
from collections.abc import Sequence

from antiphon.config import Dialect
from antiphon.engine.engine import Engine
from antiphon.engine.respond.session import Session
from antiphon.errors import AntiphonError
from antiphon.protocol import codec
from antiphon.protocol.events import ErrorPayload
from antiphon.protocol.websocket import SocketError
from antiphon.server.body_budget import BodyBudget
from antiphon.server.dialect import choose_dialect
from antiphon.server.keepalive import Keepalive
from antiphon.server.log import AccessLine
from antiphon.server.websocket.socket import UpgradeRequest
from antiphon.server.websocket.steering import QueuedSteer

_MAX_ENDED = 64


class ConnectionState:
    """State shared by the lanes of a connection. All three dicts are keyed by response id.

    `ended`: the status of each of the latest responses that have ended.
    `pending_steers`: steering input that waits for the outputs of the response's tool calls.
    `unsettled`: steered responses that have not ended. The event is set when their steering input has been queued,
    stored as pending, or returned.
    `waiting_bytes` is the share of the budget for request bodies that the queued requests take.
    """

    __slots__ = (
        "body_budget",
        "dialect",
        "ended",
        "engine",
        "keepalive",
        "pending_steers",
        "session",
        "socket",
        "unsettled",
        "upgrade",
        "waiting_bytes",
    )

    def __init__(
        self,
        engine: Engine,
        upgrade: UpgradeRequest,
        keepalive: Keepalive,
        *,
        max_bytes: int,
        compat: Dialect,
    ) -> None:
        self.dialect = choose_dialect(upgrade.headers, compat)
        self.body_budget = upgrade.body_budget or BodyBudget(max_bytes)
        self.waiting_bytes = self.body_budget.open()
        self.engine = engine
        self.upgrade = upgrade
        self.socket = upgrade.socket
        self.keepalive = keepalive
        self.session = Session(max_bytes=max_bytes)
        self.ended: dict[str, str] = {}
        self.pending_steers: dict[str, Sequence[QueuedSteer]] = {}
        self.unsettled: dict[str, asyncio.Event] = {}

    @property
    def project(self) -> str:
        return self.upgrade.project

    def hold_waiting(self, size: int) -> None:
        """Count the bytes of a request that waits. Raises Unavailable if the budget for bodies is exhausted."""
        if not self.waiting_bytes.resize(self.waiting_bytes.size + size):
            raise self.body_budget.make_error()

    def release_waiting(self, size: int) -> None:
        self.waiting_bytes.resize(self.waiting_bytes.size - size)

    async def write(self, lines: list[bytes]) -> int:
        """Send messages and return their size in bytes."""
        size = self.count_bytes(lines)
        await self.socket.write(lines)
        return size

    def count_bytes(self, lines: list[bytes]) -> int:
        """Add the size of messages to the connection's total and return it."""
        size = sum(map(len, lines))
        self.upgrade.bytes_sent += size
        return size

    async def write_error(self, error: AntiphonError, stream_id: str | None = None) -> int:
        return await self.write([add_stream_id(encode_error_event(error), stream_id)])

    def record_end(self, response_id: str, status: str) -> None:
        self.ended[response_id] = status
        if len(self.ended) > _MAX_ENDED:
            del self.ended[next(iter(self.ended))]

    def settle_steering(self, response_id: str) -> None:
        """Release the lanes that wait for the steering input of this response."""
        if (settled := self.unsettled.pop(response_id, None)) is not None:
            settled.set()

    async def take_pending_steers(self, response_id: str | None) -> Sequence[QueuedSteer]:
        """Remove and return the steering input that goes with a continuation of this response, on any lane."""
        if response_id is None:
            return ()
        if (settled := self.unsettled.get(response_id)) is not None:
            await settled.wait()
        return self.pending_steers.pop(response_id, ())

    def start_access_line(self) -> AccessLine:
        """Return the log line of a response that starts now. `ms` holds the start time until the line is logged."""
        return AccessLine(
            request_id=self.upgrade.id,
            method="WS",
            path=self.upgrade.path,
            status=200,
            ms=time.perf_counter() * 1000,
            bytes=0,
            project=self.project,
            stream=True,
        )


def encode_error_event(error: AntiphonError) -> bytes:
    """Return an error event, which ends only the request that it answers. Its code falls back to the error's type."""
    payload = ErrorPayload(error.type, error.code or error.type, error.message, error.param)
    return codec.encode(SocketError(error.status, payload))


def add_stream_id(line: bytes, stream_id: str | None) -> bytes:
    """Return a message with the `stream_id` of its lane."""
    return line if stream_id is None else line[:-1] + encode_stream_id(stream_id)


def encode_stream_id(stream_id: str) -> bytes:
    """Return the `stream_id` field, to replace the closing brace of a message."""
    return b',"stream_id":' + codec.encode(stream_id) + b"}"
