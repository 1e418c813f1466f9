"""One HTTP request over plain ASGI, and its response."""

import asyncio
import math
import string
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from antiphon.engine.respond.ids import random_hex
from antiphon.errors import AntiphonError
from antiphon.offload import is_large, run_in_thread
from antiphon.protocol import codec
from antiphon.server.body_budget import BodyBudget, BodyDropped, BodyShare
from antiphon.server.error_response import encode_error_body
from antiphon.server.response_body import SharedBody

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from antiphon.server.auth import Grant
    from antiphon.server.limits.limiter import Permit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
WatchDisconnect = Callable[[Callable[[], None] | None], bool]
SendWhole = Callable[[int, list[tuple[bytes, bytes]], bytes], bool]

_JSON = (b"content-type", b"application/json")
_EVENT_STREAM = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_ID_CHARACTERS = (string.ascii_letters + string.digits + "-_.:/+=").encode()
_MAX_ID_LENGTH = 128
_MAX_WARNING_LENGTH = 1024
_ELLIPSIS = b" ..."
_STEP_BYTES = 256 * 1024

WATCH_DISCONNECT = "antiphon.watch_disconnect"
"""An ASGI extension: its `watch` sets the function to call when the client disconnects, or removes it if it is None.

It returns False if the client has disconnected already.
"""

READ_BODY = "antiphon.read_body"
"""An ASGI extension: its `take` returns the whole body once if it has arrived, or else None."""

WRITE_BODY = "antiphon.write_body"
"""An ASGI extension: its `write` sends a part of the body if that needs no waiting, and returns True if it sent it.

Its `respond`, which may be missing, sends a status, headers and a whole body in the same way. Its `count_unread`
returns the number of bytes that the server or its kernel holds because the client has not read them.
"""

MARK_AUTHENTICATED = "antiphon.mark_authenticated"
"""An ASGI extension: its `mark` exempts the connection from the limits for unauthenticated ones."""


# Size of a write of a large body.
PART_BYTES = 64 * 1024

LARGE_STREAM_BYTES = 1024 * 1024
"""After this number of bytes, the events of a stream are sent one by one, each when the last one has been read."""


class ClientDisconnected(Exception):
    """The client disconnected before its response was complete."""


