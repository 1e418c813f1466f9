"""One request and its answer, over plain ASGI, and what the access log will say of them."""

import asyncio
import math
import string
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from types import TracebackType
from typing import Any

from antiphon.engine.respond.ids import random_hex
from antiphon.errors import AntiphonError, BodyTooLarge, InvalidRequest
from antiphon.protocol import codec
from antiphon.server.error_response import describe
from antiphon.server.keepalive import encode_beat

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_JSON = (b"content-type", b"application/json")
_EVENT_STREAM = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_ID_CHARACTERS = (string.ascii_letters + string.digits + "-_.:/+=").encode()
_LONGEST_ID = 128
_LONGEST_WARNING = 1024
_CUT = b" ..."


class ClientGone(Exception):
    """The client went away: there is nobody left to answer."""


class Exchange:
    """What came in, and a way to answer it once: whole with `answer`, or piece by piece with `write` and `finish`."""

    __slots__ = (
        "_beat",
        "_send",
        "_writing",
        "began",
        "error_code",
        "extra_headers",
        "headers",
        "id",
        "method",
        "model",
        "params",
        "path",
        "project",
        "query",
        "raw_path",
        "receive",
        "response_id",
        "sent",
        "status",
        "stream",
        "warnings",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began = time.perf_counter()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_path: bytes | None = scope.get("raw_path")
        self.query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.receive = receive
        self._send = send
        self.id = _take_id(self.headers) or f"req_{random_hex()}"
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.params: tuple[str, ...] = ()  # what the path leaves open
        self.project = ""  # until the request's key has named one
        self.model: str | None = None
        self.response_id: str | None = None
        self.stream = False
        self.warnings: list[str] = []
        self.error_code: str | None = None
        self.status = 0
        self.sent = 0
        self._writing = False
        self._beat: asyncio.Task[None] | None = None

    @property
    def param(self) -> str:
        """The path's first parameter."""
        return self.params[0]

    @property
    def milliseconds(self) -> float:
        return (time.perf_counter() - self.began) * 1000

    def note_ignored(self, names: Sequence[str]) -> None:
        """Tell the client which of the things it sent were left aside."""
        if names:
            self.warnings.append(f"ignored: {', '.join(names)}")

    def note_server(self, served_by: str | None) -> None:
        """Tell the client which backend answers, and with which model. The names of models are not all plain ASCII."""
        if served_by is not None:
            self.extra_headers.append((b"x-antiphon-served-by", served_by.encode("unicode_escape")))

    async def answer_with(self, value: Any) -> None:
        """Answer 200 with a wire object."""
        await self.answer(200, codec.encode(value))

    async def answer_error(self, error: AntiphonError, *, status: int | None = None, body: bytes | None = None) -> None:
        """Answer with the error, in its usual form unless there is another body for it."""
        self.error_code = error.code or error.type
        if error.retry_after is not None:
            self.extra_headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after)))
        await self.answer(status or error.status, body or describe(error))

    async def answer(self, status: int, body: bytes) -> None:
        """Answer with JSON, or with nothing at all when the body is empty."""
        headers = self._headers()
        if body:
            headers += (_JSON, (b"content-length", b"%d" % len(body)))
        await self._start(status, headers)
        # A HEAD request is told how long the body would be.
        await self._send_body(b"" if self.method == "HEAD" else body, more=False)

    async def write(self, chunk: bytes) -> None:
        """Send a part of an event stream: one call, one write to the socket. Waits while the client reads slowly."""
        if self._beat is not None:
            await self._beat
        if not self.status:
            await self._start(200, [*self._headers(), *_EVENT_STREAM])
        self._writing = True
        await self._send_body(chunk, more=True)
        self._writing = False

    async def finish(self, chunk: bytes) -> None:
        """Send the last part of an event stream."""
        if self._beat is not None:
            await self._beat
        if not self.status:
            await self._start(200, [*self._headers(), *_EVENT_STREAM])
        await self._send_body(chunk, more=False)

    @property
    def is_writing(self) -> bool:
        """Whether a part of the stream is waiting for the client to read."""
        return self._writing or self._beat is not None

    def start_beat(self, number: int) -> None:
        """Send a sign of life in a pause of the stream, without waiting for it: the next write does."""
        self._beat = asyncio.get_running_loop().create_task(self._send_beat(encode_beat(number)))

    async def _send_beat(self, chunk: bytes) -> None:
        try:
            await self._send_body(chunk, more=True)
        finally:
            self._beat = None

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> Awaitable[None]:
        self.status = status
        return self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _send_body(self, chunk: bytes, *, more: bool) -> Awaitable[None]:
        self.sent += len(chunk)
        return self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [
            (b"x-request-id", self.id.encode()),
            (b"openai-processing-ms", b"%d" % self.milliseconds),
            *self.extra_headers,
        ]
        if self.warnings:
            # Warnings repeat names that the client chose: whatever is not plain ASCII is escaped.
            text = "; ".join(self.warnings)[: _LONGEST_WARNING + 1].encode("unicode_escape")
            if len(text) > _LONGEST_WARNING:
                text = text[: _LONGEST_WARNING - len(_CUT)] + _CUT
            headers.append((b"x-antiphon-warnings", text))
        return headers


