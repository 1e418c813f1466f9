"""One HTTP request over plain ASGI: its response, its body within limits, and a watch for the client's disconnect."""

import asyncio
import math
import string
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from antiphon.engine.respond.ids import random_hex
from antiphon.errors import AntiphonError, BodyTooLarge, InvalidRequest
from antiphon.offload import is_large, run_in_thread
from antiphon.protocol import codec
from antiphon.server.body_budget import FREE_BYTES, BodyBudget, BodyDropped, BodyShare
from antiphon.server.error_response import encode_error_body
from antiphon.server.response_body import SharedBody

if TYPE_CHECKING:
    from antiphon.server.auth import Grant
    from antiphon.server.limits.limiter import Permit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
WatchDisconnect = Callable[[Callable[[], None] | None], bool]

_JSON = (b"content-type", b"application/json")
_EVENT_STREAM = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_NOT_JSON = (b"application/x-www-form-urlencoded", b"multipart/")
_ID_CHARACTERS = (string.ascii_letters + string.digits + "-_.:/+=").encode()
_MAX_ID_LENGTH = 128
_MAX_WARNING_LENGTH = 1024
_ELLIPSIS = b" ..."
_MAX_LENGTH_DIGITS = 18
_WATCH_DELAY_SECONDS = 0.01
_STEP_BYTES = 256 * 1024

WATCH_DISCONNECT = "antiphon.watch_disconnect"
"""An ASGI extension: its `watch` sets the function to call when the client disconnects, or removes it if it is None.

It returns False if the client has disconnected already.
"""

WRITE_BODY = "antiphon.write_body"
"""An ASGI extension: its `write` sends a part of the body if that needs no waiting, and returns True if it sent it."""

MARK_AUTHENTICATED = "antiphon.mark_authenticated"
"""An ASGI extension: its `mark` exempts the connection from the limits for unauthenticated ones."""


# Size of a write of a large body.
PART_BYTES = 64 * 1024

LARGE_STREAM_BYTES = 1024 * 1024
"""Events after so many bytes of a stream are sent one by one, each when the client has read the one before."""


class ClientDisconnected(Exception):
    """The client disconnected before its response was complete."""


class HttpRequest:
    """A request, and the means to respond to it once.

    `respond` sends a whole response. `write` and `finish` send an event stream in parts. The fields below `id` are
    filled in while the request is served; the access log reads them.
    """

    __slots__ = (
        "_keepalive_task",
        "_send",
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
        "started_at",
        "status",
        "stream",
        "warnings",
        "watch_disconnect",
    )

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
        extensions = scope.get("extensions") or {}
        extension = extensions.get(WATCH_DISCONNECT)
        self.watch_disconnect: WatchDisconnect | None = None if extension is None else extension["watch"]
        extension = extensions.get(WRITE_BODY)
        self._write_body: Callable[[bytes], bool] | None = None if extension is None else extension["write"]
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
        """Return the share of the budget that the body takes. The request has been answered."""
        if self.body_share is not None:
            self.body_share.close()
            self.body_share = None

    def warn_ignored(self, names: Sequence[str]) -> None:
        """Add a warning that these fields or parameters were ignored."""
        if names:
            self.warnings.append(f"ignored: {', '.join(names)}")

    def add_served_by(self, served_by: str | None) -> None:
        """Add the header that names the backend and the model. Model names may contain non-ASCII characters."""
        if served_by is not None:
            self.extra_headers.append((b"x-antiphon-served-by", served_by.encode("unicode_escape")))

    def respond_with(self, value: Any) -> Awaitable[None]:
        """Respond with status 200 and a value encoded as JSON."""
        return self._respond_large(value) if is_large() else self.respond(200, codec.encode(value))

    async def _respond_large(self, value: Any) -> None:
        await self.respond(200, await run_in_thread(codec.encode, value))

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
        await self._start(status, headers)
        # The response to HEAD states the length of the body that GET would get.
        if self.method == "HEAD":
            body = b""
        is_small = self.body_share is None and len(body) <= _STEP_BYTES
        await (self._send_body if is_small else self._send_large)(body, more=False)

    async def respond_text(self, text: bytes, content_type: bytes) -> None:
        """Respond with status 200 and a text."""
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(text))]
        await self._start(200, self._make_headers() + headers)
        await self._send_large(b"" if self.method == "HEAD" else text, more=False)

    async def respond_in_parts(self, body: SharedBody) -> None:
        """Respond with status 200 and a large JSON body, in parts that wait for the client to read."""
        size = len(body.data)
        await self._start(200, [*self._make_headers(), _JSON, (b"content-length", b"%d" % size)])
        if self.method == "HEAD":
            await self._send_body(b"", more=False)
            return
        for start in range(0, size, PART_BYTES):
            await self._send_body(body.data[start : start + PART_BYTES], more=start + PART_BYTES < size)

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

        Parts after it cost nothing more. Without the extension that `write_now` needs, the callback is not called.
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
            with share.sending(lambda: self.bytes_sent):
                await self._send_in_steps(chunk, more=more)
        except BodyDropped:
            raise ClientDisconnected from None

    async def _send_in_steps(self, chunk: bytes, *, more: bool) -> None:
        """Send a large part of the body in steps. The socket takes a part at once, which is long for a large one."""
        for start in range(0, len(chunk) or 1, _STEP_BYTES):
            end = start + _STEP_BYTES
            await self._send_body(chunk[start:end], more=more or end < len(chunk))

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


