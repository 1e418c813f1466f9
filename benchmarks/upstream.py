"""A server that has every answer ready in bytes, for what asks another server: agents and bridges.

It speaks the Responses API and Chat Completions, streamed and whole, looks at nothing of a request but its model and
how often its tool was called, and does no work for an answer but to write it.

    python -m benchmarks.upstream PORT
"""

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, cast

import uvloop

from antiphon.protocol import codec
from antiphon.protocol.response import Response
from antiphon.stream import sse
from antiphon.stream.composer import Composer
from benchmarks.client import HOST
from benchmarks.rehearsal import PAUSE, Reads, rehearse
from benchmarks.tasks import OUTPUT, TASKS
from benchmarks.workloads import ANSWERS

Answer = Sequence[bytes]
"""What is written at once, one after the other."""

_CREATED = 1_760_000_000
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MODEL = re.compile(rb'"model": ?"([^"]+)"')
_STREAM = re.compile(rb'"stream": ?true')
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


def _frame(events: Sequence[bytes]) -> bytes:
    """Each event in an HTTP chunk of its own, as servers send them."""
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


def _stream(reads: Sequence[Sequence[bytes]]) -> Answer:
    first, *others = map(_frame, reads)
    pieces = [_STREAM_HEAD + first, *others]
    pieces[-1] += _LAST_CHUNK
    return pieces


def _whole(body: bytes, *, status: str = "200 OK") -> Answer:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return [head.encode() + body]


def answer_response(model: str, number: int, reads: Reads) -> tuple[Answer, Answer]:
    """A turn in the Responses API: streamed, and whole."""
    response = Response(id=f"resp_{number:044x}", created_at=_CREATED, model=model)
    composer = Composer(response, new_id=lambda prefix: f"{prefix}_{number:044x}", now=lambda: _CREATED)
    begun = composer.start()
    told = [[sse.encode_event(event) for event in composer.compose(batch)] for batch in reads]
    told[0] = [*map(sse.encode_event, begun), *told[0]]
    return _stream(told), _whole(codec.encode(composer.response))


def answer_chat(model: str, reads: Sequence[Sequence[str]]) -> tuple[Answer, Answer]:
    """A turn in Chat Completions: streamed, and whole."""
    usage = {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}

    def encode(choices: list[dict[str, Any]], kind: str, **more: Any) -> bytes:
        answer = {"id": "chatcmpl-1", "object": kind, "created": _CREATED, "model": model, "choices": choices}
        return json.dumps(answer | more, separators=(",", ":")).encode()

    def tell(delta: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return b"data: %b\n\n" % encode([choice], "chat.completion.chunk")

    told = [[tell({"content": piece}) for piece in pieces] for pieces in reads]
    told[0] = [tell({"role": "assistant", "content": ""}), *told[0]]
    last = b"data: %b\n\n" % encode([], "chat.completion.chunk", usage=usage)
    told[-1] = [*told[-1], tell({}, "stop"), last, sse.DONE]
    message = {"role": "assistant", "content": "".join(piece for pieces in reads for piece in pieces)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return _stream(told), _whole(encode([choice], "chat.completion", usage=usage))


def prepare() -> dict[tuple[str, str, int, bool], Answer]:
    """Every answer, by the path, the model, the calls that have been made, and whether it is streamed."""
    answers: dict[tuple[str, str, int, bool], Answer] = {}
    for task in TASKS:
        for made, reads in enumerate(rehearse(task)):
            pair = answer_response(task.name, made, reads)
            answers |= {("/v1/responses", task.name, made, not whole): pair[whole] for whole in (False, True)}
    for model, told in ANSWERS.items():
        pair = answer_chat(model, told)
        answers |= {("/v1/chat/completions", model, 0, not whole): pair[whole] for whole in (False, True)}
    return answers


class Connection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self, answers: dict[tuple[str, str, int, bool], Answer]) -> None:
        self._answers = answers
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._received, 0, end + 2)
        size = end + 4 + (int(length[1]) if length else 0)
        if len(self._received) >= size:
            request = bytes(self._received[:size])
            del self._received[:size]
            self._write(self._choose(request, end))

    def _choose(self, request: bytes, end: int) -> Answer:
        method, target = request.split(b" ", 2)[:2]
        if method == b"GET":
            return _whole(b"{}")
        model = _MODEL.search(request, end)
        key = (
            target.decode(),
            model[1].decode() if model else "",
            request.count(OUTPUT.encode(), end),
            bool(_STREAM.search(request, end)),
        )
        refusal = json.dumps({"error": {"message": f"There is no answer for {key}.", "type": "invalid_request_error"}})
        return self._answers.get(key) or _whole(refusal.encode(), status="400 Bad Request")

    def _write(self, answer: Answer) -> None:
        first, *rest = answer
        self._transport.write(first)
        if rest:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._write, rest)


async def serve(port: int) -> None:
    answers = prepare()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answers), HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