def _take_id(headers: dict[bytes, bytes]) -> str | None:
    """The client's own request id, if it is one that can go into a header and a log unchanged."""
    sent = headers.get(b"x-client-request-id") or headers.get(b"x-request-id")
    if not sent or len(sent) > _LONGEST_ID or sent.translate(None, _ID_CHARACTERS):
        return None
    return sent.decode()


_NOT_JSON = (b"application/x-www-form-urlencoded", b"multipart/")


async def read_body(exchange: Exchange, limit: int) -> bytes:
    """The whole body. Refuses one that is too large before reading it, if it says so itself, or as soon as it is."""
    _check_coding(exchange)
    if _declared_length(exchange) > limit:
        raise _too_large(limit)
    body, more = await _receive(exchange)
    if len(body) > limit:
        raise _too_large(limit)
    if not more:
        return body
    whole = bytearray(body)
    while more:
        body, more = await _receive(exchange)
        if len(whole) + len(body) > limit:
            raise _too_large(limit)
        whole += body
    return bytes(whole)


async def _receive(exchange: Exchange) -> tuple[bytes, bool]:
    message = await exchange.receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


def _declared_length(exchange: Exchange) -> int:
    declared = exchange.headers.get(b"content-length", b"0")
    if not declared.isdigit():
        raise InvalidRequest("The header Content-Length must be a number.", code="invalid_header")
    return int(declared)


def _check_coding(exchange: Exchange) -> None:
    """Many clients send JSON under no type or a wrong one, so only what is surely something else is refused."""
    kind = exchange.headers.get(b"content-type", b"").lower()
    if kind.startswith(_NOT_JSON):
        raise InvalidRequest(
            "The body must be JSON: send 'Content-Type: application/json'.", code="invalid_content_type"
        )
    coding = exchange.headers.get(b"content-encoding", b"identity").lower()
    if coding != b"identity":
        raise InvalidRequest(
            "The body must not be compressed: send no Content-Encoding.", code="invalid_content_encoding"
        )


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is too large: this server takes at most {limit} bytes.")


_MOMENT = 0.01


class Watch:
    """Within `with Watch(exchange):` a disconnect ends whatever is being awaited, and the block raises ClientGone.

    The body must have been read before: from here on the watch alone listens. Cancelling is the one way to reach a
    generator that is waiting for its model.

    Listening takes a task. Most answers that come from no model are there before one has been worth its price, so it
    starts only after a moment.
    """

    __slots__ = ("_exchange", "_gone", "_listener", "_loop", "_owner", "_timer")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._gone = False
        self._listener: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        owner = asyncio.current_task(self._loop)
        assert owner is not None, "a watch needs a task that it can cancel"
        self._owner = owner
        self._timer = self._loop.call_later(_MOMENT, self._start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()
        if self._gone:
            self._owner.uncancel()
            raise ClientGone from None

    def _start(self) -> None:
        self._listener = self._loop.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._exchange.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._owner.cancel()
