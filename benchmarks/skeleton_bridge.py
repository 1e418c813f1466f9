"""The minimal work of a bridge from Chat Completions to the Responses API, as the base of comparison.

It decodes the request into small structs, translates the items and tools, calls the upstream once, and encodes the same
answer as our server. It has no authentication, log, error handling or store. There are two of them, which differ in the
HTTP client only: aiohttp, or `LeanConnection`, which parses with httptools and handles no failures.

    python -m benchmarks.skeleton_bridge aiohttp|lean PORT UPSTREAM_PORT
"""

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import httptools
import msgspec
from msgspec import Struct

from benchmarks.client import HOST
from benchmarks.skeleton import (
    STREAM_HEADERS,
    EventEncoder,
    InputItem,
    Request,
    Usage,
    begin,
    decode,
    encode,
    finish,
    read_body,
    send_json,
    serve,
)

_PATH = "/v1/chat/completions"


class Message(Struct, frozen=True):
    content: str | None = None


class Choice(Struct):
    delta: Message = Message()
    message: Message = Message()


class ChatUsage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class Completion(Struct):
    """A whole answer, or a chunk of a stream."""

    choices: list[Choice]
    usage: ChatUsage | None = None


decode_completion = msgspec.json.Decoder(Completion).decode

Call = Callable[[bytes], AsyncIterator[bytes]]
"""Send a body to the upstream and yield the reads of the answer."""


def translate(request: Request) -> bytes:
    items = [InputItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [translate_item(item) for item in items],
        "stream": request.stream,
    }
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in request.tools
        ]
    return encode(body)


def translate_item(item: InputItem) -> dict[str, Any]:
    if item.type == "function_call":
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        return {"role": "assistant", "tool_calls": [call]}
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
    content = item.content if isinstance(item.content, str) else "".join(part.text for part in item.content)
    return {"role": item.role, "content": content}


def translate_usage(usage: ChatUsage | None) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) if usage else Usage(0, 0, 0)


async def app(call: Call, scope: Any, receive: Any, send: Any) -> None:
    body = await read_body(receive)
    if not body:
        await send_json(b"{}", send)
        return
    request = decode(body)
    if request.stream:
        await stream(request, call(translate(request)), send)
        return
    answer = decode_completion(b"".join([read async for read in call(translate(request))]))
    text = answer.choices[0].message.content or ""
    await send_json(encode(finish(begin(request), text, translate_usage(answer.usage))), send)


async def stream(request: Request, reads: AsyncIterator[bytes], send: Any) -> None:
    encoder = EventEncoder(request)
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    await send({"type": "http.response.body", "body": encoder.start(), "more_body": True})
    rest = b""
    usage = None
    async for read in reads:
        *events, rest = (rest + read).split(b"\n\n")
        pieces: list[str] = []
        for event in events:
            if event == b"data: [DONE]":
                continue
            chunk = decode_completion(event[6:])
            usage = chunk.usage or usage
            if chunk.choices and (piece := chunk.choices[0].delta.content):
                pieces.append(piece)
        if pieces:
            await send({"type": "http.response.body", "body": encoder.add(pieces), "more_body": True})
    await send({"type": "http.response.body", "body": encoder.finish(translate_usage(usage)), "more_body": False})


# Clients


def make_aiohttp_call(port: int) -> Call:
    import aiohttp  # not loaded by the other bridge

    sessions: list[aiohttp.ClientSession] = []

    async def call(body: bytes) -> AsyncIterator[bytes]:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False))
        headers = {"content-type": "application/json"}
        async with sessions[0].post(f"http://{HOST}:{port}{_PATH}", data=body, headers=headers) as answer:
            while read := await answer.content.readany():
                yield read

    return call


class LeanConnection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self) -> None:
        self._reads: list[bytes] = []
        self._done = False
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def on_body(self, body: bytes) -> None:
        self._reads.append(body)

    def on_message_complete(self) -> None:
        self._done = True

    def send(self, body: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._done = False
        head = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (_PATH.encode(), HOST.encode(), len(body)) + body)

    async def read(self) -> bytes:
        """Return everything that has arrived, or nothing at the end of the answer."""
        while not self._reads and not self._done:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        reads, self._reads = self._reads, []
        return b"".join(reads)


def make_lean_call(port: int) -> Call:
    idle: list[LeanConnection] = []

    async def call(body: bytes) -> AsyncIterator[bytes]:
        if idle:
            connection = idle.pop()
        else:
            _, connection = await asyncio.get_running_loop().create_connection(LeanConnection, HOST, port)
        connection.send(body)
        while read := await connection.read():
            yield read
        idle.append(connection)

    return call


CALLS = {"aiohttp": make_aiohttp_call, "lean": make_lean_call}

if __name__ == "__main__":
    serve(functools.partial(app, CALLS[sys.argv[1]](int(sys.argv[3]))), int(sys.argv[2]))
