"""The other workers, as the engine and the metrics of a worker use them."""

from typing import TYPE_CHECKING

import msgspec

from antiphon.engine.engine import Engine
from antiphon.protocol import codec
from antiphon.protocol.response import Response
from antiphon.server.workers.link import SupervisorLink

if TYPE_CHECKING:
    from antiphon.server.metrics.server_metrics import ServerMetrics

_CANCEL, _RETRIEVE, _CHANGED, _METRICS = "cancel", "retrieve", "changed", "metrics"


class WorkerPeers:
    """Asks the other workers, and answers their questions. Implements `engine.peers.Peers`."""

    def __init__(self, link: SupervisorLink, engine: Engine, metrics: "ServerMetrics | None") -> None:
        self._link = link
        self._engine = engine
        self._metrics = metrics
        link.answers[_CANCEL] = self._answer_cancel
        link.answers[_RETRIEVE] = self._answer_retrieve
        link.answers[_CHANGED] = self._receive_change
        link.answers[_METRICS] = self._answer_metrics

    async def cancel(self, project: str, response_id: str) -> Response | None:
        return _decode(await self._link.ask(_CANCEL, _encode_pair(project, response_id)))

    async def retrieve(self, project: str, response_id: str) -> Response | None:
        return _decode(await self._link.ask(_RETRIEVE, _encode_pair(project, response_id)))

    def announce_change(self, kind: str, response_id: str) -> None:
        self._link.announce(_CHANGED, _encode_pair(kind, response_id))

    async def collect_metrics(self) -> list[bytes]:
        """Return the metrics of all other workers."""
        return await self._link.ask(_METRICS)

    async def _answer_cancel(self, payload: bytes) -> bytes:
        return _encode(await self._engine.cancel_foreground(*_decode_pair(payload)))

    async def _answer_retrieve(self, payload: bytes) -> bytes:
        return _encode(self._engine.find_foreground(*_decode_pair(payload)))

    async def _receive_change(self, payload: bytes) -> bytes:
        self._engine.receive_change(*_decode_pair(payload))
        return b""

    async def _answer_metrics(self, _: bytes) -> bytes:
        return b"" if self._metrics is None else self._metrics.write_own()


def _encode_pair(first: str, second: str) -> bytes:
    return msgspec.json.encode((first, second))


def _decode_pair(payload: bytes) -> tuple[str, str]:
    return msgspec.json.decode(payload, type=tuple[str, str])


def _encode(response: Response | None) -> bytes:
    return b"" if response is None else codec.encode(response)


def _decode(answers: list[bytes]) -> Response | None:
    return codec.decode_response(answers[0]) if answers else None
