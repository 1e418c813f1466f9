"""The transport over WebSockets: many requests of a run on one open connection.

A connection serves one request at a time. Further requests at the same time use further connections.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from antiphon.agent.transports.base import (
    Events,
    check_base_url,
    decode_event,
    describe_address,
    is_last,
    make_headers,
)
from antiphon.errors import AntiphonError, UpstreamError, UpstreamTimeout
from antiphon.protocol import codec
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.stream.sse import SurrogateRepairer
from antiphon.upstream.error_mapping import decode_json_or_text, map_api_error
from antiphon.upstream.retry import RetryPolicy, parse_retry_after

_MAX_IDLE = 8
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_CLOSE_SECONDS = 2.0


class _Connect(connect):
    """A handshake that follows no redirect: a conversation is sent only to the configured server."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class WebSocketTransport:
    """Sends requests to `base_url`, which includes `/v1`, over WebSockets.

    A request is retried only until a response begins, as by `HttpTransport`. Closing a stream before its end closes the
    connection, which stops the model.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        retries: int = 4,
        connect_timeout: float = 10.0,
        idle_timeout: float = 300.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        check_base_url(base_url, schemes=("http://", "https://", "ws://", "wss://"))
        scheme, _, rest = base_url.partition("://")
        path, question, query = rest.partition("?")
        secure = "wss" if scheme in ("https", "wss") else "ws"
        self.url = f"{secure}://{path.rstrip('/')}/responses{question}{query}"
        self._headers = make_headers(headers or {}, api_key)
        self._retries = retries
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._sleep = sleep
        # A connection belongs to one event loop. Several loops may use this transport at once, each in its own thread.
        self._idle: dict[asyncio.AbstractEventLoop, list[ClientConnection]] = {}

    async def stream(self, request: dict[str, Any]) -> Events:
        body = codec.encode({"type": "response.create", **request}).decode()
        policy = RetryPolicy(request_retries=self._retries)
        connection, first = await policy.run(lambda _: self._send(body), sleep=self._sleep)
        return self._read_events(connection, first)

    async def close(self) -> None:
        """Close the connections of this event loop. Other loops may still use theirs."""
        for connection in self._idle.pop(asyncio.get_running_loop(), []):
            await _close(connection)

    async def _send(self, body: str) -> tuple[ClientConnection, bytes]:
        """Send a request and return its first event. Raises the error of a rejected request."""
        connection = self._take_idle()
        if connection is not None:
            # The server may have closed it meanwhile.
            with contextlib.suppress(ConnectionClosed):
                return connection, await self._request(connection, body)
        connection = await self._connect()
        try:
            return connection, await self._request(connection, body)
        except ConnectionClosed as error:
            raise _map_closed(error) from None

    async def _request(self, connection: ClientConnection, body: str) -> bytes:
        try:
            await connection.send(body)
            first = await self._receive(connection)
            rejected = _find_rejection(first)
        except BaseException:
            await _close(connection)
            raise
        if rejected is not None:
            self._put_idle(connection)
            raise rejected
        return first

    async def _connect(self) -> ClientConnection:
        try:
            return await _Connect(
                self.url,
                additional_headers=self._headers,
                open_timeout=self._connect_timeout,
                close_timeout=_CLOSE_SECONDS,
                max_size=_MAX_MESSAGE_BYTES,
                compression=None,
                proxy=None,
            )
        except InvalidStatus as error:
            response = error.response
            retry_after = parse_retry_after(response.headers, now=time.time())
            payload = decode_json_or_text(bytes(response.body or b""))
            raise map_api_error(response.status_code, payload, retry_after=retry_after) from None
        except TimeoutError:
            raise UpstreamTimeout(f"The server did not accept the connection in {self._connect_timeout:g} s.") from None
        except (OSError, WebSocketException) as error:
            address = describe_address(self.url)
            reason = "refuses connections" if isinstance(error, ConnectionRefusedError) else "cannot be reached"
            detail = "" if isinstance(error, ConnectionRefusedError) else f" ({type(error).__name__})"
            raise UpstreamError(
                f"The server {reason}{detail}: {address}. Is it running, and is base_url right?"
            ) from error

    async def _receive(self, connection: ClientConnection) -> bytes:
        try:
            async with asyncio.timeout(self._idle_timeout):
                message = await connection.recv(decode=False)
        except TimeoutError:
            raise UpstreamTimeout(f"The server sent nothing for {self._idle_timeout:g} s.") from None
        assert isinstance(message, bytes), "messages are not decoded"
        return message

    async def _read_events(self, connection: ClientConnection, first: bytes) -> Events:
        repairer, message, is_whole = SurrogateRepairer(), first, False
        try:
            while not is_whole:
                try:
                    event = decode_event(None, repairer.repair(message))
                except ValueError:
                    raise UpstreamError("The server sent an event that is not JSON.") from None
                is_whole = is_last(event)
                if is_whole:
                    # The reader may not come back after the last event.
                    self._put_idle(connection)
                yield [event]
                if not is_whole:
                    message = await self._receive(connection)
        except ConnectionClosed as error:
            raise _map_closed(error) from None
        finally:
            if not is_whole:
                await _close(connection)

    def _take_idle(self) -> ClientConnection | None:
        idle = self._idle.get(asyncio.get_running_loop(), [])
        while idle:
            connection = idle.pop()
            if connection.close_code is None:
                return connection
        return None

    def _put_idle(self, connection: ClientConnection) -> None:
        loop = asyncio.get_running_loop()
        for closed in [other for other in list(self._idle) if other.is_closed()]:
            self._idle.pop(closed, None)
        idle = self._idle.setdefault(loop, [])
        idle.append(connection)
        if len(idle) > _MAX_IDLE:
            idle.pop(0).transport.abort()


def _find_rejection(message: bytes) -> AntiphonError | None:
    """Return the error if a message rejects the request. Errors of a response have no status."""
    if b'"error"' not in message[:200]:
        return None
    try:
        event: JsonObject = read_json(message, JsonObject)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    status = event.get("status")
    if event.get("type") != "error" or not isinstance(status, int):
        return None
    headers = event.get("headers")
    texts = {str(name).lower(): str(value) for name, value in headers.items()} if isinstance(headers, dict) else {}
    return map_api_error(status, event.get("error") or event, retry_after=parse_retry_after(texts, now=time.time()))


def _map_closed(error: ConnectionClosed) -> AntiphonError:
    reason = error.rcvd.reason if error.rcvd is not None and error.rcvd.reason else "without a reason"
    return UpstreamError(f"The server has closed the connection: {reason}.")


async def _close(connection: ClientConnection) -> None:
    """Close a connection. A cancelled caller does not wait for the reply of the server."""
    if connection.close_code is not None:
        return
    closing = asyncio.ensure_future(connection.close())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        connection.transport.abort()
        raise
