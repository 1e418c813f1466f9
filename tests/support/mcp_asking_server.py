"""An MCP server over stdio whose tool sends a request to the client and returns the reply as text.

The argument `method` of the tool `ask` is the method of that request. The server ignores that the client has not
declared the capability for it.
"""

import json
import sys
from typing import Any

TOOL = {
    "name": "ask",
    "inputSchema": {"type": "object", "properties": {"method": {"type": "string"}}, "required": ["method"]},
}
PARAMS: dict[str, Any] = {
    "sampling/createMessage": {
        "messages": [{"role": "user", "content": {"type": "text", "text": "Hello?"}}],
        "maxTokens": 10,
    },
    "elicitation/create": {
        "message": "Your name?",
        "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
    "roots/list": {},
}


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def ask(method: str) -> dict[str, Any]:
    send({"id": "question", "method": method, "params": PARAMS[method]})
    for line in sys.stdin:
        reply: dict[str, Any] = json.loads(line)
        if reply.get("id") == "question":
            return reply
    raise SystemExit


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        server = {"name": "asking", "version": "1"}
        return {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server}}
    if method == "tools/list":
        return {"result": {"tools": [TOOL]}}
    if method == "tools/call":
        reply = ask(params["arguments"]["method"])
        text = json.dumps(reply.get("error", reply.get("result")))
        return {"result": {"content": [{"type": "text", "text": text}]}}
    return {"error": {"code": -32601, "message": "Method not found"}}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        send({"id": message["id"], **answer(message["method"], message.get("params") or {})})
