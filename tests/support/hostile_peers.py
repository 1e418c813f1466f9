"""Servers that flood or stall their clients: an MCP server, a search provider, web pages, images and embeddings.

The path of a URL names the behaviour: `/mcp/endless-list`, `/pages/gzip-bomb`. All floods are bounded, and only
loopback is used.
"""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

from support.raw_server import Peer

MB = 1024 * 1024
CHUNK = b"x" * 65536
FLOOD_BYTES = 80 * MB
JSON = b"application/json"
EVENTS = b"text/event-stream"
TOOL = {"name": "add", "description": "Adds.", "inputSchema": {"type": "object", "properties": {}}}

Answer = Callable[[Peer, dict[str, Any]], Awaitable[None]]


async def send(peer: Peer, body: bytes, kind: bytes = JSON, *headers: bytes, status: bytes = b"200 OK") -> None:
    lines = (b"Content-Type: " + kind, b"Content-Length: %d" % len(body), *headers)
    await peer.send(b"HTTP/1.1 %b\r\n" % status + b"\r\n".join(lines) + b"\r\n\r\n", body)


async def flood(peer: Peer, kind: bytes, start: bytes, chunk: bytes = CHUNK) -> None:
    """Send a body that does not end, up to `FLOOD_BYTES`."""
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nConnection: close\r\n\r\n" % kind + start)
    for _ in range(FLOOD_BYTES // len(chunk)):
        peer.writer.write(chunk)
        await peer.writer.drain()


async def stall(peer: Peer, kind: bytes = JSON) -> None:
    """Send the start of a body, and then nothing."""
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: 1000\r\n\r\n{" % kind)
    await peer.until_closed()


async def drip(peer: Peer, kind: bytes) -> None:
    """Send a byte from time to time, until the client closes the connection."""
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: 100000\r\n\r\n" % kind)
    for _ in range(600):
        await peer.send(b"<")
        await asyncio.sleep(0.1)  # the peer is slow


def nest(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


class HostilePeers:
    """Answers each connection by the path of its requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def answer(self, peer: Peer) -> None:
        while True:
            request = await peer.read_request()
            head, _, body = request.partition(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode().partition("?")[0]
            self.requests.append(path)
            message = json.loads(body) if body.startswith(b"{") else {}
            kind, _, behaviour = path.strip("/").partition("/")
            if kind == "mcp":
                if head.startswith(b"POST"):
                    await self._answer_mcp(peer, behaviour, message)
                else:
                    await send(peer, b"", status=b"405 Method Not Allowed")
            else:
                await self._answer_http(peer, behaviour or kind)

    async def _answer_mcp(self, peer: Peer, behaviour: str, message: dict[str, Any]) -> None:
        method = message.get("method", "")
        if "id" not in message:
            await send(peer, b"", status=b"202 Accepted")
        elif method == "initialize":
            info = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            await self._reply(peer, message, info | {"serverInfo": {"name": "hostile", "version": "1"}})
        elif method == "tools/list":
            await self._list_tools(peer, behaviour, message)
        elif method == "tools/call":
            await self._call_tool(peer, behaviour, message)
        else:
            error = {"code": -32601, "message": "Method not found"}
            await send(peer, json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}).encode())

    async def _call_tool(self, peer: Peer, behaviour: str, message: dict[str, Any]) -> None:
        if behaviour == "large-result":
            await self._reply(peer, message, {"content": [{"type": "text", "text": "x" * (50 * MB)}]})
        elif behaviour == "endless-events":
            await flood(peer, EVENTS, b"", b": ping\n\n" * 8192)
        elif behaviour == "endless-notifications":
            note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 900}}
            await flood(peer, EVENTS, b"", b"data: %b\n\n" % json.dumps(note).encode() * 64)
        elif behaviour == "deep-result":
            result = f'{{"content":[{{"type":"text","text":"x"}}],"structuredContent":{nest(100_000)}}}'
            await send(peer, f'{{"jsonrpc":"2.0","id":{json.dumps(message["id"])},"result":{result}}}'.encode())
        elif behaviour == "many-parts":
            await self._reply(peer, message, {"content": [{"type": "text", "text": ""}] * 400_000})
        elif behaviour == "private-redirect":
            await send(peer, b"", JSON, b"Location: http://169.254.169.254/", status=b"307 Temporary Redirect")
        else:
            await stall(peer)

    async def _list_tools(self, peer: Peer, behaviour: str, message: dict[str, Any]) -> None:
        if behaviour == "endless-list":
            await self._reply(peer, message, {"tools": [TOOL] * 100, "nextCursor": "again"})
        elif behaviour == "many-tools":
            tools = [TOOL | {"name": f"t{number}"} for number in range(100_000)]
            await self._reply(peer, message, {"tools": tools})
        elif behaviour == "silent":
            await peer.until_closed()
        else:
            await self._reply(peer, message, {"tools": [TOOL]})

    async def _reply(self, peer: Peer, message: dict[str, Any], result: dict[str, Any]) -> None:
        await send(peer, json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode())

    async def _answer_http(self, peer: Peer, behaviour: str) -> None:
        if behaviour == "search":
            await flood(peer, JSON, b'{"results":[{"title":"', CHUNK)
        elif behaviour == "endless":
            await flood(peer, b"text/html", b"<html><body>")
        elif behaviour == "gzip-bomb":
            bomb = gzip.compress(b"\0" * (100 * MB))
            await send(peer, bomb, b"text/html", b"Content-Encoding: gzip")
        elif behaviour == "drip":
            await drip(peer, b"text/html")
        elif behaviour == "nested":
            await send(peer, b"<div><table><b><a>" * 200_000, b"text/html")
        elif behaviour.endswith("images/generations"):
            await flood(peer, JSON, b'{"data":[{"b64_json":"')
        elif behaviour.endswith("embeddings"):
            await flood(peer, JSON, b'{"data":[{"index":0,"embedding":[', b"1," * 32768)
        else:
            await send(peer, b"{}", status=b"404 Not Found")
