"""The transport to any server with the Responses API."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from antiphon.agent.tracing import make_trace_headers
from antiphon.agent.transports.base import TERMINAL, Events, check_base_url, decode_event, describe_address, is_last
from antiphon.agent.transports.sessions import LoopSessions, read_all
from antiphon.errors import UpstreamError
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.json_text import read_json
from antiphon.protocol.unions import Unknown
from antiphon.stream.sse import SseDecoder, SseMessage, SurrogateRepairer
from antiphon.upstream.http import HttpResponse
from antiphon.upstream.network_errors import Unreachable
from antiphon.upstream.retry import RetryPolicy

# Most servers end the stream right after the last event. The wait lets the connection be reused.
_DRAIN_SECONDS = 0.1
_DONE = b"[DONE]"
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
        self._sessions = LoopSessions(
            self.url,
            api_key=api_key,
            headers={"Accept": "text/event-stream", **(headers or {})},
            connect_timeout=connect_timeout,
        )
        self._retries = retries
        self._idle_timeout = idle_timeout
        self._sleep = sleep

    async def stream(self, request: dict[str, Any]) -> Events:
        body = codec.encode(request | {"stream": True})
        policy = RetryPolicy(request_retries=self._retries)
        try:
            response = await policy.run(lambda _: self._send(body), sleep=self._sleep)
        except Unreachable as error:
            reason = error.message.replace("upstream", "server").removesuffix(".")
            raise type(error)(
                f"{reason}: {describe_address(self.url)}. Is it running, and is base_url right?"
            ) from None
        return _read_events(response, self._idle_timeout)

    async def close(self) -> None:
        """Release the connections of this event loop. Other loops may still use theirs."""
        await self._sessions.close()

    async def _send(self, body: bytes) -> HttpResponse:
        deadline = asyncio.get_running_loop().time() + self._idle_timeout
        return await self._sessions.open().send("POST", "", body, make_trace_headers(), deadline=deadline)


async def _read_events(response: HttpResponse, idle_timeout: float) -> Events:
    decoder, repairer = SseDecoder(), SurrogateRepairer()
    response.clear_deadline()
    response.set_idle_timeout(idle_timeout)
    try:
        if response.content_type == "application/json":
            yield [_make_event(await read_all(response))]
            return
        while chunk := await response.read():
            events = _decode(decoder.feed(chunk), repairer)
            if events:
                yield events
                if is_last(events[-1]):
                    response.drain(seconds=_DRAIN_SECONDS)
                    return
        events = _decode(decoder.close(), repairer)
        if events:
            yield events
    finally:
        response.close()


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
