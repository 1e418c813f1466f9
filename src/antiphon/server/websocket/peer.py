"""The client at the other end of a WebSocket: how to reach it, and what it has here."""

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
from antiphon.server.dialect import choose_names
from antiphon.server.keepalive import Keepalive
from antiphon.server.log import AccessLine
from antiphon.server.websocket.steering import QueuedSteer
from antiphon.server.websocket.wire import Upgrade

_MOST_ENDED = 64


class Peer:
    """What everything on a connection shares. `ended` are the latest responses that are over, by how they ended.

    `owed` is steering input that waits for the outputs of a response's calls, by its id. Responses that are `steered`
    have not ended: what becomes of their input shows when they settle.
    """

    __slots__ = ("ended", "engine", "keepalive", "owed", "rename", "session", "steered", "upgrade", "wire")

    def __init__(
        self, engine: Engine, upgrade: Upgrade, keepalive: Keepalive, *, max_bytes: int, compat: Dialect
    ) -> None:
        self.rename = choose_names(upgrade.headers, compat)
        self.engine = engine
        self.upgrade = upgrade
        self.wire = upgrade.wire
        self.keepalive = keepalive
        self.session = Session(most_bytes=max_bytes)
        self.ended: dict[str, str] = {}
        self.owed: dict[str, Sequence[QueuedSteer]] = {}
        self.steered: dict[str, asyncio.Event] = {}

    @property
    def project(self) -> str:
        return self.upgrade.project

    async def write(self, lines: list[bytes]) -> int:
        """Send messages. Returns how many bytes they are."""
        size = self.count(lines)
        await self.wire.write(lines)
        return size

    def count(self, lines: list[bytes]) -> int:
        size = sum(map(len, lines))
        self.upgrade.sent += size
        return size

    async def write_error(self, error: AntiphonError, stream_id: str | None = None) -> int:
        return await self.write([label(encode_error(error), stream_id)])

    def note_end(self, response_id: str, status: str) -> None:
        self.ended[response_id] = status
        if len(self.ended) > _MOST_ENDED:
            del self.ended[next(iter(self.ended))]

    def settle(self, response_id: str) -> None:
        """What was said to this response has found its way: into `owed`, on, or back."""
        if (settled := self.steered.pop(response_id, None)) is not None:
            settled.set()

    async def take_owed(self, response_id: str | None) -> Sequence[QueuedSteer]:
        """The steering input that goes with a continuation of this response, whichever lane that is on."""
        if response_id is None:
            return ()
        if (settled := self.steered.get(response_id)) is not None:
            await settled.wait()
        return self.owed.pop(response_id, ())

    def begin_line(self) -> AccessLine:
        """What the access log will say of a response on this connection."""
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


def encode_error(error: AntiphonError) -> bytes:
    """An error that ends no more than the request it answers. Its code is a word even where HTTP has none."""
    payload = ErrorPayload(error.type, error.code or error.type, error.message, error.param)
    return codec.encode(SocketError(error.status, payload))


def label(line: bytes, stream_id: str | None) -> bytes:
    """A message with the name of its lane."""
    return line if stream_id is None else line[:-1] + make_label(stream_id)


def make_label(stream_id: str) -> bytes:
    """What takes the place of a message's last brace."""
    return b',"stream_id":' + codec.encode(stream_id) + b"}"
