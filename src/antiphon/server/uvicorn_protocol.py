"""uvicorn's HTTP protocol with limits, deadlines for every state, errors as JSON, and callbacks for disconnects."""

import asyncio
import math
import re
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from antiphon.errors import AntiphonError, InvalidRequest
from antiphon.server.connections import ServerLimits, find_address_key, make_overload_error
from antiphon.server.deadline import Deadline
from antiphon.server.http import MARK_AUTHENTICATED, READ_BODY, WATCH_DISCONNECT, WRITE_BODY, Scope
from antiphon.server.http_cycle import Application, CountingFlow, Header, HttpCycle, encode_error
from antiphon.server.write_timeout import WriteStall, abort_connection, count_unacknowledged

_MAX_HEAD_BYTES = 256 * 1024
_MAX_HEADERS = 256
# Maximum number of pipelined requests that wait. Reading stops at the first one, but one read may contain many.
_MAX_PIPELINED = 64
# Framing, chunk extensions and trailers may take this many bytes more than the body itself. A chunk of one byte has
# five bytes of framing, and takes as much work as a large one.
_MAX_FRAMING_BYTES = 64 * 1024
# A refused body is read and discarded, so that the client can read the response before it has sent everything.
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
# Java's standard client offers HTTP/2 with every first request. A server may ignore the offer, but the parser would
# stop at this header and lose the body. A header name of the same length hides it. No JSON contains such a line.
_HTTP2_OFFER = re.compile(rb"(?<=\r\n)upgrade(?=:[ \t]*h2c[ \t]*\r\n)", re.IGNORECASE)
_HIDDEN_OFFER = b"x-offer"
_ASGI_VERSION = {"version": "3.0", "spec_version": "2.3"}
_CHECKED_HEADERS = frozenset((b"expect", b"host", b"transfer-encoding"))
_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_INVALID = (400, "The request is not valid HTTP.")


class _RequestRejected(Exception):
    """Stops the parser. `HttpProtocol._rejection` has the status and the message."""