class HttpRequest:
    """A request, and the means to respond to it once.

    `respond` sends a whole response. `write` and `finish` send an event stream in parts. The fields below `id` are
    filled in while the request is served; the access log reads them. `span` is set only if traces are on.
    """

    __slots__ = (
        "_extensions",
        "_keepalive_task",
        "_send",
        "_send_whole",
        "_take_body",
        "_write_body",
        "_writing",
        "body_budget",
        "body_share",
        "bytes_sent",
        "error_code",
        "extra_headers",
        "grant",
        "headers",
        "id",
        "mark_authenticated",
        "method",
        "model",
        "path",
        "path_params",
        "permit",
        "project",
        "query",
        "raw_path",
        "receive",
        "response_id",
        "route_path",
        "span",
        "started_at",
        "status",
        "stream",
        "warnings",
        "watch_disconnect",
    )

    span: "Span | None"

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, body_budget: BodyBudget | None = None) -> None:
        self.started_at = time.perf_counter()
        self.body_budget = body_budget
        self.body_share: BodyShare | None = None  # only of a large body
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_path: bytes | None = scope.get("raw_path")
        self.query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.receive = receive
        self._extensions = extensions = scope.get("extensions") or {}
        extension = extensions.get(WATCH_DISCONNECT)
        self.watch_disconnect: WatchDisconnect | None = None if extension is None else extension["watch"]
        extension = extensions.get(WRITE_BODY)
        self._write_body: Callable[[bytes], bool] | None = None if extension is None else extension["write"]
        self._send_whole: SendWhole | None = None if extension is None else extension.get("respond")
        extension = extensions.get(READ_BODY)
        self._take_body: Callable[[], bytes | None] | None = None if extension is None else extension["take"]
        extension = extensions.get(MARK_AUTHENTICATED)
        self.mark_authenticated: Callable[[], None] | None = None if extension is None else extension["mark"]
        self._send = send
        self.id = _find_client_id(self.headers) or f"req_{random_hex()}"
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.path_params: tuple[str, ...] = ()
        self.route_path = ""  # until a route is found
        self.project = ""  # until the request is authenticated
        self.grant: Grant | None = None
        self.permit: Permit | None = None  # only if there are limits
        self.model: str | None = None
        self.response_id: str | None = None
        self.stream = False
        self.warnings: list[str] = []
        self.error_code: str | None = None
        self.status = 0
        self.bytes_sent = 0
        self._writing = False
        self._keepalive_task: asyncio.Task[None] | None = None

    @property
    def path_param(self) -> str:
        """The first path parameter."""
        return self.path_params[0]

    @property
    def key_id(self) -> str:
        """The id of the API key, or an empty text."""
        return "" if self.grant is None else self.grant.key_id

    @property
    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started_at) * 1000

    def release(self) -> None:
        """Release the share of the body and the permit of the request."""
        self.release_body()
        if self.permit is not None:
            self.permit.release()

    def release_body(self) -> None:
        """Return the share of the budget that the body takes."""
        if self.body_share is not None:
            self.body_share.close()
            self.body_share = None

    def warn_ignored(self, names: Sequence[str]) -> None:
        """Add a warning that these fields or parameters were ignored."""
        if names:
            self.warnings.append(f"ignored: {', '.join(names)}")

    def describe_response(self, model: str, response_id: str, warnings: Sequence[str]) -> None:
        """Set the fields of the log and the headers that are known when a response begins."""
        self.model = model
        self.response_id = response_id
        self.warnings += warnings

    def add_served_by(self, served_by: str | None) -> None:
        """Add the header that names the backend and the model. Model names may contain non-ASCII characters."""
        if served_by is not None:
            self.extra_headers.append((b"x-antiphon-served-by", served_by.encode("unicode_escape")))

    def take_body(self) -> bytes | None:
        """Return the whole body if it has arrived, or None if `receive` must be called for it."""
        return None if self._take_body is None else self._take_body()

    def respond_with(self, value: Any) -> Awaitable[None]:
        """Respond with status 200 and a value encoded as JSON."""
        return self._respond_large(value) if is_large() else self.respond(200, codec.encode(value))

    def respond_now(self, body: bytes) -> bool:
        """Respond with status 200 and a JSON body if that needs no waiting, and return True if it was sent."""
        if self._send_whole is None or self.body_share is not None or len(body) > _STEP_BYTES:
            return False
        headers = self._make_headers()
        headers += (_JSON, (b"content-length", b"%d" % len(body)))
        if not self._send_whole(200, headers, body):
            return False
        self.status = 200
        self.bytes_sent = len(body)
        return True

    async def _respond_large(self, value: Any) -> None:
        body = await run_in_thread(codec.encode, value)
        del value  # not held while the client reads
        await self.respond(200, body)

    async def respond_error(
        self, error: AntiphonError, *, status: int | None = None, body: bytes | None = None
    ) -> None:
        """Respond with an error, in the standard error body unless another one is given."""
        self.error_code = error.code or error.type
        if error.retry_after is not None:
            self.extra_headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after)))
        await self.respond(status or error.status, body or encode_error_body(error))

    async def respond(self, status: int, body: bytes) -> None:
        """Respond with a JSON body, or without one if `body` is empty."""
        headers = self._make_headers()
        if body:
            headers += (_JSON, (b"content-length", b"%d" % len(body)))
        # The response to HEAD states the length of the body that GET would get.
        if self.method == "HEAD":
            body = b""
        if len(body) > _STEP_BYTES:
            self._count_response(len(body))
        await self._start(status, headers)
        is_small = self.body_share is None and len(body) <= _STEP_BYTES
        await (self._send_body if is_small else self._send_large)(body, more=False)

    def _count_response(self, size: int) -> None:
        """Count a large response in the budget for bodies. Raises Unavailable if it can be requested again later."""
        budget = self.body_budget
        if budget is None:
            return
        if self.body_share is None:
            self.body_share = budget.open(project=self.project)
        # The other methods have had their effect. A body that is larger than the budget is sent if it is the only one.
        is_required = self.method != "GET" or not budget.used
        if not self.body_share.resize(self.body_share.size + size, is_required=is_required):
            raise budget.make_error()

    async def respond_text(self, text: bytes, content_type: bytes) -> None:
        """Respond with status 200 and a text."""
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(text))]
        await self._start(200, self._make_headers() + headers)
        await self._send_large(b"" if self.method == "HEAD" else text, more=False)

    async def respond_in_parts(self, body: SharedBody) -> None:
        """Respond with status 200 and a large JSON body, in parts that wait for the client to read."""
        size = len(body.data)
        headers = [*self._make_headers(), _JSON, (b"content-length", b"%d" % size)]
        if self.method == "HEAD":
            await self._start(200, headers)
            await self._send_body(b"", more=False)
            return
        try:
            with body.sending(self.body_budget or BodyBudget(size), self.project, self._count_read):
                await self._start(200, headers)
                for start in range(0, size, PART_BYTES):
                    await self._send_body(body.data[start : start + PART_BYTES], more=start + PART_BYTES < size)
        except BodyDropped:
            raise ClientDisconnected from None

    async def respond_file(self, size: int, parts: AsyncIterator[bytes], *, filename: str) -> None:
        """Respond with status 200 and the content of a file, in parts that wait for the client to read."""
        headers = [
            *self._make_headers(),
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % size),
            (b"content-disposition", f"attachment; filename*=UTF-8''{quote(filename, safe='')}".encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        if self.method == "HEAD":
            await self._start(200, headers)
            await self._send_body(b"", more=False)
            return
        # The head is sent with the first part: a content that cannot be read is an error response.
        remaining = size
        async for part in parts:
            if not self.status:
                await self._start(200, headers)
            remaining -= len(part)
            await self._send_body(part, more=remaining > 0)
        if not self.status:
            await self._start(200, headers)
            await self._send_body(b"", more=False)

    async def write(self, chunk: bytes) -> None:
        """Send a part of an event stream in one write to the socket. Wait while the client reads slowly."""
        if self._keepalive_task is not None:
            await self._keepalive_task
        if not self.status:
            await self._start(200, [*self._make_headers(), *_EVENT_STREAM])
        self._writing = True
        is_small = self.body_share is None and len(chunk) <= _STEP_BYTES
        await (self._send_body if is_small else self._send_large)(chunk, more=True)
        self._writing = False

    def write_now(self, chunk: bytes) -> bool:
        """Send a part of an event stream if that needs no waiting, and return True if it was sent.

        This is the usual case, and an await that does not wait costs more than the write itself.
        """
        if self._write_body is None or self._keepalive_task is not None or len(chunk) > _STEP_BYTES:
            return False
        if not self._write_body(chunk):
            return False
        self.bytes_sent += len(chunk)
        return True

    def call_at_next_write(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the next part of a stream that has begun is passed to `write_now`.

        Later parts cost nothing extra. Without the extension that `write_now` needs, the callback is not called.
        """
        write_body = self._write_body
        if write_body is None:
            return

        def write_first(chunk: bytes) -> bool:
            if self.status:
                self._write_body = write_body
                callback()
            return write_body(chunk)

        self._write_body = write_first

    async def wait_until_writable(self) -> None:
        """Wait while data of an event stream waits for the client to read."""
        await self.write(b"")

    async def finish(self, chunk: bytes) -> None:
        """Send the last part of an event stream."""
        if self._keepalive_task is not None:
            await self._keepalive_task
        if not self.status:
            await self._start(200, [*self._make_headers(), *_EVENT_STREAM])
        is_small = self.body_share is None and len(chunk) <= _STEP_BYTES
        await (self._send_body if is_small else self._send_large)(chunk, more=False)

    @property
    def is_writing(self) -> bool:
        """True while a part of the stream waits for the client to read."""
        return self._writing or self._keepalive_task is not None

    def send_keepalive(self, payload: bytes) -> None:
        """Send an encoded keepalive without waiting for it. The next `write` waits."""
        self._keepalive_task = asyncio.get_running_loop().create_task(self._send_keepalive(payload))

    async def _send_keepalive(self, chunk: bytes) -> None:
        try:
            await self._send_body(chunk, more=True)
        finally:
            self._keepalive_task = None

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> Awaitable[None]:
        self.status = status
        return self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _send_body(self, chunk: bytes, *, more: bool) -> Awaitable[None]:
        self.bytes_sent += len(chunk)
        return self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    def _send_large(self, chunk: bytes, *, more: bool) -> Awaitable[None]:
        """Send a large part of the body, or any part if the request was large."""
        if self.body_share is not None:
            return self._send_droppable(self.body_share, chunk, more=more)
        return self._send_in_steps(chunk, more=more)

    async def _send_droppable(self, share: BodyShare, chunk: bytes, *, more: bool) -> None:
        """Send the response to a large request. If the client reads slowly, others may need the memory."""
        try:
            with share.sending(self._count_read):
                await self._send_in_steps(chunk, more=more)
        except BodyDropped:
            raise ClientDisconnected from None

    async def _send_in_steps(self, chunk: bytes, *, more: bool) -> None:
        """Send a large part of the body in steps.

        The socket takes a part in one call, which blocks for long if the part is large.
        """
        for start in range(0, len(chunk) or 1, _STEP_BYTES):
            end = start + _STEP_BYTES
            await self._send_body(chunk[start:end], more=more or end < len(chunk))

    def _count_read(self) -> int:
        """Return the number of bytes of the response that the client has read."""
        extension = self._extensions.get(WRITE_BODY)
        return self.bytes_sent - (0 if extension is None else extension["count_unread"]())

    def _make_headers(self) -> list[tuple[bytes, bytes]]:
        headers = [
            (b"x-request-id", self.id.encode()),
            (b"openai-processing-ms", b"%d" % self.elapsed_ms),
            *self.extra_headers,
        ]
        if self.warnings:
            # Warnings repeat names that the client chose: characters outside ASCII are escaped.
            text = "; ".join(self.warnings)[: _MAX_WARNING_LENGTH + 1].encode("unicode_escape")
            if len(text) > _MAX_WARNING_LENGTH:
                text = text[: _MAX_WARNING_LENGTH - len(_ELLIPSIS)] + _ELLIPSIS
            headers.append((b"x-antiphon-warnings", text))
        return headers


def _find_client_id(headers: dict[bytes, bytes]) -> str | None:
    """Return the client's request id, or None if it cannot go into a header and a log line unchanged."""
    sent = headers.get(b"x-client-request-id") or headers.get(b"x-request-id")
    if not sent or len(sent) > _MAX_ID_LENGTH or sent.translate(None, _ID_CHARACTERS):
        return None
    return sent.decode()
