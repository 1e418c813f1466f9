"""The client of an upstream: retries, concurrency limit, circuit breaker and timeouts around each call."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from antiphon.errors import AntiphonError, InvalidRequest, RateLimited, UpstreamError, UpstreamTimeout
from antiphon.protocol.json_text import read_json
from antiphon.stream.deltas import Delta, Deltas
from antiphon.stream.limits import AnswerLimits
from antiphon.telemetry.current_trace import CurrentTrace
from antiphon.turn_queue import Slot, TurnQueue
from antiphon.upstream.circuit_breaker import CallGuard, CircuitBreaker
from antiphon.upstream.delta_stream import DeltaStream, Reader
from antiphon.upstream.error_mapping import AUTHENTICATION, REFUSED, map_error_response
from antiphon.upstream.http import HttpSession, read_bounded
from antiphon.upstream.network_errors import Unreachable
from antiphon.upstream.options import UpstreamOptions, check_options
from antiphon.upstream.retry import RetryPolicy
from antiphon.upstream.whole_answers import WholeAnswers

DRAIN_SECONDS = 1.0

MAX_BODY_SIZE = 64 * 1024 * 1024
"""Limit for a response that is not an answer of a model, such as a list of models."""

_PUBLIC_HEADERS = frozenset(
    {"accept", "anthropic-version", "anthropic-beta", "content-type", "openai-beta", "user-agent"}
)

# Codes of answers with which an upstream rejects a request, or our key.
_REJECTED = frozenset({AUTHENTICATION, REFUSED})

# Number of deltas that are returned at once. Their events are composed, encoded and sent without a pause.
_MAX_DELTAS = 1000

T = TypeVar("T")

_DEFAULT_LIMITS = AnswerLimits()

_Started = tuple[DeltaStream, Sequence[Delta]]

logger = logging.getLogger(__name__)


class WriteRequest(Protocol):
    """Returns the body and the headers of a turn's request."""

    def __call__(self, *, stream: bool) -> tuple[bytes, Mapping[str, str] | None]: ...


