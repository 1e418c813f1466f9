"""The transport to any server that speaks the Responses API."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from antiphon.agent.transports.base import LASTING, REFUSED, TERMINAL, Events, as_error
from antiphon.errors import AntiphonError, RateLimited, Unavailable, UpstreamError, UpstreamTimeout
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.json_text import read_json
from antiphon.protocol.unions import Unknown
from antiphon.stream.sse import SseDecoder, SseMessage, SurrogateRepairer
from antiphon.upstream.retry import parse_retry_after

_FIRST_DELAY = 0.2
_LONGEST_DELAY = 60.0
_PARTING = 0.1
_DONE = b"[DONE]"
_LAST = TERMINAL | {"error"}
_ENDS = frozenset(kind.removeprefix("response.") for kind in TERMINAL)


class HttpTransport:
    """Sends requests to `base_url`, which includes `/v1`, and may have a query.

    A request is sent again only while nothing has come back for it: a refused or broken connection, a rate limit, a
    server that is overloaded. What breaks off later is the caller's to repeat, who knows what has been done with it.
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
        base, mark, query = base_url.partition("?")
        self._url = f"{base.rstrip('/')}/responses{mark}{query}"
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **(headers or {})}
        if api_key:
            self._headers.setdefault("Authorization", f"Bearer {api_key}")
        self._retries = retries
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout, sock_read=idle_timeout)
        self._sleep = sleep
        # A session belongs to one event loop, and several may use this at once, each in a thread of its own.
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def stream(self, request: dict[str, Any]) -> Events:
        body = codec.encode(request | {"stream": True})
        attempt = 0
        while True:
            try:
                return _read(await self._send(body))
            except (RateLimited, UpstreamError, Unavailable) as error:
                delay = _delay(attempt, error)
                if attempt >= self._retries or delay > _LONGEST_DELAY or not _passes(error):
                    raise
                attempt += 1
                await self._sleep(delay)

    async def close(self) -> None:
        """Release the connections of this event loop: those of another are in use there, or gone with it."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            for ended in [each for each in list(self._sessions) if each.is_closed()]:
                self._sessions.pop(ended, None)
            session = self._sessions[loop] = aiohttp.ClientSession(timeout=self._timeout)
        return session

    async def _send(self, body: bytes) -> aiohttp.ClientResponse:
        try:
            # A conversation goes to the server it is meant for, and not to wherever that points.
            answer = await self._open().post(self._url, data=body, headers=self._headers, allow_redirects=False)
            if answer.status == 200:
                return answer
            async with answer:
                raise _refusal(answer, await answer.read())
        except TimeoutError:
            raise UpstreamTimeout("The server did not answer in time.") from None
        except aiohttp.ClientError as error:
            raise UpstreamError(f"The server cannot be reached: {type(error).__name__}.") from error


async def _read(answer: aiohttp.ClientResponse) -> Events:
    decoder, mender = SseDecoder(), SurrogateRepairer()
    try:
        if answer.content_type == "application/json":
            yield [_as_event(await answer.read())]
            return
        async for chunk in answer.content.iter_any():
            events = _decode(decoder.feed(chunk), mender)
            if events:
                yield events
                if events[-1].type in _LAST:
                    await _await_end(answer)
                    return
        events = _decode(decoder.close(), mender)
        if events:
            yield events
    except TimeoutError:
        raise UpstreamTimeout("The server fell silent.") from None
    except aiohttp.ClientError as error:
        raise UpstreamError(f"The connection broke: {type(error).__name__}.") from error
    finally:
        answer.close()


async def _await_end(answer: aiohttp.ClientResponse) -> None:
    """Everything was said. If the server says goodbye now, the connection serves again; if not, nobody waits for it."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_PARTING):
            async for _ in answer.content.iter_any():
                pass


def _decode(messages: Sequence[SseMessage], mender: SurrogateRepairer) -> list[Event | Unknown]:
    try:
        return [codec.decode_event(mender.repair(message.data)) for message in messages if message.data != _DONE]
    except ValueError:
        raise UpstreamError("The server sent an event that is not JSON.") from None


def _as_event(body: bytes) -> Event | Unknown:
    """A server that does not stream sends the whole response at once."""
    try:
        status = read_json(body, _Status).status
    except msgspec.DecodeError:
        raise UpstreamError("The server sent neither a stream nor a response.") from None
    if status not in _ENDS:
        raise UpstreamError(f"The server sent a response that has not come to its end: it is {status}.")
    (event,) = _decode(
        [SseMessage(None, b'{"type":"response.%b","response":%b}' % (status.encode(), body))], SurrogateRepairer()
    )
    return event


class _Status(msgspec.Struct):
    status: str


def _refusal(answer: aiohttp.ClientResponse, body: bytes) -> AntiphonError:
    try:
        error = read_json(body)["error"]
    except (msgspec.DecodeError, LookupError, TypeError):
        error = {"message": body.decode(errors="replace").strip()[:500]}
    if 300 <= answer.status < 400:
        message = f"The server answers with a redirect (status {answer.status}): the base_url may be wrong."
        error = {"message": message, "code": REFUSED}
    return as_error(answer.status, error, retry_after=parse_retry_after(answer.headers, now=time.time()))


def _passes(error: AntiphonError) -> bool:
    """Whether it may be gone by the next time. A quota that is used up is not."""
    return error.code not in LASTING


def _delay(attempt: int, error: AntiphonError) -> float:
    if error.retry_after is not None:
        return error.retry_after
    return float(_FIRST_DELAY * 2**attempt * random.uniform(0.9, 1.1))
