"""The client for URLs of clients: media, files, MCP servers and web pages.

A client must not use this server to reach a service of its private network. `OutboundRules` decides by the URL. This
module also resolves the host name, checks every address, and connects only to a checked address, so a name whose
address changes in between cannot pass the check. Each redirect is checked in the same way. No proxy is used: it would
resolve the names itself.
"""

import asyncio
import functools
import math
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

import msgspec

from antiphon.errors import UpstreamError, UpstreamTimeout
from antiphon.upstream.addresses import SETTING, OutboundRules, normalize_host, parse_address
from antiphon.upstream.error_mapping import REFUSED
from antiphon.upstream.http import HttpResponse, send_on
from antiphon.upstream.http1.connect import Connector, make_tls_context, resolve_host
from antiphon.upstream.http1.errors import HttpError, InvalidUrl
from antiphon.upstream.http1.pool import ConnectionPool
from antiphon.upstream.http1.request import Origin, encode_head, merge_headers, parse_origin, parse_target
from antiphon.upstream.network_errors import map_network_error

CONNECT_SECONDS = 10.0
MAX_REDIRECTS = 5
MAX_IDLE_SECONDS = 2.0
"""Less than the time after which servers close idle connections: a POST that meets the end of one is not repeated."""

_MAX_POOLS = 64

MAX_COMPRESSION_RATIO = 100
"""Largest allowed ratio of the decoded to the received size of a compressed body."""

# Bodies below this size may have any ratio: a short text of one repeated character is not an attack.
_UNCHECKED_SIZE = 1024 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_WITHOUT_BODY = frozenset({"GET", "HEAD"})
# The headers that a redirect to another server keeps. All others may have credentials.
_PUBLIC_HEADERS = frozenset({"accept", "accept-language", "user-agent"})
_DEFAULT_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "antiphon"}
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)


class OutboundError(UpstreamError):
    """A URL of a client cannot be fetched. The message has no address, and may be shown to the client."""


class OutboundTimeout(OutboundError, UpstreamTimeout):
    """The server of a URL did not answer in time."""


class AddressRefused(OutboundError):
    """The rules do not allow a connection to the server of a URL."""


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """A response whose body was read. `url` is the URL after all redirects, `content_type` the media type alone."""

    url: str
    status: int
    content_type: str
    charset: str | None
    body: bytes


async def fetch(
    url: str,
    *,
    rules: OutboundRules,
    max_bytes: int,
    timeout: float,  # noqa: ASYNC109
    headers: Mapping[str, str] | None = None,
    max_redirects: int = MAX_REDIRECTS,
) -> Fetched:
    """Fetch a URL with GET and follow redirects. Return the response whatever its status is.

    `max_bytes` limits the body, after decompression. `timeout` is for everything together, in seconds. `headers` are
    not sent to another server that a redirect names. Raises OutboundError.
    """
    async with OutboundClient(rules) as client:
        return await client.fetch(
            url, max_bytes=max_bytes, timeout=timeout, headers=headers, max_redirects=max_redirects
        )


