"""uvicorn's HTTP protocol with header limits, read timeouts, errors as JSON, and callbacks for disconnects."""

import asyncio
import math
import re
import urllib.parse
from collections.abc import Callable

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from antiphon.errors import InvalidRequest
from antiphon.server.error_response import encode_error_body
from antiphon.server.http import WATCH_DISCONNECT, WRITE_BODY, Scope
from antiphon.server.http_cycle import HttpCycle
from antiphon.server.write_timeout import WriteTimeoutMixin

_MAX_HEAD_BYTES = 256 * 1024
# A client that never completes its request would hold its connection for ever.
_HEAD_TIMEOUT_SECONDS = 60.0
_BODY_TIMEOUT_SECONDS = 60.0
# Java's standard client offers HTTP/2 with every first request. A server may ignore the offer, but the parser would
# stop at this header and lose the body. A header name of the same length hides it. No JSON contains such a line.
_HTTP2_OFFER = re.compile(rb"(?<=\r\n)upgrade(?=:[ \t]*h2c[ \t]*\r\n)", re.IGNORECASE)
_HIDDEN_OFFER = b"x-offer"
_ASGI_VERSION = {"version": "3.0", "spec_version": "2.3"}


class HttpProtocol(WriteTimeoutMixin, HttpToolsProtocol):
    """One HTTP connection. It answers input that is not valid HTTP itself: such input never reaches the application.

    `_deadline` is the end of the time for the next part of a request. One timer serves all requests of a connection,
    because starting and cancelling a timer for each would be expensive: it runs on until the deadline has passed.
    """

    _head_is_open = True
    _head_bytes = 0
    _body_is_open = False
    _deadline = math.inf
    _timer: asyncio.TimerHandle | None = None
    _timer_ends_at = math.inf
    _on_disconnect: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._extensions = {
            WATCH_DISCONNECT: {"watch": self.watch_disconnect},
            WRITE_BODY: {"write": self.write_body},
        }
        self._set_deadline(_HEAD_TIMEOUT_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        if self._on_disconnect is not None:
            self._on_disconnect()

    def watch_disconnect(self, callback: Callable[[], None] | None) -> bool:
        """Set the function to call when the connection is lost. Return False if it is lost already."""
        self._on_disconnect = callback
        return self in self.connections

    def write_body(self, body: bytes) -> bool:
        """Write a part of the current response if that needs no waiting, and return True if it was written."""
        cycle = self.cycle  # the current one, unless requests wait in the pipeline
        return not self.pipeline and isinstance(cycle, HttpCycle) and cycle.write_now(body)

    def data_received(self, data: bytes) -> None:
        if b"h2c" in data:
            data = _HTTP2_OFFER.sub(_HIDDEN_OFFER, data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            return
        except httptools.HttpParserError:
            self._refuse(400, "The request is not valid HTTP.")
            return
        # The parser holds an incomplete head in memory for as long as the client continues it.
        if self._head_is_open:
            # The time for the first head starts with the connection.
            if not self._head_bytes and self.cycle is not None:
                self._set_deadline(_HEAD_TIMEOUT_SECONDS)
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, "The headers are too large.")
        elif self._body_is_open:
            self._set_deadline(_BODY_TIMEOUT_SECONDS)

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._head_is_open = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._head_is_open = False
        self._deadline = math.inf
        parser = self.parser
        version = parser.get_http_version()
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI_VERSION,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "scheme": self.scheme,
            "server": self.server,
            "client": self.client,
            "root_path": self.root_path,
            "headers": self.headers,
            "extensions": self._extensions,
        }
        self.scope = scope  # type: ignore[assignment]  # uvicorn has a type of its own
        if parser.should_upgrade() and self._should_upgrade():  # the rest of the connection is not HTTP
            return
        self._body_is_open = True
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["raw_path"] = url.path
        scope["query_string"] = url.query or b""
        previous = self.cycle
        self.cycle = HttpCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if _is_incomplete(previous):  # a pipelined request
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
        else:
            self._start_asgi_task(self.cycle, self.app)

    def on_message_complete(self) -> None:
        self._body_is_open = False
        if _is_incomplete(self.cycle):
            self._deadline = math.inf
        else:
            self._set_deadline(self.timeout_keep_alive)  # a body that the application has refused unread
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if self._body_is_open:  # the body of a pipelined request could not be read until now
            self._set_deadline(_BODY_TIMEOUT_SECONDS)
        elif not self._head_is_open:
            self._set_deadline(self.timeout_keep_alive)

    def _should_upgrade_to_ws(self) -> bool:
        return True

    def handle_websocket_upgrade(self) -> None:
        # Imported at first use: many servers never open a WebSocket.
        from antiphon.server.websocket.uvicorn_protocol import WebSocketProtocol

        self.ws_protocol_class = WebSocketProtocol
        if self._timer is not None:
            self._timer.cancel()
        super().handle_websocket_upgrade()
        # Break the reference cycle, so that an idle WebSocket does not hold both until the next garbage collection.
        self.parser = None  # type: ignore[assignment]  # as uvicorn does when a connection ends

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = self.loop.time() + seconds
        if self._timer is None or self._deadline < self._timer_ends_at:
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ends_at = self._deadline
        self._timer = self.loop.call_later(self._deadline - self.loop.time(), self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self.loop.time() >= self._deadline:
            self._time_out()
        elif self._deadline != math.inf:
            self._start_timer()

    def _time_out(self) -> None:
        if self._head_is_open and _is_incomplete(self.cycle):  # the response to the request before is not complete
            self._set_deadline(_HEAD_TIMEOUT_SECONDS)
        elif self._body_is_open and (self.pipeline or self.flow.read_paused):  # the server does not read the body yet
            self._set_deadline(_BODY_TIMEOUT_SECONDS)
        elif (self._head_is_open and self._head_bytes) or (self._body_is_open and _is_incomplete(self.cycle)):
            self._refuse(408, "The request did not arrive in time.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        # A response that has started cannot be replaced by an error.
        if not _is_responding(self.cycle):
            body = encode_error_body(InvalidRequest(message, code="invalid_http"))
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
                + body
            )
        self.transport.close()


def _is_incomplete(cycle: RequestResponseCycle | None) -> bool:
    return cycle is not None and not cycle.response_complete


def _is_responding(cycle: RequestResponseCycle | None) -> bool:
    return cycle is not None and cycle.response_started and not cycle.response_complete
