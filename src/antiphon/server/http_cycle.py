"""One request and its response on a uvicorn connection. A short response leaves in one write."""

from collections.abc import Sequence

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

Header = tuple[bytes, bytes]


class CountingFlow(FlowControl):
    """uvicorn's flow control of a connection, with the number of bytes written to it."""

    bytes_written = 0


class HttpCycle(RequestResponseCycle):
    """uvicorn's cycle with a `send` for this application.

    The head of a response waits for the first part of the body, so that both leave in one write: the application sends
    them one right after the other. Header names must be in lower case, and a content length must be right.
    """

    flow: CountingFlow
    _head = b""

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next part of the body. Unlike uvicorn's, a complete body is delivered after a disconnect too.

        The application may accept a background response although its client has gone.
        """
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.response_complete or (self.disconnected and (self.more_body or not self.body)):
            return {"type": "http.disconnect"}
        message: ASGIReceiveEvent = {"type": "http.request", "body": bytes(self.body), "more_body": self.more_body}
        self.body = bytearray()
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
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
