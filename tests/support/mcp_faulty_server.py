"""An MCP server over stdio with a fault: `silent` does not answer `tools/list`, `endless` repeats its first page.
With `growing`, each page has another cursor.

Usage: `mcp_faulty_server.py silent|endless|growing`.
"""

import itertools
import json
import sys
from typing import Any

mode = sys.argv[1]
cursors = itertools.count()


def answer(method: str) -> dict[str, Any] | None:
    if method == "initialize":
        server = {"name": "faulty", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list" and mode in ("endless", "growing"):
        tool = {"name": "add", "inputSchema": {"type": "object"}}
        return {"tools": [tool], "nextCursor": "more" if mode == "endless" else str(next(cursors))}
    return None


for line in sys.stdin:
    message = json.loads(line)
    reply = {"result": answer(message["method"])}
    if reply["result"] is None:
        reply = {"error": {"code": -32601, "message": "Method not found"}}
    if "id" in message and (mode, message["method"]) != ("silent", "tools/list"):
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}) + "\n")
        sys.stdout.flush()
