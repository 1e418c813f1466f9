"""An MCP server, `mcp_mute_program.py silent|circle`: asked for its tools, it says nothing, or comes to no end."""

import json
import sys
from typing import Any

mode = sys.argv[1]


def answer(method: str) -> dict[str, Any] | None:
    if method == "initialize":
        server = {"name": "mute", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list" and mode == "circle":
        tool = {"name": "add", "inputSchema": {"type": "object"}}
        return {"tools": [tool], "nextCursor": "more"}
    return None


for line in sys.stdin:
    message = json.loads(line)
    told = {"result": answer(message["method"])}
    if told["result"] is None:
        told = {"error": {"code": -32601, "message": "Method not found"}}
    if "id" in message and (mode, message["method"]) != ("silent", "tools/list"):
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **told}) + "\n")
        sys.stdout.flush()
