"""One connection to a server: sends a request at a time and parses the response."""

import asyncio
import math
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from antiphon.upstream.http1.errors import (
    DeadlineExceeded,
    Disconnected,
    HttpError,
    IdleTimeout,
    IncompleteBody,
    InvalidResponse,
)

MAX_HEAD_SIZE = 64 * 1024
"""Limit for the head of a response, together with the interim (1xx) responses before it."""

MAX_FRAMING_SIZE = 64 * 1024
"""Limit for the bytes between two parts of a body that are not body: chunk extensions and trailers."""

MAX_BUFFER_SIZE = 128 * 1024
"""No more is read from the socket while this many bytes of a body wait for their reader."""

# Larger bodies are not copied to write them together with the head.
_MAX_JOINED_BODY = 64 * 1024


class Owner(Protocol):
    """The pool of a connection."""

    def put(self, connection: "Connection") -> None:
        """Take a connection whose response was read completely."""

    def forget(self, connection: "Connection") -> None:
        """Drop a connection that is closed."""


class Connection(asyncio.Protocol):
    """A connection and the response that is being received on it.

    After `send`, call `wait` until `has_head` is true, then `take` and `wait` for the body, then `release`. One timer
    per connection watches all waits. It is set again only when it is due, or when a wait ends before it is due.
    """

    __slots__ = (
        "_buffered",
        "_chunks",
        "_error",
        "_expires",
        "_framing_size",
        "_is_draining",
        "_is_head_request",
        "_is_in_use",
        "_is_paused",
        "_is_reusable",
        "_owner",
        "_parser",
        "_timer",
        "_timer_due",
        "_transport",
        "_unread_limit",
        "_waiter",
        "deadline",
        "has_head",
        "headers",
        "idle_timeout",
        "is_complete",
        "loop",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Owner) -> None:
        self.loop = loop
        self._owner = owner
        self._parser = HttpResponseParser(self)
        # Some servers pad the sizes of chunks. This does not make the end of a chunk ambiguous.
        self._parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf
        self._expires = math.inf
        self._waiter: asyncio.Future[None] | None = None
        # The class of the error, not an object: its traceback would refer to this connection.
        self._error: type[HttpError] | None = None
        self._is_in_use = self._is_paused = self._is_draining = self._is_reusable = False
        self._is_head_request = False
        self._unread_limit = 0
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = self.is_complete = False
        self.deadline = self.idle_timeout = math.inf
        self._chunks: list[bytes] = []
        self._buffered = self._framing_size = 0

    # Requests

    def send(self, head: bytes, body: bytes | None, *, deadline: float, is_head_request: bool = False) -> None:
        """Send a request. Waits for its response end at `deadline`, a time of the loop."""
        self._reset()
        self.deadline = deadline
        self._is_in_use = True
        self._is_head_request = is_head_request
        transport = self._transport
        if transport is None or transport.is_closing():
            self._fail(Disconnected)
        elif not body:
            transport.write(head)
        elif len(body) <= _MAX_JOINED_BODY:
            transport.write(head + body)
        else:
            # The transport buffers the rest that the socket does not take at once. An early response is read meanwhile.
            transport.write(head)
            transport.write(body)

    # Responses

    def wait(self) -> "asyncio.Future[None]":
        """Return a future that is done when the head, a part of the body, its end or an error has arrived."""
        self._waiter = waiter = self.loop.create_future()
        now = self.loop.time()
        if self._error is not None:
            self._wake()
        elif now >= self.deadline:
            # The timer alone would miss a deadline if new bytes ended each wait before the timer ran.
            self._fail(DeadlineExceeded)
        else:
            self._expires = expires = min(self.deadline, now + self.idle_timeout)
            if expires < self._timer_due:
                self._set_timer(expires)
        return waiter

    def check_head(self) -> bool:
        """Return True if the head has arrived. Raises if it cannot arrive any more."""
        if not self.has_head and self._error is not None:
            raise self._error
        return self.has_head

    def take(self) -> bytes | None:
        """Return the part of the body that has arrived, b"" at its end, or None if there is nothing yet.

        Raises if the body cannot be completed. The part of it that has arrived is returned first.
        """
        chunks = self._chunks
        if chunks:
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            chunks.clear()
            self._buffered = 0
            if self._is_paused:
                self._resume()
            return data
        if self.is_complete:
            return b""
        if self._error is not None:
            raise self._error
        return None

    @property
    def is_exhausted(self) -> bool:
        """True if the response is complete and its body was taken."""
        return self.is_complete and not self._chunks

    @property
    def has_received_nothing(self) -> bool:
        """True if no byte has arrived since the request was sent."""
        return not self.has_head and not self._framing_size

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def release(self) -> None:
        """Return the connection to the pool after a complete response. Else close it."""
        transport = self._transport
        self._is_draining = False
        if (
            self.is_complete
            and self._is_reusable
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # else the response came before the end of the request
        ):
            self._is_in_use = False
            self._chunks.clear()
            if self._is_paused:
                self._resume()
            self._owner.put(self)
        else:
            self.abort()

    def drain(self, seconds: float, limit: int) -> None:
        """Release the connection once the rest of the body has arrived. Close it if that is too long or too late."""
        if self.is_complete:
            self.release()
            return
        self._is_draining = True
        self._unread_limit = limit
        self._chunks.clear()
        self._buffered = 0
        if self._is_paused:
            self._resume()
        self._expires = self.deadline = self.loop.time() + seconds
        if self._expires < self._timer_due:
            self._set_timer(self._expires)

    def abort(self) -> None:
        """Close the connection at once. A read that waits fails."""
        self._is_reusable = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_due = None, math.inf
        if self._transport is not None:
            self._transport.abort()
        self._owner.forget(self)

    def _fail(self, error: type[HttpError]) -> None:
        if self._error is None:
            self._error = error
        self.abort()
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _pause(self) -> None:
        if not self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        self._is_paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # Timer

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self.loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_due = None, math.inf
        if (self._waiter is None or self._waiter.done()) and not self._is_draining:
            return  # the next wait sets the timer again
        now = self.loop.time()
        if now < self._expires:
            self._set_timer(self._expires)
        else:
            self._fail(DeadlineExceeded if now >= self.deadline else IdleTimeout)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_in_use or self._error is not None:
            self.abort()  # bytes without a request, or after an error
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self._on_invalid_data()
        if self._buffered > MAX_BUFFER_SIZE:
            self._pause()
        elif not self._buffered and not self.is_complete:
            self._framing_size += len(data)
            if self._framing_size > (MAX_FRAMING_SIZE if self.has_head else MAX_HEAD_SIZE):
                self._on_invalid_data()
        if self._is_draining and self.is_complete:
            self.release()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._is_reusable = False
        if not self.is_complete and self._is_in_use:
            if error is None and self.has_head and self._error is None and self._ends_with_connection():
                self.is_complete = True
            elif self._error is None:
                self._error = IncompleteBody if self.has_head else Disconnected
        self.abort()
        self._wake()
        del self._parser  # it refers to this connection

    def _ends_with_connection(self) -> bool:
        """Return True if neither a length nor chunks tell where the body ends."""
        return not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def _on_invalid_data(self) -> None:
        if self.is_complete:
            self._is_reusable = False  # bytes after the end of the response
        else:
            self._fail(IncompleteBody if self.has_head else InvalidResponse)

    # httptools. An exception in these methods makes `feed_data` raise an HttpParserError.

    def on_message_begin(self) -> None:
        if self.is_complete:
            self._is_reusable = False  # a second response to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_head:
            return  # a trailer
        # The parser rejects a length together with an encoding. It passes on encodings that it does not decode.
        if len(name) == 17 and name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise ValueError("unknown transfer encoding")
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.has_head:
            return
        status = self._parser.get_status_code()
        if status < 200:
            if status < 100:
                raise ValueError("invalid status")
            self.headers.clear()  # an interim response; the final one follows
            return
        self.status = status
        self.has_head = True
        self._framing_size = 0
        if self._is_head_request:
            self.is_complete = True  # the parser waits for a body, so the connection is not reused
            self._is_reusable = False
        self._wake()

    def on_body(self, data: bytes) -> None:
        if self.is_complete:
            return
        self._framing_size = 0
        if self._is_draining:
            self._unread_limit -= len(data)
            if self._unread_limit < 0:
                self.abort()
            return
        self._chunks.append(data)
        self._buffered += len(data)
        if self._waiter is not None:
            self._wake()

    def on_message_complete(self) -> None:
        if self.is_complete or not self.has_head:
            return
        self.is_complete = True
        self._is_reusable = self._parser.should_keep_alive()
        self._wake()
