"""A real MCP server: `mcp_server.py FOLDER ERA` over stdio, and `serve_http` over streamable HTTP on a port.

It writes the method of every request to `FOLDER/requests`. In the `legacy` era it supports only the protocol before
2026, with a handshake, sessions, and notifications without a subscription.
"""

import os
import sys
from pathlib import Path
from typing import Any

import anyio
from mcp import MCPError
from mcp.server.lowlevel import NotificationOptions
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.runner import serve_loop
from mcp.server.stdio import stdio_server
from mcp.types import (
    METHOD_NOT_FOUND,
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import BaseModel

server = MCPServer("program", log_level="CRITICAL")


def record_requests(folder: Path, era: str) -> None:
    async def record(context: Any, call_next: Any) -> Any:
        with (folder / "requests").open("a") as requests:
            requests.write(f"{context.method}\n")
        if era == "legacy" and context.method == "server/discover":
            raise MCPError(METHOD_NOT_FOUND, "Method not found")
        return await call_next(context)

    server.middleware.append(record)


class City(BaseModel):
    city: str
    height: float | None


@server.tool()
def add(one: int, other: int) -> int:
    """Add two numbers."""
    return one + other


@server.tool(name="look.up")
def look_up(city: str) -> City:
    """Find a city."""
    return City(city=city, height=None)


@server.tool()
def count(to: int) -> list[int]:
    return list(range(to))


@server.tool()
def fail(message: str) -> str:
    """Raise an error."""
    raise ToolError(message)


@server.tool(structured_output=False)
def show() -> CallToolResult:
    """Return one block of each content type."""
    blocks: list[ContentBlock] = [
        TextContent(text="Look:"),
        ImageContent(data="aW1hZ2U=", mime_type="image/png"),
        AudioContent(data="c291bmQ=", mime_type="audio/wav"),
        EmbeddedResource(resource=TextResourceContents(uri="note://1", text="a note")),
        EmbeddedResource(resource=BlobResourceContents(uri="file://2", blob="aW1hZ2U=", mime_type="image/gif")),
        EmbeddedResource(resource=BlobResourceContents(uri="file://3", blob="emlw", mime_type="application/zip")),
        ResourceLink(name="more", uri="https://example.org/more"),
    ]
    return CallToolResult(content=blocks, structured_content={"a": None, "b": [1]}, is_error=True)


@server.tool()
async def work(context: Context) -> str:
    """Report progress and return the idempotency key of the call."""
    await context.report_progress(1, 2, "half way")
    meta = context.request_context.meta or {}
    return str(meta.get("antiphon/idempotency-key"))


@server.tool()
async def grow(name: str, context: Context) -> str:
    """Add a tool and notify the client."""
    server.add_tool(lambda: "new", name=name, description="Return a text.", structured_output=False)
    await context.notify_tools_changed()
    await context.session.send_tool_list_changed()
    return "grown"


@server.tool()
def die() -> str:
    """Die in the middle of the call."""
    os._exit(9)


@server.tool()
async def hang() -> str:
    """Never answer."""
    await anyio.sleep_forever()
    return ""


async def serve_legacy_stdio() -> None:
    lowlevel = server._lowlevel_server
    async with stdio_server() as (reading, writing), lowlevel.lifespan(lowlevel) as state:
        options = lowlevel.create_initialization_options(NotificationOptions(tools_changed=True))
        await serve_loop(lowlevel, reading, writing, lifespan_state=state, init_options=options)


def serve_http(folder: Path, era: str, port: int) -> None:
    record_requests(folder, era)
    anyio.run(lambda: server.run_streamable_http_async(port=port))


def serve_stdio(folder: Path, era: str) -> None:
    record_requests(folder, era)
    if era == "legacy":
        anyio.run(serve_legacy_stdio)
    else:
        server.run("stdio")


if __name__ == "__main__":
    serve_stdio(Path(sys.argv[1]), sys.argv[2])
