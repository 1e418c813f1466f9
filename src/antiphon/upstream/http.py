"""An HTTP session with one server. Every failure is raised as an `AntiphonError`."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping

from antiphon.errors import AntiphonError, UpstreamError, UpstreamTimeout
from antiphon.telemetry.current_trace import TRACE_HEADERS
from antiphon.upstream.error_mapping import REFUSED
from antiphon.upstream.http1.connect import Connector
from antiphon.upstream.http1.connection import Connection
from antiphon.upstream.http1.content_decoding import ContentDecoder, make_decoder
from antiphon.upstream.http1.errors import Disconnected, HttpError, InvalidUrl
from antiphon.upstream.http1.pool import ConnectionPool
from antiphon.upstream.http1.proxy import Proxy, find_proxy
from antiphon.upstream.http1.request import Origin, encode_head, merge_headers, parse_origin, parse_target
from antiphon.upstream.network_errors import map_network_error
from antiphon.upstream.retry import parse_retry_after

MAX_ERROR_SIZE = 256 * 1024
MAX_UNREAD_SIZE = 64 * 1024

STALE_SECONDS = 5.0
"""Time in which a server that has closed an idle connection lets us know. Later, it has worked on the request."""

_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_MAX_CACHED_HEADS = 64

ErrorMapper = Callable[[int, bytes, float | None], AntiphonError]
"""Maps the status, body and `retry_after` of an error response."""


class HttpSession:
    """Sends requests to the paths below `base_url`.

    `headers` and `query` are added to every request. `map_error` makes the error for a response whose status is not
    2xx. Redirects are not followed: a conversation goes only to the configured server. With `trust_env`, the proxies
    that the environment names are used. The session belongs to the event loop that opens it.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str],
        map_error: ErrorMapper,
        query: Mapping[str, str] | None = None,
        connect_timeout: float,
        verify_tls: bool = True,
        trust_env: bool = False,
    ) -> None:
        self._base_url = base_url
        self._headers = merge_headers(
            {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "antiphon"}, headers
        )
        self._query = query
        self._map_error = map_error
        self._connect_timeout = connect_timeout
        self._verify_tls = verify_tls
        self._trust_env = trust_env
        self._origin: Origin | None = None
        self._proxy: Proxy | None = None
        self._pool: ConnectionPool | None = None
        self._is_open = False
        self._heads: dict[tuple[object, ...], bytes] = {}

    def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            await asyncio.sleep(0)  # transports close in the next iteration of the loop

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        trace: bytes = b"",
        deadline: float = math.inf,
    ) -> "HttpResponse":
        """Return a response with a 2xx status. Raise every other one as an error.

        `trace` are the encoded headers of the current trace. A request with them needs a body. The request fails if
        the response is not read completely at `deadline`, a time of the loop. `HttpResponse.clear_deadline` removes
        this limit.
        """
        try:
            response = HttpResponse(await self._send(method, path, body, headers, trace, deadline))
        except HttpError as error:
            raise map_network_error(error) from None
        if 200 <= response.status < 300:
            return response
        try:
            raise await self._read_error(response)
        finally:
            response.close()

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        trace: bytes,
        deadline: float,
    ) -> Awaitable[Connection]:
        """Send a request and return its connection when the head of the response has arrived."""
        pool = self._pool if self._pool is not None else self._open_pool()
        head = self._encode_head(method, path, headers, has_body=body is not None, is_traced=bool(trace))
        if body is not None:
            # The ids of a trace differ in every request, so they are not in the cached head.
            head += b"%bContent-Length: %d\r\n\r\n" % (trace, len(body))
        return send_on(pool, head, body, deadline=deadline, is_head_request=method == "HEAD")

    def _open_pool(self) -> ConnectionPool:
        if not self._is_open:
            raise UpstreamError("The connection to the upstream is closed.", code=REFUSED)
        self._origin = origin = parse_origin(self._base_url)
        self._proxy = proxy = find_proxy(origin) if self._trust_env else None
        connector = Connector(origin, timeout=self._connect_timeout, verify_tls=self._verify_tls, proxy=proxy)
        self._pool = ConnectionPool(connector)
        return self._pool

    def _encode_head(
        self, method: str, path: str, headers: Mapping[str, str] | None, *, has_body: bool, is_traced: bool
    ) -> bytes:
        """Encode a request up to the length of its body. The result is cached: most requests have the same headers.

        The headers of the current trace replace those of the configuration.
        """
        key = (method, path, has_body, is_traced, *headers.items()) if headers else (method, path, has_body, is_traced)
        head = self._heads.get(key)
        if head is None:
            merged = self._make_headers(headers, has_body=has_body)
            if is_traced:
                merged = {name: value for name, value in merged.items() if name.lower() not in TRACE_HEADERS}
            head = encode_head(method, self._make_target(path), merged.items())
            if not has_body:
                head += b"\r\n" if method in _WITHOUT_BODY else b"Content-Length: 0\r\n\r\n"
            if len(self._heads) >= _MAX_CACHED_HEADS:
                self._heads.clear()
            self._heads[key] = head
        return head

    def _make_target(self, path: str) -> str:
        assert self._origin is not None
        url = self._base_url + path
        if parse_origin(url) != self._origin:
            raise InvalidUrl(url)
        target = parse_target(url, self._query)
        if self._proxy is not None and not self._origin.is_tls:
            return f"http://{self._origin.host_header}{target}"
        return target

    def _make_headers(self, headers: Mapping[str, str] | None, *, has_body: bool) -> dict[str, str]:
        origin, proxy = self._origin, self._proxy
        assert origin is not None
        return merge_headers(
            {"Host": origin.host_header},
            proxy.headers if proxy is not None and not origin.is_tls else {},
            self._headers,
            {"Authorization": origin.authorization} if origin.authorization is not None else {},
            {"Content-Type": "application/json"} if has_body else {},
            headers or {},
        )

    async def _read_error(self, response: "HttpResponse") -> AntiphonError:
        try:
            body = await read_bounded(response, limit=MAX_ERROR_SIZE)
        except UpstreamTimeout:
            raise
        except UpstreamError:
            body = b""  # the status is enough
        return self._map_error(response.status, body, parse_retry_after(response.headers, now=time.time()))


