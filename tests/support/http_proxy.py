"""An HTTP proxy on a loopback address: CONNECT tunnels, and requests in absolute form."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from support.raw_server import Peer, serve_raw


class HttpProxy:
    """A proxy. `heads` are the heads of the requests to the proxy itself."""

    def __init__(self, authorization: str | None, answer: bytes) -> None:
        self.port = 0
        self.heads: list[list[str]] = []
        self._authorization = authorization
        self._answer = answer

    async def handle(self, peer: Peer) -> None:
        while True:
            head = (await peer.read_head()).decode().split("\r\n")[:-2]
            self.heads.append(head)
            method, target, _ = head[0].split(" ")
            if self._authorization and f"Proxy-Authorization: {self._authorization}" not in head:
                await peer.send(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 4\r\n\r\nauth")
                continue
            if method == "CONNECT":
                host, _, port = target.rpartition(":")
                await self._tunnel(peer, host.strip("[]"), int(port))
                return
            await self._forward(peer, head, target)

    async def _tunnel(self, peer: Peer, host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        await peer.send(self._answer)
        await asyncio.gather(_pump(peer.reader, writer), _pump(reader, peer.writer))

    async def _forward(self, peer: Peer, head: list[str], target: str) -> None:
        parts = urlsplit(target)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        path = target.removeprefix(f"http://{parts.netloc}")
        lines = [f"{head[0].split(' ')[0]} {path} HTTP/1.1"]
        lines += [line for line in head[1:] if not line.startswith("Proxy-")]
        length = next((int(line.split(": ")[1]) for line in head if line.startswith("Content-Length")), 0)
        try:
            writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode())
            writer.write(await peer.reader.readexactly(length))
            answer = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b": ")[1]) for line in answer.split(b"\r\n") if line.startswith(b"Content-Length")
            )
            answer += await reader.readexactly(length)
        finally:
            writer.close()
        await peer.send(answer)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def serve_proxy(
    *,
    authorization: str | None = None,
    answer: bytes = b"HTTP/1.1 200 Connection established\r\n\r\n",
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[HttpProxy]:
    """Serve a proxy that sends `answer` when a tunnel is open. `authorization` is the value that it requires."""
    proxy = HttpProxy(authorization, answer)
    async with serve_raw(proxy.handle, tls=tls) as server:
        proxy.port = server.port
        yield proxy
