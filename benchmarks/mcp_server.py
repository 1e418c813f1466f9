"""An MCP server with an empty tool, over streamable HTTP on a free loopback port. It prints its URL."""

import socket
import sys

import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("empty", log_level="CRITICAL")


@server.tool()
def empty() -> str:
    """Do nothing."""
    return ""


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp\n")
    sys.stdout.flush()
    config = uvicorn.Config(server.streamable_http_app(json_response=True), log_level="critical")
    uvicorn.Server(config).run(sockets=[listener])
