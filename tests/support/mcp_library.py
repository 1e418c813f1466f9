"""A real MCP server with resources, prompts and annotated tools: `mcp_library.py FOLDER` over stdio.

Its tool `break_once` ends the process the first time it is called. Every call of it writes its idempotency key to
`FOLDER/keys`.
"""

import os
import sys
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.prompts.base import AssistantMessage, Message, UserMessage
from mcp.types import ToolAnnotations

server = MCPServer("library", log_level="CRITICAL")
folder = Path(sys.argv[1])


@server.resource("note://today", mime_type="text/plain")
def today() -> str:
    """The note of the day."""
    return "Buy milk."


@server.resource("image://dot", mime_type="image/png")
def dot() -> bytes:
    """A picture."""
    return b"image"


@server.resource("note://{name}")
def note(name: str) -> str:
    """A note by name."""
    return f"The note {name}."


@server.prompt()
def review(topic: str, tone: str = "kind") -> list[Message]:
    """Ask for a review."""
    return [UserMessage(f"Review {topic}, be {tone}."), AssistantMessage("Gladly.")]


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def read() -> str:
    """Read."""
    return "read"


@server.tool(annotations=ToolAnnotations(idempotent_hint=True, destructive_hint=True))
def put() -> str:
    """Put."""
    return "put"


@server.tool(annotations=ToolAnnotations(destructive_hint=False))
def append() -> str:
    """Append."""
    return "appended"


@server.tool(annotations=ToolAnnotations(destructive_hint=True))
def delete(name: str) -> str:
    """Delete."""
    return f"deleted {name}"


@server.tool()
def break_once(context: Context) -> str:
    """End the server in the middle of the first call."""
    keys = folder / "keys"
    is_first = not keys.exists()
    with keys.open("a") as file:
        file.write(f"{(context.request_context.meta or {}).get('antiphon/idempotency-key')}\n")
    if is_first:
        os._exit(9)
    return "well"


if __name__ == "__main__":
    server.run("stdio")
