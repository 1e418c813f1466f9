"""A connection to an MCP server that does not do its part: nobody waits for it for ever."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.errors import AntiphonError, UpstreamError, UpstreamTimeout
from antiphon.tools.mcp_connection import Connect, Connection, connect_http, connect_stdio
from support.idle_clock import count_idle_time

PROGRAM = Path(__file__).parent / "mcp_mute_program.py"
PATIENCE_SECONDS = 20
INITIALIZED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "clinging", "version": "1"},
}


@asynccontextmanager
async def connected(connect: Connect, *, patience: float) -> AsyncIterator[Connection]:
    connection = Connection("mute", connect, lambda: None, patience=patience)
    await connection.open()
    async with asyncio.timeout(PATIENCE_SECONDS):
        try:
            yield connection
        finally:
            await connection.close()


@pytest.mark.parametrize(
    ("mode", "patience", "kind", "reason"),
    [
        ("silent", 0.2, UpstreamTimeout, "The MCP server mute did not list its tools in 0.2 s."),
        ("circle", 20.0, UpstreamError, "The MCP server mute lists its tools in a circle."),
    ],
)
async def test_a_list_that_has_no_end_is_an_error(
    mode: str, patience: float, kind: type[AntiphonError], reason: str
) -> None:
    connect = connect_stdio(sys.executable, [str(PROGRAM), mode], None, None)
    async with connected(connect, patience=patience) as connection:
        with pytest.raises(kind) as raised:
            await connection.list_tools()
    assert (type(raised.value), raised.value.message) == (kind, reason)


@asynccontextmanager
async def serve_clinging() -> AsyncIterator[str]:
    """A server over HTTP that answers everything but a goodbye."""
    tasks: set[asyncio.Task[Any]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().lower().split("\r\n")
                lengths = [int(line.partition(":")[2]) for line in lines if line.startswith("content-length:")]
                body = await reader.readexactly(sum(lengths))
                if not head.startswith(b"DELETE"):
                    writer.write(reply_to(json.loads(body) if body else {}))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    finally:
        server.close()
        await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)


def reply_to(message: dict[str, Any]) -> bytes:
    if "id" not in message:
        status = b"202 Accepted" if message else b"405 Method Not Allowed"
        return b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status
    found = {"initialize": INITIALIZED, "tools/list": {"tools": []}}.get(message["method"])
    told = {"result": found} if found is not None else {"error": {"code": -32601, "message": "Method not found"}}
    body = json.dumps({"jsonrpc": "2.0", "id": message["id"], **told}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nmcp-session-id: s\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


async def test_a_server_that_does_not_answer_a_goodbye_is_left() -> None:
    count_idle_time(asyncio.get_running_loop())
    async with serve_clinging() as url, connected(connect_http(url, None), patience=0.2) as connection:
        assert await connection.list_tools() == []
