"""HTTP of the `mcp` package through the outbound client. Imported only when a connection is opened.

Each request of that package, also one after a redirect, goes through `OutboundClient`, which checks the address.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable

import httpx2

from antiphon.errors import UpstreamError, UpstreamTimeout
from antiphon.upstream.addresses import OutboundRules
from antiphon.upstream.http import HttpResponse
from antiphon.upstream.outbound import OutboundClient, map_outbound_error

MAX_RESPONSE_BYTES = 16 * 1024 * 1024

# The outbound client writes these request headers itself. It has decoded the body of a response already.
_REQUEST_FRAMING = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding"})
_RESPONSE_FRAMING = frozenset({"content-length", "transfer-encoding", "content-encoding", "connection"})


class OutboundTransport(httpx2.AsyncBaseTransport):
    """A transport for `httpx2` clients. `on_failure` gets the error of a request that got no response.

    The response to a POST may have `max_bytes`. A stream of notifications is a GET and has no limit, but the `mcp`
    package limits each of its events.
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
            stream=_Body(response, request, None if request.method == "GET" else self._max_bytes, self._on_failure),
        )

    async def aclose(self) -> None:
        await self._client.close()


class _Body(httpx2.AsyncByteStream):
    """The body of a response. Raises ReadError if it has more than `max_bytes`."""

    def __init__(
        self,
        response: HttpResponse,
        request: httpx2.Request,
        max_bytes: int | None,
        on_failure: Callable[[UpstreamError], None],
    ) -> None:
        self._response = response
        self._request = request
        self._max_bytes = max_bytes
        self._on_failure = on_failure

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        while chunk := await self._read():
            size += len(chunk)
            if self._max_bytes is not None and size > self._max_bytes:
                raise self._make_error(UpstreamError(f"The response is larger than {self._max_bytes} bytes."))
            yield chunk

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
