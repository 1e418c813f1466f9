"""The WebSocket handler of /v1/responses: opens connections, and closes them when the server shuts down."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from antiphon.config.settings import Settings
from antiphon.engine.engine import Engine
from antiphon.errors import Unavailable, UpgradeRequired
from antiphon.server.auth import Authenticator
from antiphon.server.http import HttpRequest
from antiphon.server.keepalive import Keepalive
from antiphon.server.limits.limiter import Limiter
from antiphon.server.websocket.socket import UpgradeRequest

if TYPE_CHECKING:
    from antiphon.server.telemetry.spans import RequestSpans
    from antiphon.server.websocket.connection import WebSocketConnection


class WebSocketHandler:
    """Serves WebSocket connections. With `spans`, each response has one."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        authenticator: Authenticator,
        spans: "RequestSpans | None" = None,
        *,
        get_limiter: Callable[[], Limiter | None] = lambda: None,
    ) -> None:
        self._spans = spans
        self._authenticator = authenticator
        self._get_limiter = get_limiter
        self._engine = engine
        self._settings = settings
        self._keepalive = Keepalive(settings.keepalive_seconds)
        self._connections: set[WebSocketConnection] = set()
        self._shutting_down = False

    async def serve(self, http_request: HttpRequest) -> None:
        assert isinstance(http_request, UpgradeRequest), "the router passes only upgrade requests"
        if self._shutting_down:
            raise _shutting_down()
        # Imported at first use: many servers never open a WebSocket.
        from antiphon.server.websocket.connection import WebSocketConnection
        from antiphon.server.websocket.state import ConnectionState

        state = ConnectionState(
            self._engine,
            self._settings,
            http_request,
            self._keepalive,
            get_limiter=self._get_limiter,
            spans=self._spans,
        )
        connection = WebSocketConnection(
            state, self._settings, check_key=lambda: self._authenticator.check_again(http_request.headers)
        )
        await http_request.accept()
        self._connections.add(connection)
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)

    def start_shutdown(self) -> None:
        """Refuse new requests. Connections are closed when their running responses have ended."""
        self._shutting_down = True
        for connection in tuple(self._connections):
            connection.close_gracefully(_shutting_down())


async def require_upgrade(http_request: HttpRequest) -> None:
    """Refuse a GET request without an upgrade."""
    http_request.extra_headers += [(b"upgrade", b"websocket"), (b"connection", b"upgrade")]
    raise UpgradeRequired("GET opens a WebSocket on this path: send an upgrade request, or use POST.")


def _shutting_down() -> Unavailable:
    return Unavailable("The server is shutting down.")