async def send_on(
    pool: ConnectionPool,
    head: bytes,
    body: bytes | None,
    *,
    deadline: float,
    is_head_request: bool = False,
    may_repeat: bool = True,
) -> Connection:
    """Send a request on an idle or a new connection, and return it when the head of the response has arrived.

    Without `may_repeat`, the request is sent at most once: the server may have worked on it before it closed an idle
    connection.
    """
    loop = pool.loop
    connection = pool.take_idle()
    stale_until = -math.inf if connection is None else loop.time() + STALE_SECONDS
    while True:
        if connection is None:
            connection = await pool.connect(deadline=deadline)
        try:
            connection.send(head, body, deadline=deadline, is_head_request=is_head_request)
            while not connection.check_head():
                await connection.wait()
            return connection
        except Disconnected:
            # The server may have closed an idle connection just when the request was sent.
            if not may_repeat or not connection.has_received_nothing or loop.time() > stale_until:
                raise
            connection, stale_until = None, -math.inf
        except BaseException:
            connection.abort()
            raise


class HttpResponse:
    """A response whose head has arrived. Call `close` or `drain` at the end."""

    __slots__ = ("_connection", "_decoder", "_headers", "_raw_headers", "loop", "status")

    def __init__(self, connection: Connection) -> None:
        self.status = connection.status
        self._connection: Connection | None = connection
        self._raw_headers = connection.headers
        self._headers: dict[str, str] | None = None
        self.loop = connection.loop
        self._decoder: ContentDecoder | None = None
        for name, value in self._raw_headers:
            if len(name) == 16 and name.lower() == b"content-encoding":
                self._decoder = self._make_decoder(value)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, with names in lower case. Of several with the same name, the first one counts."""
        if self._headers is None:
            self._headers = _decode_headers(self._raw_headers)
        return self._headers

    @property
    def content_type(self) -> str:
        """The media type in lower case, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def encoded_size(self) -> int | None:
        """The size of the compressed body that was decoded so far. None if the body is not compressed."""
        return self._decoder.received if self._decoder is not None else None

    @property
    def is_exhausted(self) -> bool:
        """True if the whole body was taken, so that the next `take` returns b"". False if that is not known yet."""
        return self._decoder is None and (self._connection is None or self._connection.is_exhausted)

    async def read(self) -> bytes:
        """Return the bytes received since the last read, and wait if there are none. Return b"" at the end.

        Raises if the connection is lost, or idle for too long.
        """
        while (data := self.take()) is None:
            await self.wait()
        return data

    def take(self) -> bytes | None:
        """Return the result of `read`, or None if it would have to `wait`."""
        connection, decoder = self._connection, self._decoder
        if connection is None:
            return b""
        try:
            return connection.take() if decoder is None else _take_decoded(connection, decoder)
        except HttpError as error:
            raise map_network_error(error) from None

    def wait(self) -> "asyncio.Future[None]":
        """Return a future that is done when there is something to `take`."""
        assert self._connection is not None, "`take` has returned the end of the body"
        return self._connection.wait()

    def set_idle_timeout(self, seconds: float) -> None:
        """Make reads fail that wait longer than this."""
        if self._connection is not None:
            self._connection.idle_timeout = seconds

    def clear_deadline(self) -> None:
        """Let reads go on after the deadline of the request."""
        if self._connection is not None:
            self._connection.deadline = math.inf

    def close(self) -> None:
        """Close the connection, or return it to the pool if the whole body has arrived."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()

    def drain(self, *, seconds: float) -> None:
        """Close the response, and receive the rest of its body in the background so that the connection is reused."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drain(seconds, MAX_UNREAD_SIZE)

    def __del__(self) -> None:
        # A response that was garbage collected must not hold its connection. This may run in any thread.
        if self._connection is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._connection.abort)

    def _make_decoder(self, encoding: bytes) -> ContentDecoder | None:
        try:
            return make_decoder(encoding.decode("latin-1"))
        except HttpError:
            self.close()
            raise


def _take_decoded(connection: Connection, decoder: ContentDecoder) -> bytes | None:
    while not (decoded := decoder.take()):
        data = connection.take()
        if not data:
            if data is not None:
                decoder.check_end()
            return data
        decoder.feed(data)
    return decoded


def _decode_headers(pairs: list[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in pairs:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape"))
    return headers


async def read_bounded(response: HttpResponse, *, limit: int) -> bytes:
    """Read the body of a response. Raises if it exceeds `limit` bytes."""
    chunks: list[bytes] = []
    size = 0
    while chunk := await response.read():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise make_size_error(limit)
    return b"".join(chunks)


def make_size_error(limit: int) -> UpstreamError:
    return UpstreamError(f"The upstream's answer is larger than {limit} bytes.", code=REFUSED)
