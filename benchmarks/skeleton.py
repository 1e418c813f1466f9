"""The minimal work of a Responses API server, as the base of comparison.

It decodes the body into small structs, encodes the same sequence of events one by one, and sends each batch in one
write. It has no authentication, log, error handling or store.

    python -m benchmarks.skeleton PORT
"""

import asyncio
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import uvicorn
from msgspec import Struct

from benchmarks.workloads import ANSWERS

# Request types


class InputPart(Struct):
    text: str = ""


class InputItem(Struct):
    type: str = "message"
    role: str = ""
    content: str | list[InputPart] = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str = ""


class Tool(Struct, tag_field="type", tag="function"):
    name: str
    parameters: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class Request(Struct):
    model: str
    input: str | list[InputItem]
    stream: bool = False
    store: bool = True
    tools: list[Tool] = []


# Response types


class Part(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[str] = []
    logprobs: list[str] = []


class Item(Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[Part]
    role: str = "assistant"


class InputDetails(Struct, frozen=True):
    cached_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens_details: OutputDetails = OutputDetails()


class Format(Struct, frozen=True, tag_field="type", tag="text"):
    pass


class Text(Struct, frozen=True):
    format: Format = Format()


class Response(Struct, kw_only=True):
    """A response with all required fields."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    error: str | None = None
    incomplete_details: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: Text = Text()
    tool_choice: str = "auto"
    tools: list[Tool] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    truncation: str = "disabled"
    usage: Usage | None = None
    metadata: dict[str, str] = {}
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class Event(Struct, tag_field="type"):
    sequence_number: int


class Created(Event, tag="response.created"):
    response: Response


class InProgress(Event, tag="response.in_progress"):
    response: Response


class Completed(Event, tag="response.completed"):
    response: Response


class ItemAdded(Event, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(Event, tag="response.output_item.done"):
    output_index: int
    item: Item


class PartAdded(Event, tag="response.content_part.added"):
    item_id: str
    output_index: int
    content_index: int
    part: Part


class PartDone(Event, tag="response.content_part.done"):
    item_id: str
    output_index: int
    content_index: int
    part: Part


class TextDelta(Event, tag="response.output_text.delta"):
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[str] = []


class TextDone(Event, tag="response.output_text.done"):
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[str] = []


decode = msgspec.json.Decoder(Request).decode
encode = msgspec.json.Encoder().encode

USAGE = Usage(10, 20, 30)
STREAM_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


def encode_event(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), encode(event))


def begin(request: Request) -> Response:
    return Response(
        id=f"resp_{secrets.token_hex(22)}",
        created_at=int(time.time()),
        model=request.model,
        store=request.store,
        tools=request.tools,
    )


def finish(response: Response, text: str, usage: Usage, item_id: str = "") -> Response:
    item = Item(item_id or f"msg_{secrets.token_hex(22)}", "completed", [Part(text)])
    return msgspec.structs.replace(
        response, status="completed", completed_at=int(time.time()), output=[item], usage=usage
    )


class EventEncoder:
    """The events of one response, encoded in order."""

    def __init__(self, request: Request) -> None:
        self._response = begin(request)
        self._item_id = f"msg_{secrets.token_hex(22)}"
        self._pieces: list[str] = []
        self._number = 0

    def start(self) -> bytes:
        self._number = 2
        return encode_event(Created(0, self._response)) + encode_event(InProgress(1, self._response))

    def add(self, pieces: Sequence[str]) -> bytes:
        """Encode the deltas of one read. The first of them open the item and its part."""
        number, item_id = self._number, self._item_id
        encoded: list[bytes] = []
        if not self._pieces:
            encoded.append(encode_event(ItemAdded(number, 0, Item(item_id, "in_progress", []))))
            encoded.append(encode_event(PartAdded(number + 1, item_id, 0, 0, Part(""))))
            number += 2
        for piece in pieces:
            encoded.append(encode_event(TextDelta(number, item_id, 0, 0, piece)))
            number += 1
        self._pieces += pieces
        self._number = number
        return b"".join(encoded)

    def finish(self, usage: Usage) -> bytes:
        number, item_id = self._number, self._item_id
        response = finish(self._response, "".join(self._pieces), usage, item_id)
        item = response.output[0]
        part = item.content[0]
        last = (
            TextDone(number, item_id, 0, 0, part.text),
            PartDone(number + 1, item_id, 0, 0, part),
            ItemDone(number + 2, 0, item),
            Completed(number + 3, response),
        )
        return b"".join(map(encode_event, last)) + b"data: [DONE]\n\n"


def encode_stream(request: Request) -> Iterator[tuple[bytes, bool]]:
    """Yield the event stream, one piece per upstream read. The boolean is True if more pieces follow."""
    encoder = EventEncoder(request)
    yield encoder.start(), True
    for pieces in ANSWERS[request.model]:
        yield encoder.add(pieces), True
    yield encoder.finish(USAGE), False


async def read_body(receive: Any) -> bytes:
    message = await receive()
    body: bytes = message["body"]
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    return body


async def send_json(answer: bytes, send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer, "more_body": False})


async def app(scope: Any, receive: Any, send: Any) -> None:
    body = await read_body(receive)
    request = decode(body) if body else Request("short", "")
    if request.stream:
        await stream(request, send)
        return
    text = "".join(piece for pieces in ANSWERS[request.model] for piece in pieces)
    await send_json(encode(finish(begin(request), text, USAGE)), send)


async def stream(request: Request, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    for piece, more in encode_stream(request):
        await send({"type": "http.response.body", "body": piece, "more_body": more})
        # The reads of a real upstream arrive in separate event-loop iterations.
        await asyncio.sleep(0)


def serve(application: Any, port: int) -> None:
    uvicorn.run(
        application,
        port=port,
        interface="asgi3",
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
    )


if __name__ == "__main__":
    serve(app, int(sys.argv[1]))
