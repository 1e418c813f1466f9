"""The other workers, as the engine and the metrics of a worker use them."""

from typing import TYPE_CHECKING

from antiphon.engine.engine import Engine
from antiphon.server.workers.link import SupervisorLink
from antiphon.store.changes import Announcement, OwnerDied, decode_announcement, encode_announcement

if TYPE_CHECKING:
    from antiphon.server.metrics.server_metrics import ServerMetrics

_METRICS = "metrics"
_ANNOUNCEMENT = "announcement"


class WorkerPeers:
    """Connects an engine to the other workers: their foreground responses, changes of background ones, and metrics."""

    def __init__(self, link: SupervisorLink, engine: Engine, metrics: "ServerMetrics | None") -> None:
        self._link = link
        self._engine = engine
        self._metrics = metrics
        link.answers[_ANNOUNCEMENT] = self._receive
        link.answers[_METRICS] = self._answer_metrics
        link.on_death = lambda owner: engine.receive_change(OwnerDied(owner))
        engine.connect(link, self._announce)

    async def collect_metrics(self) -> list[bytes]:
        """Return the metrics of all other workers."""
        return await self._link.ask_all(_METRICS)

    def _announce(self, announcement: Announcement) -> None:
        self._link.announce(_ANNOUNCEMENT, encode_announcement(announcement).encode())

    async def _receive(self, payload: bytes) -> bytes:
        announcement = decode_announcement(payload.decode())
        if announcement is not None:
            self._engine.receive_change(announcement)
        return b""

    async def _answer_metrics(self, _: bytes) -> bytes:
        return b"" if self._metrics is None else self._metrics.write_own()
