"""Opening a connection: name resolution, racing addresses, proxy tunnel and TLS."""

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain, zip_longest
from typing import Any, cast

from antiphon.upstream.http1.connection import MAX_HEAD_SIZE, Connection
from antiphon.upstream.http1.errors import (
    CertificateError,
    ConnectError,
    ConnectTimeout,
    DeadlineExceeded,
    Disconnected,
    InvalidResponse,
    InvalidUrl,
    ProxyRefused,
    ResolveError,
    TlsError,
)
from antiphon.upstream.http1.proxy import Proxy
from antiphon.upstream.http1.request import Origin, encode_head

RACE_DELAY = 0.25
"""Seconds until the next address of a host is tried too, while an earlier one has not answered."""

ADDRESS_SECONDS = 60.0
"""Time for which resolved addresses are reused."""

Address = tuple[Any, ...]
"""A result of `getaddrinfo`."""

Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]


class Connector:
    """Opens connections to one server, through a proxy if one is set, within `timeout` seconds each.

    `resolve` returns the addresses of a host; only these are connected to. `tls` is the context for TLS. By default, a
    new one is made.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        timeout: float,
        verify_tls: bool = True,
        proxy: Proxy | None = None,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._origin = origin
        self._resolve_host = resolve
        self._proxy = proxy
        self._timeout = timeout
        self._next_hop = proxy.origin if proxy is not None else origin
        if tls is None and (origin.is_tls or self._next_hop.is_tls):
            tls = make_tls_context(verify=verify_tls)
        self._tls = tls
        self._addresses: Sequence[Address] = ()
        self._resolved_at = 0.0

    async def connect(self, connection: Connection, *, deadline: float) -> None:
        """Connect `connection` to the server. `deadline` is a time of the loop."""
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(min(now + self._timeout, deadline)):
                await self._connect(connection)
        except TimeoutError:
            raise (ConnectTimeout() if now + self._timeout <= deadline else DeadlineExceeded()) from None
        except ssl.SSLCertVerificationError as error:
            raise CertificateError(error) from None
        except ssl.SSLError as error:
            raise TlsError(error) from None
        except OSError as error:
            raise ConnectError(error) from None

    async def _connect(self, connection: Connection) -> None:
        try:
            sock = await connect_first(await self._resolve())
        except OSError:
            self._addresses = ()  # they may have changed
            raise
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            sock.close()
            raise
        loop = asyncio.get_running_loop()
        if self._tls is None:
            await loop.create_connection(lambda: connection, sock=sock)
            return
        handshake = _Handshake(loop)
        await loop.create_connection(lambda: handshake, sock=sock)
        try:
            await self._start_tls(handshake, connection)
        except BaseException:
            handshake.abort()
            raise

    async def _start_tls(self, handshake: "_Handshake", connection: Connection) -> None:
        hop, origin, proxy = self._next_hop, self._origin, self._proxy
        needs_tunnel = proxy is not None and origin.is_tls
        transport = handshake.transport
        if hop.is_tls:
            transport = await self._wrap(transport, handshake if needs_tunnel else connection, hop)
        if proxy is not None and needs_tunnel:
            target = origin.authority
            head = encode_head("CONNECT", target, [("Host", target), *proxy.headers.items()])
            await handshake.open_tunnel(transport, head + b"\r\n")
            transport = await self._wrap(transport, connection, origin)
        connection.connection_made(transport)

    async def _wrap(
        self, transport: asyncio.Transport, protocol: asyncio.Protocol, server: Origin
    ) -> asyncio.Transport:
        """Start TLS on a connection."""
        assert self._tls is not None
        wrapped = await asyncio.get_running_loop().start_tls(
            transport, protocol, self._tls, server_hostname=server.host.rstrip(".")
        )
        if wrapped is None:
            raise ConnectionResetError("the connection was lost in the handshake")
        return wrapped

    async def _resolve(self) -> Sequence[Address]:
        loop = asyncio.get_running_loop()
        if not self._addresses or loop.time() - self._resolved_at > ADDRESS_SECONDS:
            hop = self._next_hop
            try:
                self._addresses = await (self._resolve_host or resolve_host)(hop.host, hop.port)
            except UnicodeError:
                raise InvalidUrl(hop.host) from None
            except OSError as error:
                raise ResolveError(error) from None
            self._resolved_at = loop.time()
        return self._addresses


async def resolve_host(host: str, port: int) -> Sequence[Address]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


def make_tls_context(*, verify: bool) -> ssl.SSLContext:
    """Return a context with the default certificates of OpenSSL, which `SSL_CERT_FILE` and `SSL_CERT_DIR` replace."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # the default of some systems is lower
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context