class UpstreamClient:
    """A client for one upstream.

    `headers` authenticate us in the way the upstream's API expects. `name` is the backend's name in the configuration,
    and the only thing logged about the upstream. `secrets` must not appear in any error: pass them to
    `error_mapping.map_error_payload`.
    """

    def __init__(
        self,
        name: str,
        options: UpstreamOptions,
        *,
        headers: Mapping[str, str],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        check_options(options, name=name)
        self.name = name
        self.options = options
        self.secrets = _collect_secrets(options, headers)
        self._session = HttpSession(
            options.base_url,
            headers={**headers, **options.headers},
            query=options.query,
            map_error=self._map_error,
            connect_timeout=options.connect_timeout,
            verify_tls=options.verify_tls,
            trust_env=options.trust_env,
        )
        self._sleep = sleep
        self._now = now
        self.circuit_breaker = CircuitBreaker(name, now=now)
        self.error_counts: Counter[str] = Counter()  # failed attempts, by the kind of the error
        self._whole_answers = WholeAnswers(name, options, now=now)
        self.queue = TurnQueue(options.max_concurrent) if options.max_concurrent else None

    async def start(self) -> None:
        self._session.open()

    async def close(self) -> None:
        await self._session.close()

    async def get_json(self, path: str) -> Any:
        """Return the JSON at a path. There are no retries: callers repeat the request later."""
        try:
            body = await self._fetch("GET", path, None)
        except AntiphonError as error:
            self.count_error(error)
            raise
        try:
            return read_json(body)
        except msgspec.DecodeError:
            raise UpstreamError("The upstream's answer is not JSON.") from None

    async def post_json(self, path: str, body: bytes, *, project: str = "", background: bool = False) -> bytes:
        """Send a request for data, and return the response body."""
        slot = None if self.queue is None else await self.queue.acquire(project, background=background)
        try:
            with self.circuit_breaker.guard(project) as guard:
                guard.request = body
                return await self._retry(lambda _: self._fetch("POST", path, body))
        finally:
            if slot is not None:
                slot.release()

    def stream(
        self,
        path: str,
        body: bytes,
        make_reader: Callable[[], Reader],
        *,
        headers: Mapping[str, str] | None = None,
        on_sent: Callable[[], object] | None = None,
        on_accepted: Callable[[], object] | None = None,
        project: str = "",
        background: bool = False,
        limits: AnswerLimits = _DEFAULT_LIMITS,
    ) -> Awaitable[Deltas]:
        """Send a request for a streamed answer, and return its deltas once the first ones have arrived.

        `on_sent` is called when the request has left the queue, and `on_accepted` when the upstream has answered with a
        success status, and with no error right after it. Closing the deltas closes the connection at once. `project` is
        the owner of the request; it and `background` decide when a request starts if there are more than
        `max_concurrent`. An answer that exceeds `limits` is an error.
        """
        seconds = self.options.first_token_timeout

        def begin(policy: RetryPolicy, guard: CallGuard) -> Awaitable[_Started]:
            guard.request = body
            return self._begin(path, (body, headers), make_reader, policy, seconds, limits, on_accepted)

        return self._start(begin, project, background=background, on_sent=on_sent)

    def request_whole(
        self,
        path: str,
        write: WriteRequest,
        make_reader: Callable[[], Reader],
        *,
        on_sent: Callable[[], object] | None = None,
        project: str = "",
        background: bool = False,
        limits: AnswerLimits = _DEFAULT_LIMITS,
    ) -> Awaitable[Deltas]:
        """Send a request for an answer in one piece, and return its deltas when it has arrived.

        The answer is streamed after all if the upstream cannot answer otherwise. The other arguments are those of
        `stream`.
        """
        options, whole_answers = self.options, self._whole_answers
        failure: AntiphonError | None = None  # of the request without streaming

        async def begin(policy: RetryPolicy, guard: CallGuard) -> _Started:
            nonlocal failure
            if failure is None and whole_answers.are_possible(project):
                seconds = options.answer_timeout or 2 * options.first_token_timeout
                began = self._now()
                try:
                    request = write(stream=False)
                    guard.request = request[0]
                    return await self._begin(path, request, make_reader, policy, seconds, limits)
                except AntiphonError as error:
                    if not whole_answers.may_need_streaming(error, seconds=self._now() - began):
                        raise
                    failure = error
                policy.answered = False
            seconds, request = options.first_token_timeout, write(stream=True)
            guard.request = request[0]
            started = await self._begin(path, request, make_reader, policy, seconds, limits)
            if failure is not None:
                whole_answers.require_streaming(project, failure)
            return started

        return self._start(begin, project, background=background, on_sent=on_sent)

    async def _start(
        self,
        begin: Callable[[RetryPolicy, CallGuard], Awaitable[_Started]],
        project: str,
        *,
        background: bool,
        on_sent: Callable[[], object] | None,
    ) -> Deltas:
        slot = None if self.queue is None else await self.queue.acquire(project, background=background)
        if on_sent is not None:
            on_sent()
        try:
            with self.circuit_breaker.guard(project) as guard:
                stream, first = await self._retry(lambda policy: begin(policy, guard))
        except BaseException:
            if slot is not None:
                slot.release()
            raise
        return _Answer(self, stream, first, slot)

    async def _begin(
        self,
        path: str,
        request: tuple[bytes, Mapping[str, str] | None],
        make_reader: Callable[[], Reader],
        policy: RetryPolicy,
        seconds: float,
        limits: AnswerLimits,
        on_accepted: Callable[[], object] | None = None,
    ) -> _Started:
        """Send the request and read the first deltas, for at most `seconds`.

        The client has not seen these deltas yet, so this can be retried.
        """
        body, headers = request
        deadline = asyncio.get_running_loop().time() + seconds
        encode_trace = CurrentTrace.encode_headers
        trace = b"" if encode_trace is None else encode_trace()
        response = await self._session.send("POST", path, body, headers, trace=trace, deadline=deadline)
        policy.answered = True
        stream = DeltaStream(response, make_reader(), secrets=self.secrets, limits=limits)
        try:
            deltas = stream.take()
            stream.check()
            # An error that arrives with the head is raised before, so that it still becomes an HTTP error.
            if on_accepted is not None:
                on_accepted()
            while not deltas:
                deltas = await stream.read()
            stream.check()
        except BaseException:
            stream.close()
            raise
        response.clear_deadline()
        return stream, deltas

    def _retry(self, attempt: Callable[[RetryPolicy], Awaitable[T]]) -> Awaitable[T]:
        options = self.options
        policy = RetryPolicy(request_retries=options.request_retries, stream_retries=options.stream_retries)
        return policy.run(attempt, sleep=self._sleep, on_retry=self._log_retry, on_failure=self._log_failure)

    def count_error(self, error: AntiphonError) -> None:
        """Count a failed attempt, or an answer that broke off."""
        self.error_counts[_classify_error(error)] += 1

    def _log_retry(self, error: AntiphonError, wait: float) -> None:
        self.count_error(error)
        logger.warning("backend %s: %s Retrying in %.1f s.", self.name, error.message, wait)

    def _log_failure(self, error: AntiphonError) -> None:
        self.count_error(error)
        # Invalid requests are the client's to fix, so they are not worth a warning here.
        level = logging.INFO if isinstance(error, InvalidRequest) else logging.WARNING
        logger.log(level, "backend %s: %s", self.name, error.message)

    async def _fetch(self, method: str, path: str, body: bytes | None) -> bytes:
        deadline = asyncio.get_running_loop().time() + self.options.first_token_timeout
        response = await self._session.send(method, path, body, deadline=deadline)
        try:
            return await read_bounded(response, limit=MAX_BODY_SIZE)
        finally:
            response.close()

    def _map_error(self, status: int, body: bytes, retry_after: float | None) -> AntiphonError:
        return map_error_response(status, body, secrets=self.secrets, retry_after=retry_after)

    def release(self, stream: DeltaStream, slot: Slot | None) -> None:
        """Free the slot of a stream, and close its connection.

        The rest of a finished answer is received in the background, so that the connection can be reused.
        """
        if slot is not None:
            slot.release()
        if stream.finished:
            stream.response.drain(seconds=DRAIN_SECONDS)
        else:
            stream.close()


class _Answer:
    """The deltas of an answer. `first` has those that have arrived, and `whole` the same if these are all."""

    def __init__(self, client: UpstreamClient, stream: DeltaStream, first: Sequence[Delta], slot: Slot | None) -> None:
        self._client = client
        self._stream = stream
        self._slot = slot
        self._first: Sequence[Delta] | None = first
        self.whole = first if stream.finished and len(first) <= _MAX_DELTAS else None
        self._slices: Iterator[Sequence[Delta]] | None = None
        self._loop = stream.response.loop
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Delta]:
        if self._is_closed:
            raise StopAsyncIteration
        stream = self._stream
        if (first := self._first) is not None:
            self._first = None
            if self.whole is not None:
                self._close()
                return first
            stream.set_idle_timeout(self._client.options.idle_timeout)
            return self._slice(first)
        try:
            if self._slices is not None and (rest := await self._take_slice()):
                return rest
            while not stream.finished:
                deltas = stream.take()
                if deltas is None:
                    await stream.wait()
                elif deltas:
                    return deltas if len(deltas) <= _MAX_DELTAS else self._slice(deltas)
        except BaseException as error:
            if isinstance(error, AntiphonError):
                self._client.count_error(error)
            self._close()
            raise
        self._close()
        raise StopAsyncIteration

    def _slice(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Return the first deltas of a batch. The next calls return the others."""
        if len(deltas) <= _MAX_DELTAS:
            return deltas
        positions = range(_MAX_DELTAS, len(deltas), _MAX_DELTAS)
        self._slices = (deltas[start : start + _MAX_DELTAS] for start in positions)
        return deltas[:_MAX_DELTAS]

    async def _take_slice(self) -> Sequence[Delta]:
        """Return the next slice, or nothing after the last one. Other requests are served between the slices."""
        await asyncio.sleep(0)
        rest = next(self._slices, ()) if self._slices is not None else ()
        if not rest:
            self._slices = None
        return rest

    async def aclose(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._client.release(self._stream, self._slot)

    def __del__(self) -> None:
        # An answer that was garbage collected without `aclose` must not hold its connection and slot.
        if not self._is_closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._client.release, self._stream, self._slot)


def _classify_error(error: AntiphonError) -> str:
    """Return the kind of an error, one of a few."""
    if isinstance(error, Unreachable):
        return "connection"
    if isinstance(error, UpstreamTimeout):
        return "timeout"
    if isinstance(error, RateLimited):
        return "rate_limited"
    return "rejected" if isinstance(error, InvalidRequest) or error.code in _REJECTED else "server_error"


def _collect_secrets(options: UpstreamOptions, headers: Mapping[str, str]) -> frozenset[str]:
    """Return the keys and the address. A host name without a dot is left out: it may be an ordinary word."""
    parts = urlsplit(options.base_url)
    secrets = {options.base_url, parts.netloc, options.api_key or ""}
    if "." in (parts.hostname or ""):
        secrets.add(parts.hostname or "")
    for name, text in [*headers.items(), *options.headers.items()]:
        if name.lower() not in _PUBLIC_HEADERS:
            secrets |= {text, text.rpartition(" ")[2]}  # "Bearer KEY"
    secrets |= {text for name, text in options.query.items() if "version" not in name.lower()}
    return frozenset(secrets) - {""}
