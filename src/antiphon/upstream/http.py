"""An HTTP session with one server. Every failure is raised as an `AntiphonError`."""

import asyncio
import io
import time
from collections.abc import Callable, Mapping

import aiohttp
from yarl import URL

from antiphon.errors import AntiphonError, UpstreamError
from antiphon.upstream.error_mapping import REFUSED
from antiphon.upstream.network_errors import NETWORK_ERRORS, map_network_error, mapped_network_errors
from antiphon.upstream.retry import parse_retry_after

MAX_ERROR_SIZE = 256 * 1024
MAX_UNREAD_SIZE = 64 * 1024

# aiohttp warns about larger bytes, because it writes them in one piece. A file is written in chunks.
_MAX_PLAIN_BODY = 1024 * 1024

ErrorMapper = Callable[[int, bytes, float | None], AntiphonError]
"""Maps the status, body and `retry_after` of an error response."""


class HttpSession:
    """Sends requests to the paths below `base_url`.

    `headers` and `query` are added to every request. `map_error` makes the error for a response whose status is not
    2xx. Redirects are not followed: a conversation goes only to the configured server. The session belongs to the
    event loop that opens it.
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
    ) -> None:
        self._base_url = base_url
        self._headers = {"User-Agent": "antiphon", "Accept-Encoding": "identity", **headers}
        self._query = query
        self._map_error = map_error
        self._connect_timeout = connect_timeout
        self._verify_tls = verify_tls
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        # The pool has no limit: waiting for a pooled connection would count as a slow connection attempt.
        connector = aiohttp.TCPConnector(limit=0, ssl=self._verify_tls, ttl_dns_cache=60)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(connect=self._connect_timeout),
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Return a response with a 2xx status. Raise every other one as an error."""
        if self._session is None:
            raise UpstreamError("The connection to the upstream is closed.", code=REFUSED)
        own_headers = {"Content-Type": "application/json"} if body is not None else {}
        with mapped_network_errors():
            url = _parse_url(self._base_url + path)
            response = await self._session.request(
                method,
                url.update_query(self._query) if self._query else url,
                data=io.BytesIO(body) if body is not None and len(body) > _MAX_PLAIN_BODY else body,
                headers={**own_headers, **(headers or {})},
                allow_redirects=False,
            )
        if 200 <= response.status < 300:
            return response
        try:
            raise await self._read_error(response)
        finally:
            response.close()

    async def _read_error(self, response: aiohttp.ClientResponse) -> AntiphonError:
        try:
            body = await read_bounded(response, limit=MAX_ERROR_SIZE)
        except UpstreamError:
            body = b""  # the status is enough
        return self._map_error(response.status, body, parse_retry_after(response.headers, now=time.time()))


class BodyReader:
    """Reads the body of a response. A read fails when the connection is lost, or idle for too long.

    aiohttp closes a connection that sent invalid data, but does not wake a task that waits for the rest of the body.
    One timer that checks now and then how long a read has waited costs a tenth of a timeout around each read.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since: float | None = None
        protocol = response.connection.protocol if response.connection is not None else None
        self._closed = protocol.closed if protocol is not None else None
        if self._closed is not None:
            self._closed.add_done_callback(self._on_connection_lost)
        else:
            self._fail(aiohttp.ClientPayloadError())

    async def read(self) -> bytes:
        """Return the bytes received since the last read, and wait if there are none. Return b"" at the end."""
        self._waiting_since = self._loop.time()
        try:
            return await self._content.readany()
        except NETWORK_ERRORS as error:
            raise map_network_error(error) from None
        finally:
            self._waiting_since = None

    def set_idle_timeout(self, seconds: float) -> None:
        """Make reads fail that wait longer than this."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._check_idle_time, seconds)

    def release(self) -> None:
        """Stop watching the connection."""
        if self._timer is not None:
            self._timer.cancel()
        if self._closed is not None:
            self._closed.remove_done_callback(self._on_connection_lost)
            # The connection may be reused. One callback must then remain to retrieve the exception of its end.
            self._closed.remove_done_callback(_retrieve_exception)
            self._closed.add_done_callback(_retrieve_exception)

    def _check_idle_time(self, seconds: float) -> None:
        left = seconds
        if self._waiting_since is not None:
            left += self._waiting_since - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_idle_time, seconds)
        else:
            self._fail(aiohttp.SocketTimeoutError())

    def _on_connection_lost(self, closed: "asyncio.Future[None]") -> None:
        _retrieve_exception(closed)
        self._fail(aiohttp.ClientPayloadError())

    def _fail(self, error: Exception) -> None:
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(error)


async def read_bounded(response: aiohttp.ClientResponse, *, limit: int, head: bytes = b"") -> bytes:
    """Read the body of a response. `head` is the part that was read before. Raises if it exceeds `limit` bytes."""
    chunks = [head]
    size = len(head)
    with mapped_network_errors():
        while chunk := await response.content.readany():
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                break
    if size > limit:
        raise UpstreamError(f"The upstream's answer is larger than {limit} bytes.", code=REFUSED)
    return b"".join(chunks)


async def drain(response: aiohttp.ClientResponse, *, seconds: float) -> None:
    """Read the rest of a response that is no longer needed, so that its connection can be reused."""
    try:
        async with asyncio.timeout(seconds):
            await read_bounded(response, limit=MAX_UNREAD_SIZE)
    except (UpstreamError, TimeoutError):
        pass  # the connection is closed instead
    finally:
        response.close()


def _retrieve_exception(closed: "asyncio.Future[None]") -> None:
    """Retrieve a future's exception, which asyncio would log otherwise."""
    if not closed.cancelled():
        closed.exception()


def _parse_url(url: str) -> URL:
    """Parse a URL. Raises aiohttp.InvalidURL, like a request does."""
    try:
        return URL(url)
    except ValueError as error:
        raise aiohttp.InvalidURL(url) from error
