"""The handler of /metrics."""

from antiphon.config.settings import ApiKey
from antiphon.server.auth import Authenticator
from antiphon.server.http import HttpRequest
from antiphon.server.metrics.registry import CONTENT_TYPE
from antiphon.server.metrics.server_metrics import ServerMetrics


class MetricsHandler:
    """Writes the metrics. With a `key`, only requests with this key get them."""

    def __init__(self, metrics: ServerMetrics, *, key: str) -> None:
        self._metrics = metrics
        self._authenticator = Authenticator([ApiKey(key)]) if key else None

    async def show(self, http_request: HttpRequest) -> None:
        if self._authenticator is not None:
            await self._authenticator.authenticate(http_request.headers)
            if http_request.mark_authenticated is not None:
                http_request.mark_authenticated()
        await http_request.respond_text(await self._metrics.write(), CONTENT_TYPE)