async def connect_first(addresses: Sequence[Address], *, delay: float = RACE_DELAY) -> socket.socket:
    """Return a connected socket for the first address that answers (RFC 8305).

    Each attempt starts when the one before it has failed, or after `delay` seconds. Raises the first error if all
    attempts fail.
    """
    if len(addresses) == 1:
        return await _connect_socket(addresses[0])
    waiting = _interleave_families(addresses)
    running: set[asyncio.Task[socket.socket]] = set()
    failed: list[BaseException] = []
    loop = asyncio.get_running_loop()
    try:
        while waiting or running:
            if waiting:
                running.add(loop.create_task(_connect_socket(waiting.pop(0))))
            done, running = await asyncio.wait(
                running, timeout=delay if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if (error := task.exception()) is not None:
                    failed.append(error)
                else:
                    running |= done - {task}
                    return task.result()
    finally:
        _end_attempts(running)
    raise failed[0] if failed else OSError("the host has no address")


def _end_attempts(attempts: "set[asyncio.Task[socket.socket]]") -> None:
    """Cancel the attempts, and close the sockets of those that have succeeded."""
    for task in attempts:
        task.cancel()
        task.add_done_callback(_close_socket)


def _close_socket(task: "asyncio.Task[socket.socket]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _connect_socket(address: Address) -> socket.socket:
    family, kind, protocol, _, where = address
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


def _interleave_families(addresses: Sequence[Address]) -> list[Address]:
    """Return the addresses so that both families alternate, beginning with that of the first address."""
    first = [each for each in addresses if each[0] == addresses[0][0]]
    second = [each for each in addresses if each[0] != addresses[0][0]]
    return [each for each in chain.from_iterable(zip_longest(first, second)) if each is not None]


class _Handshake(asyncio.Protocol):
    """The protocol of a new connection until TLS is ready, and until a proxy has connected to the server."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.transport: asyncio.Transport
        self._answer = b""
        self._tunnel: asyncio.Future[None] = loop.create_future()

    async def open_tunnel(self, transport: asyncio.Transport, request: bytes) -> None:
        """Send a CONNECT request and wait until it is accepted."""
        transport.write(request)
        await self._tunnel

    def abort(self) -> None:
        self.transport.abort()
        self._tunnel.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._tunnel.done():
            self.transport.abort()  # bytes before TLS
            return
        self._answer += data
        head, end, rest = self._answer.partition(b"\r\n\r\n")
        if not end:
            if len(head) > MAX_HEAD_SIZE:
                self._tunnel.set_exception(InvalidResponse())
            return
        try:
            status = _parse_status(head)
        except InvalidResponse as error:
            self._tunnel.set_exception(error)
            return
        if 100 <= status < 200 and status != 101:
            self._answer = b""
            self.data_received(rest)
        elif not 200 <= status < 300:
            self._tunnel.set_exception(ProxyRefused(status))
        elif rest:
            # A TLS server sends nothing before the client does.
            self._tunnel.set_exception(InvalidResponse())
        else:
            self._tunnel.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._tunnel.done():
            self._tunnel.set_exception(Disconnected())
            self._tunnel.exception()  # nothing may be waiting for it


def _parse_status(head: bytes) -> int:
    version, _, rest = head.partition(b" ")
    if (
        version not in (b"HTTP/1.1", b"HTTP/1.0")
        or re.fullmatch(rb"[0-9]{3}", rest[:3]) is None
        or rest[3:4] not in (b"", b" ", b"\r")
    ):
        raise InvalidResponse
    return int(rest[:3])
