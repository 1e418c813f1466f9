"""uvicorn's HTTP connection, with one write for an answer, errors in our shape, and bounds on what it waits for."""

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from antiphon.errors import InvalidRequest
from antiphon.server.error_response import describe
from antiphon.server.stalling import StallGuard

_LARGEST_HEAD = 256 * 1024
# A client that never comes to the end of its request would hold its connection for ever.
_SLOWEST_HEAD_SECONDS = 60.0
_LONGEST_BODY_PAUSE_SECONDS = 60.0
# Java's standard client offers HTTP/2 with every first request. A server may decline by not looking, but the parser
# would stop at the header and lose the body; under a name of the same length it goes unseen. No JSON has such a line.
_OFFER = re.compile(rb"(?<=\r\n)upgrade(?=:[ \t]*h2c[ \t]*\r\n)", re.IGNORECASE)
_UNSEEN = b"x-offer"


class Outlet(asyncio.Transport):
    """The way out for one answer: its head waits for the beginning of its body, so that both leave in one packet.

    The application sends the two one right after the other; uvicorn writes each by itself.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._head is None and data[:10] != b"HTTP/1.1 1":  # an interim answer is no head: it leaves at once
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


class Connection(StallGuard, HttpToolsProtocol):
    """What is not HTTP at all never reaches the application, so it is answered here."""

    _head_is_open = True
    _head_size = 0
    _head_timer: asyncio.TimerHandle | None = None
    _body_is_open = False
    _body_heard = 0.0
    _body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timing()
        if self._body_timer is not None:
            self._body_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(_OFFER.sub(_UNSEEN, data) if b"h2c" in data else data)
        # The parser keeps an unfinished head in memory for as long as the client goes on with it.
        if self._head_is_open:
            self._head_size += len(data)
            if self._head_size > _LARGEST_HEAD and not self.transport.is_closing():
                self._refuse(431, "The headers are too large.")
            elif self._head_timer is None:
                self._time_head()
        elif self._body_is_open:
            self._body_heard = self.loop.time()
            if self._body_timer is None:
                self._time_body(_LONGEST_BODY_PAUSE_SECONDS)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_is_open = True
        self._head_size = 0

    def on_headers_complete(self) -> None:
        self._head_is_open = False
        self._stop_timing()
        super().on_headers_complete()
        if self.parser.should_upgrade() and self._should_upgrade():  # what follows is no HTTP
            return
        self._body_is_open = True
        if self.scope["method"] != "HEAD":  # whose answer is all head
            self.cycle.transport = Outlet(self.transport)

    def on_message_complete(self) -> None:
        self._body_is_open = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._body_is_open:  # if it is that of the request behind, it can come only now
            self._body_heard = self.loop.time()

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        # The two hold each other. An idle WebSocket shall not hold both until the collector comes round.
        self.parser = None  # type: ignore[assignment]  # as uvicorn does when a connection ends

    def _time_head(self) -> None:
        self._head_timer = self.loop.call_later(_SLOWEST_HEAD_SECONDS, self._give_up)

    def _stop_timing(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if _is_owed(self.cycle):
            self._time_head()  # the request before it is still being answered
        elif self._head_size:
            self._refuse(408, "The request did not arrive in time.")
        else:
            self.transport.close()

    def _time_body(self, seconds: float) -> None:
        self._body_timer = self.loop.call_later(seconds, self._look_for_body)

    def _look_for_body(self) -> None:
        """A timer for every body would be dear, and nearly all of them come at once: so it goes on until it is due."""
        self._body_timer = None
        if not self._body_is_open:
            return
        if self.pipeline or self.flow.read_paused:  # nobody reads it yet, so it may not come
            self._body_heard = self.loop.time()
        left = self._body_heard + _LONGEST_BODY_PAUSE_SECONDS - self.loop.time()
        if left > 0:
            self._time_body(left)
        elif _is_owed(self.cycle):
            self._refuse(408, "The request did not arrive in time.")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "The request is not valid HTTP.")

    def _refuse(self, status: int, message: str) -> None:
        # In the middle of an answer there is no room for another one.
        if not _is_answering(self.cycle):
            body = describe(InvalidRequest(message, code="invalid_http"))
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
                + body
            )
        self.transport.close()


def _is_owed(cycle: RequestResponseCycle | None) -> bool:
    return cycle is not None and not cycle.response_complete


def _is_answering(cycle: RequestResponseCycle | None) -> bool:
    return cycle is not None and cycle.response_started and not cycle.response_complete
