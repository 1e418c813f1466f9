"""The ASGI application: any ASGI server can run it."""

import logging

from antiphon.config import Settings
from antiphon.engine.engine import Engine
from antiphon.errors import AntiphonError, InvalidApiKey, InvalidRequest, ServerError
from antiphon.server.auth import CHALLENGE, Gate
from antiphon.server.http import ClientGone, Exchange, Receive, Scope, Send
from antiphon.server.log import write_access
from antiphon.server.query import NoQuery, read_query
from antiphon.server.router import Router
from antiphon.server.routes import make_router
from antiphon.server.websocket.handler import WebSocketHandler
from antiphon.server.websocket.wire import Upgrade

logger = logging.getLogger(__name__)

# Not a status that is sent: it stands in the log for a client that left before its answer began.
_CLIENT_GONE = 499


class App:
    """The server as a callable. The engine starts and closes with the server's lifespan."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._gate = Gate(settings.api_keys)
        self._router = make_router(engine, settings)
        self._websockets = WebSocketHandler(engine, settings)
        self._upgrades = Router()
        self._upgrades.add("GET", "/v1/responses", self._websockets.serve)
        self.startup_error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(Exchange(scope, receive, send), self._router)
        elif scope["type"] == "websocket":
            await self._answer(Upgrade(scope, receive, send), self._upgrades)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            raise NotImplementedError(f"Antiphon does not speak {scope['type']}.")

    def retire(self) -> None:
        """The server is about to stop: connections that would stay open for ever are to end."""
        self._websockets.retire()

    async def _answer(self, exchange: Exchange, router: Router) -> None:
        try:
            route = router.find(exchange)
            if not route.public:
                exchange.project = self._gate.admit(exchange.headers)
            if exchange.query and not route.reads_query:
                read_query(exchange, NoQuery)
            await route.handler(exchange)
        except ClientGone:
            exchange.status = exchange.status or _CLIENT_GONE
            exchange.error_code = "client_gone"
        except Exception as error:
            await self._refuse(exchange, error)
        finally:
            write_access(exchange)

    async def _refuse(self, exchange: Exchange, error: Exception) -> None:
        if isinstance(error, RecursionError):
            # JSON may be just shallow enough to be read, and too deep for whoever walks through it. The log shall tell
            # who that was.
            cause, error = error, InvalidRequest("The request is nested too deep.", code="invalid_json")
            error.__cause__ = cause
        known = error if isinstance(error, AntiphonError) else None
        # An error raised on purpose is told by its code in the access log, unless something else is behind it.
        if known is None or known.__cause__ is not None:
            logger.error("the request failed", exc_info=error, extra={"request_id": exchange.id})
        if exchange.status:
            # The answer is under way, and only an engine that breaks its promise gets here. Leaving it unfinished
            # makes the server close the connection, which the client cannot take for an end.
            exchange.error_code = "server_error"
            return
        if isinstance(error, InvalidApiKey):
            exchange.extra_headers.append(CHALLENGE)
        await exchange.answer_error(known or ServerError(f"The server had an error. The request id is {exchange.id}."))

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._engine.start()
        except Exception as error:
            self.startup_error = error
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        try:
            await self._engine.close()
        except Exception as error:
            logger.exception("closing failed")
            await send({"type": "lifespan.shutdown.failed", "message": str(error)})
            return
        await send({"type": "lifespan.shutdown.complete"})
