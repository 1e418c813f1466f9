"""The transport to any server with the Responses API."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from antiphon.agent.tracing import make_trace_headers
from antiphon.agent.transports.base import TERMINAL, Events, check_base_url, decode_event
from antiphon.errors import AntiphonError, UpstreamError
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.json_text import read_json
from antiphon.protocol.unions import Unknown
from antiphon.stream.sse import SseDecoder, SseMessage, SurrogateRepairer
from antiphon.upstream.error_mapping import decode_json_or_text, map_api_error
from antiphon.upstream.http import HttpResponse, HttpSession
from antiphon.upstream.retry import RetryPolicy

# Most servers end the stream right after the last event. The wait lets the connection be reused.
_DRAIN_SECONDS = 0.1
_DONE = b"[DONE]"
_LAST = TERMINAL | {"error"}
_FINAL_STATUSES = frozenset(kind.removeprefix("response.") for kind in TERMINAL)


class HttpTransport:
    """Sends requests to `base_url`, which includes `/v1` and may have a query.

    A request is retried only until a response begins: after a failed connection, a rate limit, or an error of the
    server. A stream that breaks off later is not retried here, because the caller may have used a part of it.
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
        check_base_url(base_url)
        base, mark, query = base_url.partition("?")
        self.url = f"{base.rstrip('/')}/responses{mark}{query}"
        self._headers = {"Accept": "text/event-stream", **(headers or {})}
        if api_key:
            self._headers.setdefault("Authorization", f"Bearer {api_key}")
        self._retries = retries
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._sleep = sleep
        # A session belongs to one event loop. Several loops may use this transport at once, each in its own thread.
        self._sessions: dict[asyncio.AbstractEventLoop, HttpSession] = {}

    async def stream(self, request: dict[str, Any]) -> Events:
        body = codec.encode(request | {"stream": True})
        policy = RetryPolicy(request_retries=self._retries)
        response = await policy.run(lambda _: self._send(body), sleep=self._sleep)
        return _read_events(response, self._idle_timeout)

    async def close(self) -> None:
        """Release the connections of this event loop. Other loops may still use theirs."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def _open_session(self) -> HttpSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            for closed in [other for other in list(self._sessions) if other.is_closed()]:
                self._sessions.pop(closed, None)
            session = self._sessions[loop] = HttpSession(
                self.url, headers=self._headers, map_error=_map_error, connect_timeout=self._connect_timeout
            )
            session.open()
        return session

    async def _send(self, body: bytes) -> HttpResponse:
        deadline = asyncio.get_running_loop().time() + self._idle_timeout
        return await self._open_session().send("POST", "", body, make_trace_headers(), deadline=deadline)


async def _read_events(response: HttpResponse, idle_timeout: float) -> Events:
    decoder, repairer = SseDecoder(), SurrogateRepairer()
    response.clear_deadline()
    response.set_idle_timeout(idle_timeout)
    try:
        if response.content_type == "application/json":
            yield [_make_event(await _read_all(response))]
            return
        while chunk := await response.read():
            events = _decode(decoder.feed(chunk), repairer)
            if events:
                yield events
                if events[-1].type in _LAST:
                    response.drain(seconds=_DRAIN_SECONDS)
                    return
        events = _decode(decoder.close(), repairer)
        if events:
            yield events
    finally:
        response.close()


async def _read_all(response: HttpResponse) -> bytes:
    chunks = []
    while chunk := await response.read():
        chunks.append(chunk)
    return b"".join(chunks)


def _decode(messages: Sequence[SseMessage], repairer: SurrogateRepairer) -> list[Event | Unknown]:
    try:
        return [
            decode_event(message.event, repairer.repair(message.data)) for message in messages if message.data != _DONE
        ]
    except ValueError:
        raise UpstreamError("The server sent an event that is not JSON.") from None


def _make_event(body: bytes) -> Event | Unknown:
    """Return the terminal event for the response of a server that does not stream."""
    try:
        status = read_json(body, _Status).status
    except msgspec.DecodeError:
        raise UpstreamError("The server sent neither a stream nor a response.") from None
    if status not in _FINAL_STATUSES:
        raise UpstreamError(f"The server sent a response that is not finished: its status is {status}.")
    (event,) = _decode(
        [SseMessage(None, b'{"type":"response.%b","response":%b}' % (status.encode(), body))], SurrogateRepairer()
    )
    return event


class _Status(msgspec.Struct):
    status: str


def _map_error(status: int, body: bytes, retry_after: float | None) -> AntiphonError:
    return map_api_error(status, decode_json_or_text(body), retry_after=retry_after)
