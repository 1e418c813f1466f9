"""The handler of WebSockets: it takes them in, and sees them out when the server stops."""

from antiphon.config import Settings
from antiphon.engine.engine import Engine
from antiphon.errors import Unavailable, UpgradeRequired
from antiphon.server.http import Exchange
from antiphon.server.keepalive import Keepalive
from antiphon.server.websocket.connection import Connection
from antiphon.server.websocket.peer import Peer
from antiphon.server.websocket.wire import Upgrade


class WebSocketHandler:
    """Serves `/v1/responses` to clients that stay connected."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._keepalive = Keepalive(settings.keepalive_seconds)
        self._connections: set[Connection] = set()
        self._retired = False

    async def serve(self, exchange: Exchange) -> None:
        assert isinstance(exchange, Upgrade), "only requests for a WebSocket come here"
        if self._retired:
            raise _stopping()
        limit = self._settings.max_body_bytes
        connection = Connection(
            Peer(self._engine, exchange, self._keepalive, max_bytes=limit, compat=self._settings.compat),
            max_bytes=limit,
            max_seconds=self._settings.websocket_max_seconds,
        )
        await exchange.accept()
        self._connections.add(connection)
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)

    def retire(self) -> None:
        """Take no new requests. What runs may come to its end, and then the connections are closed."""
        self._retired = True
        for connection in tuple(self._connections):
            connection.retire(_stopping())


async def require_upgrade(exchange: Exchange) -> None:
    """Answer a plain GET request, which asks for nothing that is here."""
    exchange.extra_headers += [(b"upgrade", b"websocket"), (b"connection", b"upgrade")]
    raise UpgradeRequired("A GET request opens a WebSocket here: send it as one, or use POST.")


def _stopping() -> Unavailable:
    return Unavailable("The server is shutting down.")
