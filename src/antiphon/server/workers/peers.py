"""The other workers, as the engine and the metrics of a worker use them."""

from typing import TYPE_CHECKING

import msgspec

from antiphon.engine.engine import Engine
from antiphon.server.workers.link import SupervisorLink
from antiphon.server.workers.messages import CHANGED

if TYPE_CHECKING:
    from antiphon.server.metrics.server_metrics import ServerMetrics

_METRICS = "metrics"


class WorkerPeers:
    """Connects an engine to the other workers: their foreground responses, changes of background ones, and metrics."""

    def __init__(self, link: SupervisorLink, engine: Engine, metrics: "ServerMetrics | None") -> None:
        self._link = link
        self._engine = engine
        self._metrics = metrics
        link.answers[CHANGED] = self._receive_change
        link.answers[_METRICS] = self._answer_metrics
        engine.connect(link, self._announce_change)

    async def collect_metrics(self) -> list[bytes]:
        """Return the metrics of all other workers."""
        return await self._link.ask_all(_METRICS)

    def _announce_change(self, kind: str, response_id: str, last: int) -> None:
        self._link.announce(CHANGED, msgspec.json.encode((kind, response_id, last)))

    async def _receive_change(self, payload: bytes) -> bytes:
        self._engine.receive_change(*msgspec.json.decode(payload, type=tuple[str, str, int]))
        return b""

    async def _answer_metrics(self, _: bytes) -> bytes:
        return b"" if self._metrics is None else self._metrics.write_own()
