"""The ASGI application: authentication, routing, error responses and the access log. Any ASGI server can run it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from antiphon.config.settings import Settings
from antiphon.engine.engine import Engine
from antiphon.errors import AntiphonError, InvalidApiKey, InvalidRequest, RateLimited, Unavailable
from antiphon.server.auth import CHALLENGE, Authenticator, make_scope_error
from antiphon.server.body_budget import BodyBudget
from antiphon.server.error_response import make_internal_error
from antiphon.server.http import ClientDisconnected, HttpRequest, Receive, Scope, Send
from antiphon.server.limits.limiter import Limiter
from antiphon.server.log import log_http_request
from antiphon.server.query import NoQuery, read_query
from antiphon.server.router import Route, Router
from antiphon.server.routes import make_router
from antiphon.server.scopes import INFERENCE
from antiphon.server.telemetry.startup import make_telemetry
from antiphon.server.websocket.handler import WebSocketHandler
from antiphon.server.websocket.socket import UpgradeRequest

if TYPE_CHECKING:
    from antiphon.server.limits.sync import LimitSync
    from antiphon.server.metrics.server_metrics import ServerMetrics

logger = logging.getLogger(__name__)

# Never sent. The access log shows it if the client disconnects before the response starts.
_CLIENT_DISCONNECTED = 499
# The default of body_budget_bytes is this multiple of max_body_bytes.
_BUDGET_IN_BODIES = 4
# Maximum time to close the engine. A database that does not answer may not let it close.
_CLOSE_SECONDS = 15.0


class App:
    """The application as an ASGI callable. The engine starts and closes with the lifespan."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self.authenticator = Authenticator(
            settings.api_keys, store=engine.key_store, host=settings.host, allowed_hosts=settings.allowed_hosts
        )
        self.body_budget = BodyBudget(settings.body_budget_bytes or _BUDGET_IN_BODIES * settings.max_body_bytes)
        self._limiter = Limiter.make(settings)
        self._limit_sync = None if self._limiter is None else _connect_limiter(self._limiter, engine)
        self._report: Callable[[HttpRequest], None] = log_http_request
        self.metrics: ServerMetrics | None = None
        if settings.metrics:
            from antiphon.server.metrics import server_metrics

            self.metrics = server_metrics.ServerMetrics(engine, lambda: self._limiter)
            self._report = _report_to(self.metrics)
        self._telemetry = make_telemetry(engine)
        self._spans = spans = None if self._telemetry is None else self._telemetry.spans
        self._serve: Callable[[HttpRequest, Router], Awaitable[None]] = self._serve_request
        if spans is not None:
            self._serve, self._report = spans.wrap_serve(self._serve_request), spans.wrap_report(self._report)
        self._router = make_router(
            engine,
            settings,
            self.metrics,
            requires_key=lambda: self.authenticator.requires_key,
            get_settings=lambda: self._settings,
        )
        self._websockets = WebSocketHandler(
            engine, settings, self.authenticator, spans, get_limiter=lambda: self._limiter
        )
        self._upgrades = Router()
        self._upgrades.add("GET", "/v1/responses", self._websockets.serve, scope=INFERENCE)
        self.startup_error: Exception | None = None
        self.has_closed = True  # False if the engine could not be closed in time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            with nullcontext() if self._spans is None else self._spans.keep_context():
                if scope["type"] == "http":
                    await self.begin_request(scope, receive, send)
                else:
                    upgrade = UpgradeRequest(scope, receive, send, body_budget=self.body_budget)
                    await self._serve(upgrade, self._upgrades)
        elif scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        else:
            raise NotImplementedError(f"ASGI scope type {scope['type']!r} is not supported.")

    def begin_request(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Return the awaitable that serves an HTTP request, to run as a task.

        Running `__call__` as the task would cost one more await.
        """
        return self._serve(HttpRequest(scope, receive, send, body_budget=self.body_budget), self._router)

    def apply_settings(self, settings: Settings) -> None:
        """Use new settings for the next requests. The engine has its own part (`engine.assembly.reconfigure`)."""
        self._settings = settings
        self.authenticator.set_keys(settings.api_keys, allowed_hosts=settings.allowed_hosts)
        if self._limiter is not None:
            self._limiter.configure(settings)
        elif (limiter := Limiter.make(settings)) is not None:
            self._limiter, self._limit_sync = limiter, _connect_limiter(limiter, self._engine)
            self._limit_sync.start()

    def start_shutdown(self) -> None:
        """Close WebSockets once their running responses end. They would otherwise stay open for ever."""
        self._websockets.start_shutdown()

    async def _serve_request(self, http_request: HttpRequest, router: Router) -> None:
        try:
            # A public route does not wait for the store: /healthz has to answer while the store does not.
            if not self.authenticator.requires_key and not router.is_public(http_request):
                await self.authenticator.look_for_keys(http_request.headers)
            self.authenticator.check_host(http_request.headers)
            route = router.find(http_request)
            if not route.public:
                headers = http_request.headers
                grant = self.authenticator.find_verified(headers) or await self.authenticator.authenticate(headers)
                if grant.scope < route.scope:
                    raise make_scope_error(grant.scope, route.scope)
                http_request.project = grant.project
                http_request.grant = grant
                if http_request.mark_authenticated is not None:
                    http_request.mark_authenticated()
            if http_request.query and not route.reads_query:
                read_query(http_request, NoQuery)
            if self._limiter is not None and not route.public:
                _apply_limits(self._limiter, http_request, route)
            await route.handler(http_request)
        except BaseException as error:
            if not await self._handle_error(http_request, error):
                raise
        finally:
            if http_request.body_share is not None or http_request.permit is not None:
                http_request.release()
            self._report(http_request)

    async def _handle_error(self, http_request: HttpRequest, error: BaseException) -> bool:
        """Respond with an error. Return False for a cancellation, which has to be raised again."""
        if isinstance(error, ClientDisconnected):
            http_request.status = http_request.status or _CLIENT_DISCONNECTED
            http_request.error_code = "client_gone"
        elif isinstance(error, Exception):
            await self._respond_error(http_request, error)
        else:
            if isinstance(error, asyncio.CancelledError):  # by a server that stops; `HttpCycle` responds
                http_request.status = http_request.status or Unavailable.status
                http_request.error_code = Unavailable.default_code
            if self._spans is not None:
                self._spans.record_error(http_request, error)
            return False
        return True

    async def _respond_error(self, http_request: HttpRequest, error: Exception) -> None:
        if isinstance(error, RecursionError):
            # JSON may be shallow enough to parse and too deep for code that walks it. The log shows which code.
            cause, error = error, InvalidRequest("The request is nested too deeply.", code="invalid_json")
            error.__cause__ = cause
        known = error if isinstance(error, AntiphonError) else None
        # An expected error is in the access log by its code. Log it here only if it has a cause.
        if known is None or known.__cause__ is not None:
            logger.error("the request failed", exc_info=error, extra={"request_id": http_request.id})
        if http_request.status:
            # The response has started, and the engine failed unexpectedly. An incomplete response makes the server
            # close the connection, so that the client cannot take it for complete.
            http_request.error_code = "server_error"
            return
        if isinstance(error, InvalidApiKey):
            http_request.extra_headers.append(CHALLENGE)
        await http_request.respond_error(known or make_internal_error(http_request.id))

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._engine.start()
        except Exception as error:
            self.startup_error = error
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        if self._engine.has_stored_keys:
            self.authenticator.require_keys()
        if self._telemetry is not None:
            self._telemetry.start()
        if self._limit_sync is not None:
            await self._limit_sync.exchange()
            self._limit_sync.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        closing = asyncio.create_task(self._close())
        await asyncio.wait([closing], timeout=_CLOSE_SECONDS)
        if not closing.done():
            self.has_closed = False
            parts = ", ".join(self._engine.unclosed or ["telemetry"])
            logger.error("stopping: not closed within %g seconds: %s", _CLOSE_SECONDS, parts)
            await send({"type": "lifespan.shutdown.failed"})
            return
        failure = closing.exception()
        if failure is not None:
            logger.error("closing the engine failed", exc_info=failure)
            await send({"type": "lifespan.shutdown.failed", "message": str(failure)})
            return
        await send({"type": "lifespan.shutdown.complete"})

    async def _close(self) -> None:
        await self.authenticator.close()
        if self._limit_sync is not None:
            await self._limit_sync.close()
        await self._engine.close()
        if self._telemetry is not None:
            await self._telemetry.close()


def _apply_limits(limiter: Limiter, http_request: HttpRequest, route: Route) -> None:
    """Count a request and add the headers of its limits. Raises RateLimited."""
    project, key_id = http_request.project, http_request.key_id
    if route.limited:
        try:
            http_request.permit = limiter.admit(project, key_id)
        except RateLimited:
            http_request.extra_headers += limiter.describe(project, key_id)
            raise
        http_request.extra_headers += http_request.permit.headers
    else:
        http_request.extra_headers += limiter.describe(project, key_id)


def _connect_limiter(limiter: Limiter, engine: Engine) -> "LimitSync":
    """Charge the usage of the engine to the limiter, and return the exchange with other processes."""
    from antiphon.server.limits.sync import LimitSync

    engine.usage.on_charge = limiter.charge
    return LimitSync(limiter, engine.admin_store, engine.usage)


def _report_to(metrics: "ServerMetrics") -> Callable[[HttpRequest], None]:
    """Return a function that counts and logs a request."""
    count_request = metrics.count_request

    def report(http_request: HttpRequest) -> None:
        count_request(http_request)
        log_http_request(http_request)

    return report
