"""Connections to MCP servers that do not answer or do not end."""

import asyncio
import json
import logging
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.errors import AntiphonError, UpstreamError, UpstreamTimeout
from antiphon.tools import mcp_connection
from antiphon.tools.mcp_connection import Connect, McpConnection, connect_http, connect_stdio
from support.idle_clock import count_idle_time

PROGRAM = Path(__file__).parents[1] / "support" / "mcp_faulty_server.py"
WAIT_SECONDS = 20
INITIALIZED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "unresponsive", "version": "1"},
}


@asynccontextmanager
async def connected(connect: Connect, *, seconds: float) -> AsyncIterator[McpConnection]:
    connection = McpConnection("faulty", connect, lambda: None, timeout=seconds)
    await connection.open()
    async with asyncio.timeout(WAIT_SECONDS):
        try:
            yield connection
        finally:
            await connection.close()


@pytest.mark.parametrize(
    ("mode", "seconds", "kind", "reason"),
    [
        ("silent", 0.2, UpstreamTimeout, "The MCP server faulty did not list its tools in 0.2 s."),
        ("endless", 20.0, UpstreamError, "The MCP server faulty lists its tools without end: a cursor repeats."),
        ("growing", 20.0, UpstreamError, "The MCP server faulty lists more than 1000 bytes of tools."),
    ],
)
async def test_endless_tool_list_is_an_error(
    mode: str, seconds: float, kind: type[AntiphonError], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_connection, "MAX_LIST_BYTES", 1000)
    connect = connect_stdio(sys.executable, [str(PROGRAM), mode], None, None)
    async with connected(connect, seconds=seconds) as connection:
        with pytest.raises(kind) as raised:
            await connection.list_tools()
    assert (type(raised.value), raised.value.message) == (kind, reason)


@asynccontextmanager
async def serve_http(*, ends_sessions: bool = True) -> AsyncIterator[str]:
    """Serve over HTTP. Without `ends_sessions` there is no answer to DELETE, which ends the session."""
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
                if ends_sessions or not head.startswith(b"DELETE"):
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
        await asyncio.wait(tasks, timeout=WAIT_SECONDS)


def reply_to(message: dict[str, Any]) -> bytes:
    if "id" not in message:
        status = b"202 Accepted" if message else b"405 Method Not Allowed"
        return b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status
    found = {"initialize": INITIALIZED, "tools/list": {"tools": []}}.get(message["method"])
    reply = {"result": found} if found is not None else {"error": {"code": -32601, "message": "Method not found"}}
    body = json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nmcp-session-id: s\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


async def test_header_that_cannot_be_sent_is_in_no_error() -> None:
    async with serve_http() as url:
        connection = McpConnection("faulty", connect_http(url, {"x-key": "key-123456\n"}), None)
        with pytest.raises(UpstreamError) as raised:
            await connection.open()
    assert raised.value.message == "The MCP server faulty cannot be used: LocalProtocolError"
    assert "key-123456" not in "".join(traceback.format_exception(raised.value))


async def test_lost_connection_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon")

    @asynccontextmanager
    async def connect(state: mcp_connection.McpConnectionState) -> AsyncIterator[Any]:
        async with connect_http(url, None)(state) as streams:
            yield streams
        raise ExceptionGroup("ended", [OSError("first line\nsecond line")])

    async with serve_http() as url, connected(connect, seconds=20):
        pass
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [
        ("the connection to the MCP server faulty was lost: OSError: first line", None)
    ]


async def test_close_does_not_wait_for_an_unresponsive_server() -> None:
    count_idle_time(asyncio.get_running_loop())
    async with (
        serve_http(ends_sessions=False) as url,
        connected(connect_http(url, None), seconds=0.2) as connection,
    ):
        assert await connection.list_tools() == []