class HttpProtocol(HttpToolsProtocol):
    """One HTTP connection. It answers input that is not valid HTTP itself: such input never reaches the application.

    A deadline limits the wait for the next part of a request. It is fixed for a head. The body must have a minimum
    number of bytes in each period.
    """

    _head_is_open = True
    _head_bytes = 0
    _body_is_open = False
    # The received bytes after the head: all, those of the body, and all at the start of the period.
    _received_bytes = 0
    _body_bytes = 0
    _period_bytes = 0
    _host: bytes | None = None
    # The host of the last request. Clients send the same with each one.
    _valid_host: bytes | None = None
    # The last URL without a host, and its path, raw path and query. Many clients request the same again.
    _parsed_url = b""
    _target: tuple[str, bytes, bytes] = ("", b"", b"")
    # The request line of the last request with its version and method, and True if the current request has the same.
    _line: bytes | None = None
    _version, _method = "", ""
    _has_same_line = False
    _transfer_encoding: bytes | None = None
    _is_upgrade = False
    _is_authenticated = False
    _rejection = _INVALID
    # Set when nothing is read any more. The error response may have to wait for the responses before it.
    _is_refused = False
    _late_error: bytes | None = None
    # The request that is served. `cycle` is the latest one, which may wait in the pipeline.
    _served: HttpCycle | None = None
    cycle: HttpCycle
    flow: CountingFlow
    _on_disconnect: Callable[[], None] | None = None
    write_stall: WriteStall | None = None

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._limits: ServerLimits = config.limits
        self._settings = self._limits.settings
        self._deadline = Deadline(self.loop, self._time_out)
        self._run_app: Application = getattr(self.app, "begin_request", self.app)

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.flow = CountingFlow(transport)
        self._extensions: dict[str, dict[str, Any]] = {
            WATCH_DISCONNECT: {"watch": self.watch_disconnect},
            READ_BODY: {"take": self.take_body},
            WRITE_BODY: {"write": self.write_body, "respond": self.respond, "count_unread": self.count_unread},
        }
        if self._limits.connections.has_keys:
            self._extensions[MARK_AUTHENTICATED] = {"mark": self.mark_authenticated}
        self.address = find_address_key(self.client)
        self.accepted_at = self.loop.time()
        if not self._limits.connections.add(self, self.connections):
            self.evict()
        elif self._limits.is_stopping:  # the last connection that was accepted
            self.shutdown()
        else:
            self._deadline.set(self._settings.head_timeout_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.stop()
        self._limits.connections.admit(self)
        self.pipeline.clear()
        if self._served is not None and self._served is not self.cycle:
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)
        if self._on_disconnect is not None:
            self._on_disconnect()
        self._break_cycles()  # so that no connection waits for the garbage collector

    def _break_cycles(self) -> None:
        """Drop references that lead back to this object. A request that is still served breaks its own cycle."""
        self.cycle = self.scope = None  # type: ignore[assignment]  # as uvicorn does before the first request
        self._extensions = {}

    def mark_authenticated(self) -> None:
        """Exempt this connection from the limits for unauthenticated ones."""
        if not self._is_authenticated:
            self._is_authenticated = True
            self._limits.connections.admit(self)
            self._extensions.pop(MARK_AUTHENTICATED, None)

    def find_eviction_order(self) -> tuple[bool, float] | None:
        """Return the sort key among the connections to close, or None while the server works for this client."""
        if self.transport.is_closing():  # it waits until the client has read everything
            return (False, 0.0) if self.transport.get_write_buffer_size() else None
        if _is_incomplete(self._served) and not (self._body_is_open and self._served is self.cycle):
            return None
        return self._body_is_open, self._deadline.ends_at

    def evict(self) -> None:
        """Close the connection, because there are too many."""
        if self.transport.get_write_buffer_size() or (_is_incomplete(self._served) and not self._body_is_open):
            abort_connection(self.transport)
        elif self._served is None or self._body_is_open or (self._head_is_open and self._head_bytes):
            self._refuse(503, make_overload_error())
        else:
            self._is_refused = True
            self.transport.close()  # idle: a response without a request would be taken for the next one

    def shutdown(self) -> None:
        """Close the connection after its response. An idle one lingers: its client may be sending a request now."""
        if _is_incomplete(self.cycle):
            self.cycle.keep_alive = False
        elif self._limits.linger_seconds and not self._body_is_open:
            self._deadline.set(self._limits.linger_seconds)
        else:
            self.transport.close()

    def watch_disconnect(self, callback: Callable[[], None] | None) -> bool:
        """Set the function to call when the connection is lost. Return False if it is lost already."""
        is_connected = self in self.connections
        self._on_disconnect = callback if is_connected else None
        return is_connected

    def write_body(self, body: bytes) -> bool:
        """Write a part of the current response if that needs no waiting, and return True if it was written."""
        return not self.pipeline and self._served is not None and self._served.write_now(body)

    def take_body(self) -> bytes | None:
        """Return the body of the request that is served if all of it has arrived, or else None."""
        return None if self._served is None else self._served.take_body()

    def respond(self, status: int, headers: Sequence[Header], body: bytes) -> bool:
        """Send a whole response if that needs no waiting, and return True if it was sent."""
        return self._served is not None and self._served.respond_now(status, headers, body)

    def count_unread(self) -> int:
        """Return the number of bytes written that the client has not read, as far as the kernel shows it."""
        return self.transport.get_write_buffer_size() + count_unacknowledged(self.transport)

    @property
    def bytes_written(self) -> int:
        """The number of bytes written to the transport, apart from errors of this class."""
        return self.flow.bytes_written

    # Parsing

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._line is not None and not self._body_is_open and not (self._head_is_open and self._head_bytes):
            self._has_same_line = data.startswith(self._line)  # a request begins here
        # The end of the line must be in the data, too. This leaves out a body without line breaks.
        end = data.rfind(b"\r")
        if end > 0 and data.find(b"h2c", 0, end) >= 0:
            data = _HTTP2_OFFER.sub(_HIDDEN_OFFER, data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._is_upgrade:
                self.handle_websocket_upgrade()
            return
        except httptools.HttpParserError:
            status, message = self._rejection
            self._refuse(status, InvalidRequest(message, code="invalid_http"))
            return
        # The parser holds an incomplete head in memory for as long as the client continues it.
        if self._head_is_open:
            self._count_head(len(data))
        elif self._body_is_open:
            self._count_body(len(data))

    def _count_head(self, size: int) -> None:
        # The time for the first head starts with the connection.
        if not self._head_bytes and self.cycle is not None:
            self._deadline.set(self._settings.head_timeout_seconds)
        self._head_bytes += size
        if self._head_bytes > _MAX_HEAD_BYTES or len(self.headers or ()) > _MAX_HEADERS:
            self._refuse(431, InvalidRequest("The headers are too large.", code="invalid_http"))

    def _count_body(self, size: int) -> None:
        if self._deadline.ends_at == math.inf:
            self._start_period()
            if not self._received_bytes:  # the head is in this data
                size = self._body_bytes
        self._received_bytes += size
        if self._received_bytes > 2 * self._body_bytes + _MAX_FRAMING_BYTES:
            self._refuse(400, InvalidRequest("The body has too many small chunks or trailers.", code="invalid_http"))
        elif self.cycle.response_complete:
            self._discard_body()

    def _discard_body(self) -> None:
        """Read a body that the application has refused, up to a limit. Other connections have a turn between parts."""
        if self._body_bytes > _MAX_DISCARDED_BYTES:
            self._is_refused = True
            self.transport.close()
        else:
            self.flow.pause_reading()
            self.loop.call_soon(self.flow.resume_reading)

    def _start_period(self) -> None:
        self._period_bytes = self._received_bytes
        self._deadline.set(self._settings.body_timeout_seconds)

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._head_is_open = True
        self._head_bytes = 0
        self._host = None
        self._transfer_encoding = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_is_open:
            return  # a trailer: no part of the server reads it
        name = name.lower()
        if name in _CHECKED_HEADERS:
            self._check_header(name, value)
        self.headers.append((name, value))

    def _check_header(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            if self._host is not None:
                self._reject(400, "The request has more than one Host header.")
            self._host = value
        elif name == b"transfer-encoding":
            self._transfer_encoding = value if self._transfer_encoding is None else b","
        elif value.strip(b" \t").lower() == b"100-continue":  # the parser leaves spaces at the end
            self.expect_100_continue = True
        else:
            self._reject(417, "The Expect header must be 100-continue.")

    def on_headers_complete(self) -> None:
        parser = self.parser
        if not self._has_same_line:
            self._read_line()
        self._has_same_line = False  # a pipelined request may follow in the same data
        version = self._version
        self._check_head(version)
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI_VERSION,
            "http_version": version,
            "method": self._method,
            "scheme": self.scheme,
            "server": self.server,
            "client": self.client,
            "root_path": self.root_path,
            "headers": self.headers,
            "extensions": self._extensions,
        }
        self.scope = scope  # type: ignore[assignment]  # uvicorn has a type of its own
        is_upgrade = parser.should_upgrade()
        if is_upgrade and self._check_upgrade():  # the rest of the connection is not HTTP
            self._is_upgrade = True
            return
        if self.url != self._parsed_url:
            self._parse_url()
        scope["path"], scope["raw_path"], scope["query_string"] = self._target
        self._head_is_open = False
        self._body_is_open = True
        self._received_bytes = self._body_bytes = 0
        self._deadline.ends_at = math.inf
        if not self._is_authenticated and not self._limits.connections.has_keys:
            self.mark_authenticated()
        self.cycle = cycle = HttpCycle(
            scope,
            self.transport,
            self.flow,
            self.logger,
            self.on_response_complete,
            self.tasks,
            expect_100_continue=self.expect_100_continue,
            keep_alive=version == "1.1"
            and parser.should_keep_alive()
            and not is_upgrade
            and not self._limits.is_stopping,
        )
        if _is_incomplete(self._served):  # a pipelined request
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))
        else:
            self._served = cycle
            cycle.start(self.loop, self._run_app)

    def _read_line(self) -> None:
        method = self.parser.get_method()
        self._version, self._method = self.parser.get_http_version(), method.decode("ascii")
        self._line = b"%b %b HTTP/%b\r\n" % (method, self.url, self._version.encode())

    def _check_head(self, version: str) -> None:
        host = self._host
        if host is None:
            if version != "1.0":
                self._reject(400, "The request has no Host header.")
        elif host != self._valid_host and _HOST.fullmatch(host) is None:
            self._reject(400, "The Host header is not valid.")
        self._valid_host = host
        if version not in ("1.1", "1.0"):
            self._reject(505, "The server supports HTTP/1.1 and HTTP/1.0.")
        if self._transfer_encoding is not None:
            if version == "1.0":
                self._reject(400, "HTTP/1.0 does not have Transfer-Encoding.")
            if self._transfer_encoding.lower() != b"chunked":
                self._reject(501, "The only Transfer-Encoding is chunked.")
        if len(self.headers) > _MAX_HEADERS:
            self._reject(431, f"The request has more than {_MAX_HEADERS} headers.")
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._reject(400, f"More than {_MAX_PIPELINED} requests wait for the response before them.")

    def _check_upgrade(self) -> bool:
        """Return True if the request is a WebSocket handshake. Otherwise the offer to upgrade can be ignored."""
        # The parser does not read the body of a request that offers to upgrade.
        has_body = self._transfer_encoding is not None or any(
            name == b"content-length" and value.strip(b"0") for name, value in self.headers
        )
        if self._get_upgrade() != b"websocket":
            if has_body:
                self._reject(400, "The only upgrade is to WebSocket: send this request without an Upgrade header.")
            return False
        if self.scope["method"] != "GET" or self.scope["http_version"] != "1.1" or has_body:
            self._reject(400, "A WebSocket handshake must be a GET request of HTTP/1.1 without a body.")
        if _is_incomplete(self._served):
            self._reject(400, "A WebSocket handshake must not precede the response to an earlier request.")
        return True

    def _parse_url(self) -> None:
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        self._target = (urllib.parse.unquote(path) if "%" in path else path, url.path, url.query or b"")
        if url.host is None:
            self._parsed_url = self.url
        else:
            self._parsed_url = b""
            self._use_host_of_target(url)

    def _use_host_of_target(self, url: Any) -> None:
        """Replace the Host header by the host of an absolute target, as RFC 9112 requires."""
        host: bytes = b"[%b]" % url.host if b":" in url.host else url.host
        host = host if url.port is None else b"%b:%d" % (host, url.port)
        self.headers[:] = [header for header in self.headers if header[0] != b"host"]
        self.headers.append((b"host", host))

    def _reject(self, status: int, message: str) -> NoReturn:
        """Stop the parser and refuse the request."""
        self._rejection = (status, message)
        raise _RequestRejected

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.add_body(body)
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._body_is_open = False
        cycle = self.cycle
        if cycle.response_complete:  # a body that the application has refused unread
            if not cycle.keep_alive:
                self._is_refused = True
                self.transport.close()
                raise _RequestRejected  # a request that follows in the same data is not served
            self._deadline.set(self._settings.idle_timeout_seconds)
            return
        self._deadline.ends_at = math.inf
        cycle.more_body = False
        cycle.announce_message()

    # Responses

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, _ = self.pipeline.pop()
            assert isinstance(cycle, HttpCycle)
            self._served = cycle
            cycle.start(self.loop, self._run_app)
        elif self._late_error is not None:
            self._write_and_close(self._late_error)
        elif not self._head_is_open and not self._body_is_open:
            self._deadline.set(self._settings.idle_timeout_seconds)
        if self._body_is_open:  # the body of a pipelined request could not be read until now
            self._start_period()

    def _time_out(self) -> None:
        if self._head_is_open and _is_incomplete(self._served):  # the response to the request before is not complete
            self._deadline.set(self._settings.head_timeout_seconds)
        elif self._body_is_open and self._is_body_progressing():
            self._start_period()
        elif (self._head_is_open and self._head_bytes) or (self._body_is_open and _is_incomplete(self.cycle)):
            self._refuse(408, InvalidRequest("The request did not arrive in time.", code="invalid_http"))
        else:
            self.transport.close()

    def _is_body_progressing(self) -> bool:
        if self.pipeline or self.flow.read_paused:  # the server does not read the body yet
            return True
        return self._received_bytes - self._period_bytes >= self._limits.min_body_bytes

    def _refuse(self, status: int, error: AntiphonError) -> None:
        """Send an error and close the connection. Nothing more is read.

        A response is never sent within another one. The error is sent after the responses to earlier requests, and not
        at all if the request has a response already.
        """
        if self._is_refused:
            return
        self._is_refused = True
        body_was_open, self._body_is_open = self._body_is_open, False
        response = encode_error(status, error)
        if body_was_open and self.pipeline:
            self.pipeline.popleft()  # the refused request is the latest
            body_was_open = False
        if body_was_open and self.cycle.response_started:
            self.transport.close()
        elif not body_was_open and _is_incomplete(self._served):
            self._late_error = response
        else:
            self._write_and_close(response)

    def _write_and_close(self, response: bytes) -> None:
        self._deadline.stop()
        if not self.transport.is_closing():
            self.transport.write(response)
            self.transport.close()

    # Upgrade

    def handle_websocket_upgrade(self) -> None:
        # Imported at first use: many servers never open a WebSocket.
        from antiphon.server.websocket.uvicorn_protocol import WebSocketProtocol

        self.ws_protocol_class = WebSocketProtocol
        self._deadline.stop()
        super().handle_websocket_upgrade()
        successor = self.transport.get_protocol()
        assert isinstance(successor, WebSocketProtocol)
        if self._is_authenticated:
            successor.mark_authenticated()
        else:
            self._limits.connections.replace(self, successor)
        successor.check_handshake()
        self.parser = None  # type: ignore[assignment]  # as uvicorn does when a connection ends
        self._break_cycles()


def _is_incomplete(cycle: RequestResponseCycle | None) -> bool:
    return cycle is not None and not cycle.response_complete