class OutboundClient:
    """Sends requests to URLs that the rules allow. Connections to one server are reused until `close`."""

    def __init__(self, rules: OutboundRules, *, connect_timeout: float = CONNECT_SECONDS) -> None:
        self._rules = rules
        self._connect_timeout = connect_timeout
        self._pools: dict[Origin, ConnectionPool] = {}

    async def __aenter__(self) -> "OutboundClient":
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        await asyncio.sleep(0)  # transports close in the next iteration of the loop

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        deadline: float = math.inf,
    ) -> HttpResponse:
        """Send a request and return the response with any status, including a redirect. Raises OutboundError.

        Only GET and HEAD are sent again if the server closes an idle connection. `deadline` is a time of the loop.
        Close the response at the end.
        """
        try:
            origin = self._find_origin(url)
            lines = merge_headers(
                {"Host": origin.host_header},
                _DEFAULT_HEADERS,
                {"Authorization": origin.authorization} if origin.authorization is not None else {},
                headers or {},
            )
            head = encode_head(method, parse_target(url), lines.items())
            if body is not None or method not in _WITHOUT_BODY:
                head += b"Content-Length: %d\r\n" % len(body or b"")
            connection = await send_on(
                self._get_pool(origin),
                head + b"\r\n",
                body,
                deadline=deadline,
                is_head_request=method == "HEAD",
                may_repeat=method in _WITHOUT_BODY,
            )
            return HttpResponse(connection)
        except HttpError as error:
            raise map_outbound_error(map_network_error(error)) from None

    async def fetch(
        self,
        url: str,
        *,
        max_bytes: int,
        timeout: float,  # noqa: ASYNC109
        headers: Mapping[str, str] | None = None,
        max_redirects: int = MAX_REDIRECTS,
    ) -> Fetched:
        """Fetch a URL as the function `fetch` does."""
        deadline = asyncio.get_running_loop().time() + timeout
        sent = dict(headers or {})
        for _ in range(max_redirects + 1):
            response = await self.send("GET", url, headers=sent, deadline=deadline)
            try:
                location = response.headers.get("location") if response.status in _REDIRECTS else None
                if location is None:
                    return await _read(response, url, max_bytes)
            finally:
                response.close()
            target = resolve_redirect(url, location)
            if not is_same_server(url, target):
                sent = {name: value for name, value in sent.items() if name.lower() in _PUBLIC_HEADERS}
            url = target
        raise OutboundError(f"The URL has more than {max_redirects} redirects.", code=REFUSED)

    def _find_origin(self, url: str) -> Origin:
        """Return the server of a URL, with its host as the rules read it."""
        fault = self._rules.find_fault(url)
        if fault is not None:
            raise AddressRefused(f"The URL may not be fetched: {fault}", code=REFUSED)
        origin = parse_origin(url)
        host = normalize_host(origin.host)
        if host is None:
            raise InvalidUrl(url)
        return replace(origin, host=host)

    def _get_pool(self, origin: Origin) -> ConnectionPool:
        pool = self._pools.get(origin)
        if pool is None:
            if len(self._pools) >= _MAX_POOLS:
                self._pools = {each: used for each, used in self._pools.items() if len(used)}
            connector = Connector(
                origin,
                timeout=self._connect_timeout,
                resolve=self._resolve,
                tls=get_tls_context() if origin.is_tls else None,
            )
            pool = self._pools[origin] = ConnectionPool(connector, max_idle_seconds=MAX_IDLE_SECONDS)
        return pool

    async def _resolve(self, host: str, port: int) -> Sequence[tuple[Any, ...]]:
        """Return the addresses of a host that the rules allow. Raises AddressRefused if there is none."""
        addresses = await resolve_host(host, port)
        if host in self._rules.hosts:
            return addresses
        allowed = [each for each in addresses if self._is_allowed(each[4][0])]
        if not allowed:
            raise AddressRefused(
                "The URL may not be fetched: its host has an address in a private network. The operator can allow it "
                f"with the setting '{SETTING}'.",
                code=REFUSED,
            )
        return allowed

    def _is_allowed(self, text: str) -> bool:
        address = parse_address(text)
        return address is not None and self._rules.is_address_allowed(address)


def resolve_redirect(url: str, location: str) -> str:
    """Return the URL that a redirect names, without user, password and fragment."""
    try:
        parts = urlsplit(urljoin(url, location))
    except ValueError:
        raise OutboundError("The URL redirects to an invalid URL.", code=REFUSED) from None
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))


def is_same_server(url: str, other: str) -> bool:
    """Return True if two URLs are valid and have the same scheme, host and port."""
    try:
        return replace(parse_origin(url), authorization=None) == replace(parse_origin(other), authorization=None)
    except InvalidUrl:
        return False


async def _read(response: HttpResponse, url: str, max_bytes: int) -> Fetched:
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _make_size_error(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while chunk := await _read_chunk(response):
        chunks.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            raise _make_size_error(max_bytes)
        encoded = response.encoded_size
        if encoded is not None and size > max(_UNCHECKED_SIZE, encoded * MAX_COMPRESSION_RATIO):
            raise OutboundError("The content of the URL is compressed too strongly.", code=REFUSED)
    charset = _CHARSET.search(response.headers.get("content-type", ""))
    return Fetched(
        url=url,
        status=response.status,
        content_type=response.content_type,
        charset=charset[1].lower() if charset is not None else None,
        body=b"".join(chunks),
    )


async def _read_chunk(response: HttpResponse) -> bytes:
    try:
        return await response.read()
    except UpstreamError as error:
        raise map_outbound_error(error) from None


def _make_size_error(max_bytes: int) -> OutboundError:
    return OutboundError(f"The content of the URL is larger than {max_bytes} bytes.", code=REFUSED)


def map_outbound_error(error: UpstreamError) -> OutboundError:
    """Return the error for a URL of a client. The HTTP client describes every server as an upstream."""
    message = error.message.replace("The upstream", "The server").replace("the upstream", "the server")
    kind = OutboundTimeout if isinstance(error, UpstreamTimeout) else OutboundError
    return kind(message, code=error.code)


@functools.cache
def get_tls_context() -> ssl.SSLContext:
    """Return the context for all servers. Loading the certificates takes milliseconds."""
    return make_tls_context(verify=True)
