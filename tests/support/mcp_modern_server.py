"""An MCP server over stdio that knows only the protocol since 2026-07-28. Its tool asks for a name and greets it.

In this protocol a server cannot send requests. A call returns the question, and the client repeats the call with the
answer. With the argument `endless`, the tool asks again after each answer.
"""

import json
import sys
from typing import Any

VERSION = "2026-07-28"
QUESTION = {
    "method": "elicitation/create",
    "params": {
        "mode": "form",
        "message": "Your name?",
        "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
TOOL = {"name": "greet", "inputSchema": {"type": "object", "properties": {}}}


def call(params: dict[str, Any]) -> dict[str, Any]:
    responses = params.get("inputResponses")
    if not responses or sys.argv[1:] == ["endless"]:
        return {"resultType": "input_required", "inputRequests": {"name": QUESTION}, "requestState": "asked"}
    text = f"Hello, {responses['name']['content']['name']}!"
    return {"resultType": "complete", "content": [{"type": "text", "text": text}]}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "server/discover":
        server = {"name": "greeter", "version": "1"}
        found = {"supportedVersions": [VERSION], "capabilities": {"tools": {}}, "serverInfo": server}
        return {"result": {"resultType": "complete", "ttlMs": 0, "cacheScope": "private", **found}}
    if method == "tools/list":
        return {"result": {"resultType": "complete", "ttlMs": 0, "cacheScope": "private", "tools": [TOOL]}}
    if method == "tools/call":
        return {"result": call(params)}
    return {"error": {"code": -32601, "message": f"Method not found: {method}"}}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        reply = {"jsonrpc": "2.0", "id": message["id"], **answer(message["method"], message.get("params") or {})}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
