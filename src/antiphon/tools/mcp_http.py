"""HTTP of the `mcp` package. Imported only when a connection is opened.

With rules, each request of that package goes through `OutboundClient`, which checks the address. This includes requests
after a redirect.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

import httpx2
import msgspec

from antiphon.errors import UpstreamError, UpstreamTimeout
from antiphon.protocol.body_size import has_more_values
from antiphon.upstream.addresses import OutboundRules
from antiphon.upstream.http import HttpResponse
from antiphon.upstream.outbound import OutboundClient, map_outbound_error

MAX_RESPONSE_BYTES = 16 * 1024 * 1024

MAX_VALUES = 40_000
"""Maximum number of JSON values in a message. The `mcp` package decodes it on the event loop, in about 0.1 seconds."""

_PIECE_BYTES = 16 * 1024
_SEPARATORS = (b",", b"[", b"{")
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_LONGEST_END = max(map(len, _EVENT_ENDS))

# The outbound client writes these request headers itself. It has decoded the body of a response already.
_REQUEST_FRAMING = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding"})
_RESPONSE_FRAMING = frozenset({"content-length", "transfer-encoding", "content-encoding", "connection"})


# Code of JSON-RPC for an internal error.
_INTERNAL_ERROR = -32603
_WRONG_ANSWER = "The server's HTTP response is not the answer to the request: its id is another one, or missing."


class _Message(msgspec.Struct):
    """The fields of a JSON-RPC message that pair a request with its answer."""

    id: int | str | None = None
    method: str | None = None
    error: msgspec.Raw = msgspec.Raw()


class McpHttpClient(httpx2.AsyncClient):
    """A client that fails requests whose JSON response is not their answer.

    The `mcp` package ignores such a response, and the caller would wait until its time limit.
    """

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        response = await super().send(request, **options)
        if request.method != "POST" or not response.is_success or response.status_code == HTTPStatus.ACCEPTED:
            return response
        if not response.headers.get("content-type", "").lower().startswith("application/json"):
            return response
        sent = _read_message(request.content)
        if sent is None or sent.id is None:
            return response
        error = _find_error(sent.id, await response.aread())
        if error is None:
            return response
        content = msgspec.json.encode({"jsonrpc": "2.0", "id": sent.id, "error": error})
        headers = [each for each in response.headers.multi_items() if each[0].lower() not in _RESPONSE_FRAMING]
        return httpx2.Response(response.status_code, headers=headers, content=content, request=request)


def _find_error(request_id: int | str, body: bytes) -> Any:
    """Return the error of a request whose HTTP response has another id. None: the package can handle the response."""
    answer = _read_message(body)
    if answer is None or (answer.method is None and str(answer.id) == str(request_id)):
        return None
    if answer.method is None and answer.id is None and bytes(answer.error):
        return answer.error  # the server could not read the id
    return {"code": _INTERNAL_ERROR, "message": _WRONG_ANSWER}


def _read_message(body: bytes) -> _Message | None:
    """Return a message of JSON-RPC, or None if the body is none."""
    try:
        return msgspec.json.decode(body, type=_Message)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class OutboundTransport(httpx2.AsyncBaseTransport):
    """A transport for `httpx2` clients. `on_failure` gets the error of a request that got no response.

    The response to a POST may have `max_bytes`. A stream of notifications is a GET and has no limit, but its events
    have: at most `max_bytes` and `MAX_VALUES` JSON values, as every message.
    """

    def __init__(
        self, rules: OutboundRules, *, max_bytes: int = MAX_RESPONSE_BYTES, on_failure: Callable[[UpstreamError], None]
    ) -> None:
        self._client = OutboundClient(rules)
        self._max_bytes = max_bytes
        self._on_failure = on_failure

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        seconds = request.extensions.get("timeout", {}).get("read")
        deadline = math.inf if seconds is None else asyncio.get_running_loop().time() + seconds
        headers = {name: value for name, value in request.headers.items() if name not in _REQUEST_FRAMING}
        try:
            response = await self._client.send(
                request.method, str(request.url), headers=headers, body=body or None, deadline=deadline
            )
        except UpstreamError as error:
            self._on_failure(error)
            kind = httpx2.ConnectTimeout if isinstance(error, UpstreamTimeout) else httpx2.ConnectError
            raise kind(error.message, request=request) from None
        response.clear_deadline()
        return httpx2.Response(
            response.status,
            headers=[(name, value) for name, value in response.headers.items() if name not in _RESPONSE_FRAMING],
            stream=_Body(response, request, self._max_bytes, self._on_failure),
        )

    async def aclose(self) -> None:
        await self._client.close()


class MessageSize:
    """The size of the message that is being received: a whole body, or an event of a stream."""

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._received = bytearray()
        self._separators = 0
        self._next_check = MAX_VALUES
        # The position up to which there is no end of an event.
        self._searched = 0

    @property
    def size(self) -> int:
        return len(self._received)

    def add(self, chunk: bytes) -> None:
        self._received += chunk
        self._separators += _count_separators(chunk)

    def has_too_many_values(self) -> bool:
        """Return True if the message has too many values. Events that have ended are forgotten."""
        # Separators in strings are not values. They are skipped only when there are many, because this takes longer.
        if self._separators > self._next_check:
            if has_more_values(bytes(self._received), MAX_VALUES):
                return True
            self._next_check = 2 * self._separators
        if self._is_stream:
            self._forget_events()
        return False

    def _forget_events(self) -> None:
        """Forget the events that have ended."""
        received = self._received
        found = ((received.rfind(each, self._searched), each) for each in _EVENT_ENDS)
        end = max((start + len(each) for start, each in found if start >= 0), default=0)
        if end:
            del received[:end]
            self._separators, self._next_check = _count_separators(received), MAX_VALUES
        # The end of an event may be in two chunks.
        self._searched = max(len(received) - _LONGEST_END, 0)


def _count_separators(data: bytes | bytearray) -> int:
    return sum(map(data.count, _SEPARATORS))


class _Body(httpx2.AsyncByteStream):
    """The body of a response. Raises ReadError if it, or one of its messages, is too large."""

    def __init__(
        self,
        response: HttpResponse,
        request: httpx2.Request,
        max_bytes: int,
        on_failure: Callable[[UpstreamError], None],
    ) -> None:
        self._response = response
        self._request = request
        self._max_bytes = max_bytes
        self._on_failure = on_failure
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        self._message = MessageSize(is_stream=is_stream)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        while chunk := await self._read():
            size += len(chunk)
            self._message.add(chunk)
            measured = size if self._request.method != "GET" else self._message.size
            if measured > self._max_bytes:
                raise self._make_error(UpstreamError(f"The response is larger than {self._max_bytes} bytes."))
            if self._message.has_too_many_values():
                raise self._make_error(UpstreamError(f"A message has more than {MAX_VALUES} JSON values."))
            # A chunk may have hundreds of messages. Other tasks run between its pieces.
            for start in range(0, len(chunk), _PIECE_BYTES):
                yield chunk[start : start + _PIECE_BYTES]
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        self._response.close()

    async def _read(self) -> bytes:
        try:
            return await self._response.read()
        except UpstreamError as error:
            raise self._make_error(map_outbound_error(error)) from None

    def _make_error(self, error: UpstreamError) -> httpx2.ReadError:
        self._on_failure(error)
        return httpx2.ReadError(error.message, request=self._request)
