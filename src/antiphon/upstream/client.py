"""The way to another server: one session, with retries, limits and time-outs around every call."""

import asyncio
import io
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from yarl import URL

from antiphon.errors import AntiphonError, InvalidRequest, UpstreamError, UpstreamTimeout
from antiphon.stream.deltas import Delta, Deltas
from antiphon.upstream.delta_stream import LARGEST_BODY, DeltaStream, Reader, read_bounded
from antiphon.upstream.error_mapping import REFUSED, map_error_response, mapped_network_errors
from antiphon.upstream.options import UpstreamOptions, check_options
from antiphon.upstream.retry import CircuitBreaker, RetryPolicy, parse_retry_after

LARGEST_ERROR = 256 * 1024
LARGEST_PLAIN_BODY = 1024 * 1024
LARGEST_REST = 64 * 1024
DRAIN_SECONDS = 1.0

_OPEN_HEADERS = frozenset(
    {"accept", "anthropic-version", "anthropic-beta", "content-type", "openai-beta", "user-agent"}
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class UpstreamClient:
    """Another server. `headers` are those that say who we are, in the way its kind of API wants it.

    `name` is what the configuration calls it, and the only thing that the log says of it.
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
        """What must not be in any error: for `failure.map_error_response` and `map_error_payload`."""
        self._headers = {"User-Agent": "antiphon", "Accept-Encoding": "identity", **headers, **options.headers}
        self._sleep = sleep
        self._circuit = CircuitBreaker(name, now=now)
        # A semaphore wakes who waits in the order in which they came.
        self._slots: AbstractAsyncContextManager[Any] = (
            asyncio.Semaphore(options.max_concurrent) if options.max_concurrent else nullcontext()
        )
        self._session: aiohttp.ClientSession | None = None
        self._drains: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        options = self.options
        # The slots limit the calls, so the pool does not: waiting for it would look like a slow connection.
        connector = aiohttp.TCPConnector(limit=0, ssl=options.verify_tls, ttl_dns_cache=60)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(connect=options.connect_timeout),
            trust_env=False,
        )

    async def close(self) -> None:
        for task in self._drains:
            task.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get_json(self, path: str) -> Any:
        """Ask once: what this is for can be asked again later."""
        body = await self._in_time(self._fetch("GET", path, None))
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise UpstreamError("The upstream's answer is not JSON.") from None

    async def post_json(self, path: str, body: bytes) -> bytes:
        """The body of the answer to a question that is not streamed."""
        async with self._slots:
            with self._circuit.guard():
                return await self._repeat(lambda _: self._fetch("POST", path, body))

    async def stream(
        self,
        path: str,
        body: bytes,
        make_reader: Callable[[], Reader],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Deltas:
        """Begin an answer, and return it when its first words are there. Closing it hangs up at once."""
        deltas = self._tell(path, body, make_reader, headers)
        # A generator that was never entered has nothing to clear up when it is closed; this one has by now.
        await anext(deltas)
        return deltas

    async def _tell(
        self, path: str, body: bytes, make_reader: Callable[[], Reader], headers: Mapping[str, str] | None
    ) -> Deltas:
        """The deltas, after an empty batch that says the first are there."""

        async def begin(patience: RetryPolicy) -> tuple[DeltaStream, list[Delta]]:
            response = await self._send("POST", path, body, headers)
            patience.answered = True
            answer = DeltaStream(response, make_reader(), secrets=self.secrets)
            try:
                while not (deltas := await answer.read()):
                    pass
                answer.check()  # nobody has heard the first words yet, so they can be said anew
            except BaseException:
                answer.close()
                raise
            return answer, list(deltas)

        async with self._slots:
            with self._circuit.guard():
                answer, first = await self._repeat(begin)
            try:
                yield ()
                yield first
                answer.set_idle_timeout(self.options.idle_timeout)
                while not answer.finished:
                    if deltas := await answer.read():
                        yield deltas
            finally:
                self._leave(answer)

    async def _repeat(self, attempt: Callable[[RetryPolicy], Awaitable[T]]) -> T:
        """Make the attempt, and again after what may pass, as long as there is patience."""
        patience = RetryPolicy(self.options)
        while True:
            patience.answered = False
            try:
                return await self._in_time(attempt(patience))
            except AntiphonError as error:
                wait = patience.wait_after(error)
                if wait is None:
                    self._note(error)
                    raise
                logger.warning("backend %s: %s Asking again in %.1f s.", self.name, error.message, wait)
            await self._sleep(wait)

    async def _in_time(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.options.first_token_timeout):
                return await work
        except TimeoutError:
            raise UpstreamTimeout("The upstream did not answer in time.") from None

    def _note(self, error: AntiphonError) -> None:
        # What the client can mend is the client's to know.
        level = logging.INFO if isinstance(error, InvalidRequest) else logging.WARNING
        logger.log(level, "backend %s: %s", self.name, error.message)

    async def _fetch(self, method: str, path: str, body: bytes | None) -> bytes:
        response = await self._send(method, path, body, None)
        try:
            return await read_bounded(response, limit=LARGEST_BODY)
        finally:
            response.close()

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None
    ) -> aiohttp.ClientResponse:
        """A response with a good status; every other is raised."""
        if self._session is None:
            raise UpstreamError("The connection to the upstream is closed.", code=REFUSED)
        url = URL(self.options.base_url + path)
        sent = {"Content-Type": "application/json"} if body is not None else {}
        with mapped_network_errors():
            response = await self._session.request(
                method,
                url.update_query(self.options.query) if self.options.query else url,
                # aiohttp warns of large bytes, which it would write at one go; a file it writes piece by piece.
                data=io.BytesIO(body) if body is not None and len(body) > LARGEST_PLAIN_BODY else body,
                headers={**sent, **(headers or {})},
                allow_redirects=False,
            )
        if 200 <= response.status < 300:
            return response
        try:
            raise await self._read_refusal(response)
        finally:
            response.close()

    async def _read_refusal(self, response: aiohttp.ClientResponse) -> AntiphonError:
        try:
            body = await read_bounded(response, limit=LARGEST_ERROR)
        except UpstreamError:
            body = b""  # the status says enough
        wait = parse_retry_after(response.headers, now=time.time())
        return map_error_response(response.status, body, secrets=self.secrets, retry_after=wait)

    def _leave(self, answer: DeltaStream) -> None:
        """Hang up, or let the rest of a finished answer come in, so that the connection can be used again."""
        if not answer.finished or answer.response.content.is_eof():
            answer.close()
        else:
            task = asyncio.get_running_loop().create_task(_drain(answer))
            self._drains.add(task)
            task.add_done_callback(self._drains.discard)


async def _drain(answer: DeltaStream) -> None:
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            await read_bounded(answer.response, limit=LARGEST_REST)
    except (UpstreamError, TimeoutError):
        pass  # nobody was waiting for it
    finally:
        answer.close()


def _collect_secrets(options: UpstreamOptions, headers: Mapping[str, str]) -> frozenset[str]:
    """Keys, wherever they are, and the address. A host that is a plain word may well be one in a sentence."""
    parts = urlsplit(options.base_url)
    secrets = {options.base_url, parts.netloc, options.api_key or ""}
    if "." in (parts.hostname or ""):
        secrets.add(parts.hostname or "")
    for name, text in [*headers.items(), *options.headers.items()]:
        if name.lower() not in _OPEN_HEADERS:
            secrets |= {text, text.rpartition(" ")[2]}  # "Bearer KEY"
    secrets |= {text for name, text in options.query.items() if "version" not in name.lower()}
    return frozenset(secrets) - {""}