class DisconnectWatch:
    """A context manager that cancels its block when the client disconnects, and then raises ClientDisconnected.

    The body must have been read before. Cancelling is the only way to stop a generator that waits for its model.

    uvicorn's connection calls the watch. Other ASGI servers report a disconnect only to `receive`, so a task receives
    all further messages. Most responses that need no model are complete within a few milliseconds, so the task starts
    only after a short delay.
    """

    __slots__ = ("_disconnected", "_http_request", "_loop", "_owner", "_receiver", "_timer")

    def __init__(self, http_request: HttpRequest) -> None:
        self._http_request = http_request
        self._disconnected = False

    def __enter__(self) -> None:
        owner = asyncio.current_task()
        assert owner is not None, "a disconnect watch needs a task that it can cancel"
        self._owner = owner
        if self._http_request.watch_disconnect is not None:
            if not self._http_request.watch_disconnect(self._cancel):
                raise ClientDisconnected
        else:
            self._loop = asyncio.get_running_loop()
            self._receiver: asyncio.Task[None] | None = None
            self._timer = self._loop.call_later(_WATCH_DELAY_SECONDS, self._start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._http_request.watch_disconnect is not None:
            self._http_request.watch_disconnect(None)
        else:
            self._timer.cancel()
            if self._receiver is not None:
                self._receiver.cancel()
        if self._disconnected:
            self._owner.uncancel()
            raise ClientDisconnected from None

    def _start(self) -> None:
        self._receiver = self._loop.create_task(self._receive())

    async def _receive(self) -> None:
        while (await self._http_request.receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _cancel(self) -> None:
        self._disconnected = True
        self._owner.cancel()


async def read_body(http_request: HttpRequest, limit: int) -> bytes:
    """Return the whole body.

    Raises BodyTooLarge as soon as the declared or the received length exceeds the limit, and Unavailable if the budget
    for bodies is exhausted. A large body takes its share of the budget until `HttpRequest.release_body`.
    """
    declared = _check_headers(http_request.headers, limit)
    budget = http_request.body_budget
    if budget is not None and declared > FREE_BYTES:  # smaller ones always fit
        budget.check(declared)
    first, more = read_message(await http_request.receive())
    if len(first) > limit:
        raise _too_large(limit)
    return (
        await _read_rest(http_request, bytearray(first), limit, more=more) if more or len(first) > FREE_BYTES else first
    )


async def _read_rest(http_request: HttpRequest, whole: bytearray, limit: int, *, more: bool) -> bytes:
    task = asyncio.current_task()
    assert task is not None
    budget = http_request.body_budget or BodyBudget(limit)
    share = http_request.body_share = budget.open(task.cancel)
    try:
        while True:
            if not share.resize(len(whole)):
                raise budget.make_error()
            if not more:
                break
            body, more = read_message(await http_request.receive())
            if len(whole) + len(body) > limit:
                raise _too_large(limit)
            whole += body
    except BaseException as error:
        http_request.release_body()
        if not isinstance(error, asyncio.CancelledError) or not share.dropped:
            raise
        task.uncancel()
        raise budget.make_error() from None
    share.hold()
    if not share.counted:  # a small body that arrived in parts
        http_request.release_body()
    return bytes(whole)


def read_message(message: Mapping[str, Any]) -> tuple[bytes, bool]:
    """Return a part of the body, and True if more follows. Raises ClientDisconnected."""
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return message.get("body", b""), message.get("more_body", False)


def _check_headers(headers: dict[bytes, bytes], limit: int) -> int:
    """Refuse forms, compressed and too large bodies. Return the declared length, or 0 if there is none.

    Other content types are accepted: clients send JSON with a wrong type.
    """
    if headers.get(b"content-type", b"").lower().startswith(_NOT_JSON):
        raise InvalidRequest(
            "The body must be JSON: send 'Content-Type: application/json'.", code="invalid_content_type"
        )
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise InvalidRequest(
            "The body must not be compressed: send no Content-Encoding.", code="invalid_content_encoding"
        )
    length = headers.get(b"content-length", b"0")
    if not length.isdigit():
        raise InvalidRequest("The header Content-Length must be a number.", code="invalid_header")
    # Python does not convert numbers of any length.
    if len(length) > _MAX_LENGTH_DIGITS or int(length) > limit:
        raise _too_large(limit)
    return int(length)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is too large: this server accepts at most {limit} bytes.")


def _find_client_id(headers: dict[bytes, bytes]) -> str | None:
    """Return the client's request id, or None if it cannot go into a header and a log line unchanged."""
    sent = headers.get(b"x-client-request-id") or headers.get(b"x-request-id")
    if not sent or len(sent) > _MAX_ID_LENGTH or sent.translate(None, _ID_CHARACTERS):
        return None
    return sent.decode()
