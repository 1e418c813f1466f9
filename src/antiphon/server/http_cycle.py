"""One request and its response on a uvicorn connection. A short response leaves in one write."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from antiphon.errors import AntiphonError, ServerError, Unavailable
from antiphon.server.error_response import encode_error_body

Header = tuple[bytes, bytes]
Application = Callable[[Any, Any, Any], Awaitable[None]]


class CountingFlow(FlowControl):
    """uvicorn's flow control of a connection, with the number of bytes written to it."""

    bytes_written = 0


class HttpCycle(RequestResponseCycle):
    """uvicorn's cycle with a `send` for this application.

    The head of a response waits for the first part of the body, so that both leave in one write: the application sends
    them one right after the other. Header names must be in lower case, and a content length must be right. The task of
    the request is in `tasks` until it ends.
    """

    flow: CountingFlow
    # The fields that uvicorn's class sets for each request, and that have the same value at the start of every request.
    disconnected = False
    more_body = True
    response_started = False
    response_complete = False
    chunked_encoding = None
    # The first part is not copied: most bodies have only one.
    body: bytes | bytearray = b""  # type: ignore[assignment]  # always a bytearray in uvicorn
    _has_message = False
    _event: asyncio.Event | None = None
    _head = b""

    def __init__(  # without uvicorn's, which takes four times as long
        self,
        scope: Any,
        transport: asyncio.Transport,
        flow: CountingFlow,
        logger: logging.Logger,
        on_response: Callable[[], None],
        tasks: "set[asyncio.Task[None]]",
        *,
        expect_100_continue: bool,
        keep_alive: bool,
    ) -> None:
        self.scope = scope
        self.transport = transport
        self.flow = flow
        self.logger = logger
        self.on_response = on_response
        self.waiting_for_100_continue = expect_100_continue
        self.keep_alive = keep_alive
        self._tasks = tasks

    @property
    def message_event(self) -> asyncio.Event:  # type: ignore[override]  # a field in uvicorn
        """The event that wakes `receive`. It is created at the first use: most bodies arrive before they are read."""
        if self._event is None:
            self._event = asyncio.Event()
        return self._event

    def start(self, loop: asyncio.AbstractEventLoop, app: Application) -> None:
        """Start the task of the request."""
        self._task = loop.create_task(self.run_asgi(app))
        self._tasks.add(self._task)

    async def run_asgi(self, app: Application) -> None:
        """Run the application. An error, or a response that is not complete, closes the connection."""
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:  # by a server that stops
            self._abort(Unavailable("The server is shutting down."))
        except BaseException as error:
            self._fail("The application failed.", error)
        else:
            if not self.response_complete and not self.disconnected:
                self._fail("The application returned without completing the response.")
        finally:
            # These refer to the connection, which refers to this request.
            self.on_response = _do_nothing
            self.scope = None  # type: ignore[assignment]  # nothing reads it any more
            # Here, and not in a callback of the task: a callback takes another iteration of the event loop.
            self._tasks.discard(self._task)

    def _fail(self, message: str, error: BaseException | None = None) -> None:
        self.logger.error(message, exc_info=error)
        self._abort(ServerError("The server had an error."))

    def _abort(self, error: AntiphonError) -> None:
        """Close the connection, with an error if no response has started."""
        if self.response_started or self.disconnected or self.scope["method"] == "HEAD":
            self.transport.close()
            return
        self.response_started, self.keep_alive = True, False
        self._head = encode_error(error.status, error)
        self._write(b"", more=False)

    def add_body(self, part: bytes) -> None:
        """Add a received part of the body."""
        if not self.body:
            self.body = part
            self.announce_message()
        else:
            if type(self.body) is bytes:
                self.body = bytearray(self.body)
            self.body += part

    def announce_message(self) -> None:
        """Wake `receive`."""
        self._has_message = True
        if self._event is not None:
            self._event.set()

    def take_body(self) -> bytes | None:
        """Return the body if all of it has arrived, and `receive` need not return it. Otherwise return None."""
        if self.more_body or not self.body or self.waiting_for_100_continue or self.response_complete:
            return None
        body, self.body = bytes(self.body), b""
        self._has_message = False
        self.flow.resume_reading()
        return body

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next part of the body. Unlike uvicorn's, a complete body is delivered after a disconnect too.

        The application may accept a background response although its client has gone.
        """
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            if not self._has_message:
                self.message_event.clear()
                await self.message_event.wait()
            self._has_message = False
        if self.response_complete or (self.disconnected and (self.more_body or not self.body)):
            return {"type": "http.disconnect"}
        message: ASGIReceiveEvent = {"type": "http.request", "body": bytes(self.body), "more_body": self.more_body}
        self.body = b""
        return message

    async def send(self, message: ASGISendEvent) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            if self.response_started:
                raise RuntimeError("The response has started already.")
            self.response_started = True
            self.waiting_for_100_continue = False
            self._head = self._encode_head(message["status"], list(message["headers"]))
        elif message["type"] == "http.response.body":
            if not self.response_started or self.response_complete:
                raise RuntimeError("The response has not started or is complete already.")
            self._write(message["body"], more=message["more_body"])
        else:
            raise RuntimeError(f"Unexpected ASGI message: {message['type']}.")

    def write_now(self, body: bytes) -> bool:
        """Write a part of a streamed body if that needs no waiting, and return True if it was written."""
        if (
            not self.chunked_encoding
            or self._head
            or not body
            or self.response_complete
            or self.disconnected
            or self.flow.write_paused
        ):
            return False
        self.flow.bytes_written += len(body)
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def respond_now(self, status: int, headers: Sequence[Header], body: bytes) -> bool:
        """Send a whole response if that needs no waiting, and return True if it was sent.

        The headers must have the length of the body, which is not empty, and no `connection`.
        """
        if self.response_started or self.disconnected or self.flow.write_paused or self.scope["method"] == "HEAD":
            return False
        fields = b"\r\n".join(map(b": ".join, headers))
        if fields.count(b"\n") != len(headers) - 1:
            raise RuntimeError("A header must not contain a line break.")
        self.response_started = True
        self.waiting_for_100_continue = False
        close = b"" if self.keep_alive else b"\r\nconnection: close"
        self._head = b"%b%b%b\r\n\r\n" % (STATUS_LINE[status], fields, close)
        self._write(body, more=False)
        return True

    def _encode_head(self, status: int, headers: Sequence[Header]) -> bytes:
        fields = b"".join([b"%b: %b\r\n" % header for header in headers])
        if fields.count(b"\n") != len(headers):
            raise RuntimeError("A header must not contain a line break.")
        if CLOSE_HEADER in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            fields += b"connection: close\r\n"
        has_body = self.scope["method"] != "HEAD" and status not in (204, 304)
        # In HTTP/1.0 the end of the connection is the end of the body.
        if b"content-length: " not in fields and has_body and self.scope["http_version"] != "1.0":
            self.chunked_encoding = True
            fields += b"transfer-encoding: chunked\r\n"
        return b"%b%b\r\n" % (STATUS_LINE[status], fields)

    def _write(self, body: bytes, *, more: bool) -> None:
        data, self._head = self._head, b""
        if self.chunked_encoding:
            if body:
                data += b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                data += b"0\r\n\r\n"
        elif self.scope["method"] != "HEAD":
            data += body
        if data:
            self.flow.bytes_written += len(data)
            self.transport.write(data)
        if not more:
            self.response_complete = True
            self.announce_message()
            if not self.keep_alive:
                if self.more_body:
                    # The protocol discards the rest of the body. Closing now would reset the connection, and the client
                    # could lose the response.
                    self.transport.write_eof()
                else:
                    self.transport.close()
            self.on_response()


def _do_nothing() -> None:
    pass


def encode_error(status: int, error: AntiphonError) -> bytes:
    """Return an error as a whole response, after which the connection closes."""
    body = encode_error_body(error)
    retry_after = b"" if error.retry_after is None else b"retry-after: %d\r\n" % math.ceil(error.retry_after)
    head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
    return head % (STATUS_LINE[status], len(body), retry_after) + body
