"""An MCP server on a loopback socket that answers as a test tells it to. It needs no process and no `mcp` package.

    async with serve_mcp({"add": add}) as server:
        ...                            # the code under test connects to server.url
        assert server.calls == [("add", {"one": 1})]

A tool is a function of the arguments that returns the result of `tools/call`: a text, or a result object. It may be a
coroutine function. The server supports streamable HTTP at `url`, and the older transport with server-sent events at
`sse_url`.
"""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

Tool = Callable[[dict[str, Any]], Any]
JSON = "application/json"


class RpcError(Exception):
    """The JSON-RPC error to answer with."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class WireServer:
    """The server of `serve_mcp`. Its attributes can be changed between requests.

    `status` answers every request with this status. `redirect` answers with 307 and this location. `annotations`,
    `schemas` and `output_schemas` are for the tools they name. `results` are invalid results of calls. `replies` has
    fields that replace those of the reply to a method.
    With `session`, requests need this session id.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.tools = dict(tools)
        self.annotations: dict[str, dict[str, Any]] = {}
        self.schemas: dict[str, Any] = {}
        self.output_schemas: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        self.replies: dict[str, dict[str, Any]] = {}
        self.session: str | None = None
        self.status: int | None = None
        self.redirect: str | None = None
        self.methods: list[str] = []
        self.calls: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self.connections = 0
        self._streams: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    @property
    def sse_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/sse"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    await self._answer_next(reader, writer)
        finally:
            writer.close()
            self._tasks.discard(task)

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _answer_next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")[:-2]
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.headers.append(headers)
        if self.status is not None or self.redirect is not None:
            location = {"Location": self.redirect} if self.redirect is not None else {}
            await self._send(writer, self.status or 307, b"", location)
        elif method == "GET" and path == "/sse":
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nevent: endpoint\ndata: /messages\n\n"
            )
            await writer.drain()
            self._streams.append(writer)
            await reader.read()
            raise ConnectionError
        elif method != "POST" or path == "/sse":
            await self._send(writer, 405, b"")
        elif headers.get("mcp-session-id", self.session) != self.session:
            await self._send(writer, 404, b"")
        else:
            await self._answer_message(json.loads(body), path, writer)

    async def _answer_message(self, message: dict[str, Any], path: str, writer: asyncio.StreamWriter) -> None:
        self.methods.append(message["method"])
        if "id" not in message:
            await self._send(writer, 202, b"")
            return
        fields = {"jsonrpc": "2.0", "id": message["id"], **await self._reply(message)}
        reply = json.dumps(fields | self.replies.get(message["method"], {})).encode()
        if path == "/messages":
            await self._send(writer, 202, b"")
            self._streams[-1].write(b"event: message\ndata: " + reply + b"\n\n")
            await self._streams[-1].drain()
        else:
            begins = self.session is not None and message["method"] == "initialize"
            await self._send(writer, 200, reply, {"Mcp-Session-Id": str(self.session)} if begins else None)

    async def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        match message["method"]:
            case "initialize":
                info = {"name": "wire", "version": "1"}
                result: Any = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
            case "tools/list":
                result = {"tools": [self._describe(name) for name in self.tools]}
            case "tools/call":
                try:
                    result = await self._call(message["params"])
                except RpcError as error:
                    return {"error": {"code": error.code, "message": str(error)}}
            case _:
                return {"error": {"code": -32601, "message": "Method not found"}}
        return {"result": result}

    def _describe(self, name: str) -> dict[str, Any]:
        schema = self.schemas.get(name, {"type": "object", "properties": {}})
        hints = {"annotations": self.annotations[name]} if name in self.annotations else {}
        if name in self.output_schemas:
            hints["outputSchema"] = self.output_schemas[name]
        return {"name": name, "description": f"The tool {name}.", "inputSchema": schema, **hints}

    async def _call(self, params: dict[str, Any]) -> Any:
        self.calls.append((params["name"], params.get("arguments")))
        if params["name"] in self.results:
            return self.results[params["name"]]
        tool = self.tools.get(params["name"])
        if tool is None:
            raise RpcError(-32602, f"Unknown tool: {params['name']}")
        result = tool(params.get("arguments") or {})
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, dict) else {"content": [{"type": "text", "text": str(result)}]}

    async def _send(
        self, writer: asyncio.StreamWriter, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        lines = [f"HTTP/1.1 {status} Status", f"Content-Length: {len(body)}", f"Content-Type: {JSON}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()


@asynccontextmanager
async def serve_mcp(tools: Mapping[str, Tool]) -> AsyncIterator[WireServer]:
    """Serve these tools until the block ends."""
    wire = WireServer(tools)
    server = await asyncio.start_server(wire.handle, "127.0.0.1", 0)
    wire.port = server.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        server.close()
        await wire.stop()
        await server.wait_closed()
