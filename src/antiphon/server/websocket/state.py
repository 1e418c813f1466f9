"""State shared by the lanes of a WebSocket connection, and the encoding of its errors."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from antiphon.bounds import remove_oldest
from antiphon.config.settings import Settings
from antiphon.engine.engine import Engine
from antiphon.engine.respond.connection_memory import ConnectionMemory
from antiphon.errors import AntiphonError
from antiphon.protocol import codec
from antiphon.protocol.events import ErrorPayload
from antiphon.protocol.websocket import SocketError
from antiphon.server.body_budget import BodyBudget, BodyShare
from antiphon.server.dialect import choose_dialect
from antiphon.server.keepalive import Keepalive
from antiphon.server.limits.limiter import Limiter
from antiphon.server.log import AccessLine
from antiphon.server.websocket.socket import UpgradeRequest
from antiphon.server.websocket.steering import QueuedSteer

if TYPE_CHECKING:
    from antiphon.server.telemetry.spans import RequestSpans

_MAX_ENDED = 64
# If the budget for bodies is exhausted, a client that has not read for this time is disconnected.
_MAX_STALL_SECONDS = 30.0


class ConnectionState:
    """State shared by the lanes of a connection. All three dicts are keyed by response id.

    `ended`: the status of each of the latest responses that have ended.
    `pending_steers`: steering input that waits for the outputs of the response's tool calls.
    `unsettled`: steered responses that have not ended. The event is set when their steering input has been queued,
    stored as pending, or returned.
    `request_share` is the share of the budget for request bodies that the queued and the served requests take. It is
    dropped, with the connection, if the client has not read for a while. `memory_share` is that of the responses in
    the memory. They are forgotten if others need it: a cache gives way to requests.
    """

    __slots__ = (
        "body_budget",
        "dialect",
        "ended",
        "engine",
        "get_limiter",
        "keepalive",
        "memory",
        "memory_share",
        "pending_steers",
        "request_share",
        "socket",
        "spans",
        "unsettled",
        "upgrade",
    )

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        upgrade: UpgradeRequest,
        keepalive: Keepalive,
        *,
        get_limiter: Callable[[], Limiter | None],
        spans: "RequestSpans | None",
    ) -> None:
        self.dialect = choose_dialect(upgrade.headers, settings.compat)
        self.body_budget = upgrade.body_budget or BodyBudget(settings.max_body_bytes)
        self.engine = engine
        self.get_limiter = get_limiter
        self.upgrade = upgrade
        self.socket = upgrade.socket
        self.request_share = self.body_budget.open(self.socket.abort, project=upgrade.project, is_slow=self._is_stalled)
        self.memory_share = self._open_memory_share()
        self.keepalive = keepalive
        self.spans = spans
        self.memory = ConnectionMemory(max_bytes=settings.max_body_bytes)
        self.ended: dict[str, str] = {}
        self.pending_steers: dict[str, Sequence[QueuedSteer]] = {}
        self.unsettled: dict[str, asyncio.Event] = {}

    @property
    def project(self) -> str:
        return self.upgrade.project

    def hold_request(self, size: int) -> None:
        """Count the bytes of a request until it has ended. Raises Unavailable if the budget for bodies is exhausted."""
        if not self.request_share.resize(self.request_share.size + size):
            raise self.body_budget.make_error()

    def release_request(self, size: int) -> None:
        self.request_share.resize(self.request_share.size - size)

    def hold_memory(self) -> None:
        """Count the bytes of the responses in the memory. Forget them if the budget for bodies is exhausted."""
        if not self.memory_share.resize(self.memory.measure()):
            self.memory.clear()

    def close_shares(self) -> None:
        """Return the shares. Nothing can be held after it."""
        self.request_share.close()
        self.memory_share.close()
        del self.request_share, self.memory_share  # they refer to this object

    def _drop_session(self) -> None:
        self.memory.clear()
        self.memory_share = self._open_memory_share()

    def _open_memory_share(self) -> BodyShare:
        return self.body_budget.open(self._drop_session, project=self.project, is_slow=lambda: True)

    def _is_stalled(self) -> bool:
        return self.socket.compute_stall() > _MAX_STALL_SECONDS

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
        remove_oldest(self.ended, _MAX_ENDED)

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
            key_id=self.upgrade.key_id or None,
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
