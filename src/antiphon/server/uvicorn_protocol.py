"""uvicorn's HTTP protocol with header limits, read timeouts, errors as JSON, and one packet for a short response."""

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from antiphon.errors import InvalidRequest
from antiphon.server.error_response import encode_error_body
from antiphon.server.write_timeout import WriteTimeoutMixin

_MAX_HEAD_BYTES = 256 * 1024
# A client that never completes its request would hold its connection for ever.
_HEAD_TIMEOUT_SECONDS = 60.0
_BODY_TIMEOUT_SECONDS = 60.0
# Java's standard client offers HTTP/2 with every first request. A server may ignore the offer, but the parser would
# stop at this header and lose the body. A header name of the same length hides it. No JSON contains such a line.
_HTTP2_OFFER = re.compile(rb"(?<=\r\n)upgrade(?=:[ \t]*h2c[ \t]*\r\n)", re.IGNORECASE)
_HIDDEN_OFFER = b"x-offer"


class HeadBufferingTransport(asyncio.Transport):
    """A transport for one response. It holds the head back until the body starts, so that both leave in one packet.

    The application sends the two one right after the other; uvicorn writes each by itself.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._head is None and data[:10] != b"HTTP/1.1 1":  # interim responses (1xx) are sent at once
            self._head = bytes(data)
        elif self._head:
            self._transport.write(self._head + data)
            self._head = b""
        else:
            self._transport.write(data)

    def close(self) -> None:
        if self._head:
            self.write(b"")
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class HttpProtocol(WriteTimeoutMixin, HttpToolsProtocol):
    """One HTTP connection. It answers input that is not valid HTTP itself: such input never reaches the application."""

    _head_is_open = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _body_is_open = False
    _body_received_at = 0.0
    _body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._body_timer is not None:
            self._body_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(_HTTP2_OFFER.sub(_HIDDEN_OFFER, data) if b"h2c" in data else data)
        # The parser holds an incomplete head in memory for as long as the client continues it.
        if self._head_is_open:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, "The headers are too large.")
            elif self._head_timer is None:
                self._start_head_timer()
        elif self._body_is_open:
            self._body_received_at = self.loop.time()
            if self._body_timer is None:
                self._start_body_timer(_BODY_TIMEOUT_SECONDS)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_is_open = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._head_is_open = False
        self._stop_head_timer()
        super().on_headers_complete()
        if self.parser.should_upgrade() and self._should_upgrade():  # the rest of the connection is not HTTP
            return
        self._body_is_open = True
        if self.scope["method"] != "HEAD":  # the response to HEAD has no body to wait for
            self.cycle.transport = HeadBufferingTransport(self.transport)

    def on_message_complete(self) -> None:
        self._body_is_open = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._body_is_open:  # the body of a pipelined request could not be read until now
            self._body_received_at = self.loop.time()

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        # Break the reference cycle, so that an idle WebSocket does not hold both until the next garbage collection.
        self.parser = None  # type: ignore[assignment]  # as uvicorn does when a connection ends

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "The request is not valid HTTP.")

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_SECONDS, self._time_out_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out_head(self) -> None:
        if _is_incomplete(self.cycle):
            self._start_head_timer()  # the response to the request before is not complete
        elif self._head_bytes:
            self._refuse(408, "The request did not arrive in time.")
        else:
            self.transport.close()

    def _start_body_timer(self, seconds: float) -> None:
        self._body_timer = self.loop.call_later(seconds, self._check_body)

    def _check_body(self) -> None:
        """Refuse a body that has stopped arriving.

        A timer for every body would be expensive, and nearly all bodies arrive at once. So one timer runs on until a
        body is overdue.
        """
        self._body_timer = None
        if not self._body_is_open:
            return
        if self.pipeline or self.flow.read_paused:  # the server does not read the body yet
            self._body_received_at = self.loop.time()
        left = self._body_received_at + _BODY_TIMEOUT_SECONDS - self.loop.time()
        if left > 0:
            self._start_body_timer(left)
        elif _is_incomplete(self.cycle):
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
