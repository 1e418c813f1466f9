"""An upstream with prepared answers, for agents and bridges.

It supports the Responses API and Chat Completions, streamed and not streamed. It reads only the model and the number of
tool outputs of a request, and writes prepared bytes.

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
from benchmarks.task_backend import READ_INTERVAL, Reads, make_turns
from benchmarks.tasks import OUTPUT, TASKS
from benchmarks.workloads import ANSWERS

Answer = Sequence[bytes]
"""The writes of an answer, in order."""

_CREATED = 1_760_000_000
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MODEL = re.compile(rb'"model": ?"([^"]+)"')
_STREAM = re.compile(rb'"stream": ?true')
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


def _frame(events: Sequence[bytes]) -> bytes:
    """Encode each event as an HTTP chunk, as servers do."""
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


def make_stream(reads: Sequence[Sequence[bytes]]) -> Answer:
    first, *others = map(_frame, reads)
    pieces = [_STREAM_HEAD + first, *others]
    pieces[-1] += _LAST_CHUNK
    return pieces


def make_whole(body: bytes, *, status: str = "200 OK") -> Answer:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return [head.encode() + body]


def make_response_answers(model: str, number: int, reads: Reads) -> tuple[Answer, Answer]:
    """Return a turn in the Responses API: streamed, and not streamed."""
    response = Response(id=f"resp_{number:044x}", created_at=_CREATED, model=model)
    composer = Composer(response, new_id=lambda prefix: f"{prefix}_{number:044x}", now=lambda: _CREATED)
    first = composer.start()
    events = [[sse.encode_event(event) for event in composer.compose(batch)] for batch in reads]
    events[0] = [*map(sse.encode_event, first), *events[0]]
    return make_stream(events), make_whole(codec.encode(composer.response))


def make_chat_answers(model: str, reads: Sequence[Sequence[str]]) -> tuple[Answer, Answer]:
    """Return a turn in Chat Completions: streamed, and not streamed."""
    usage = {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}

    def encode(choices: list[dict[str, Any]], kind: str, **more: Any) -> bytes:
        answer = {"id": "chatcmpl-1", "object": kind, "created": _CREATED, "model": model, "choices": choices}
        return json.dumps(answer | more, separators=(",", ":")).encode()

    def encode_chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return b"data: %b\n\n" % encode([choice], "chat.completion.chunk")

    chunks = [[encode_chunk({"content": piece}) for piece in pieces] for pieces in reads]
    chunks[0] = [encode_chunk({"role": "assistant", "content": ""}), *chunks[0]]
    last = b"data: %b\n\n" % encode([], "chat.completion.chunk", usage=usage)
    chunks[-1] = [*chunks[-1], encode_chunk({}, "stop"), last, sse.DONE]
    message = {"role": "assistant", "content": "".join(piece for pieces in reads for piece in pieces)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return make_stream(chunks), make_whole(encode([choice], "chat.completion", usage=usage))


def prepare_answers() -> dict[tuple[str, str, int, bool], Answer]:
    """Return every answer by path, model, number of finished calls, and `stream`."""
    answers: dict[tuple[str, str, int, bool], Answer] = {}
    for task in TASKS:
        for calls, reads in enumerate(make_turns(task)):
            pair = make_response_answers(task.name, calls, reads)
            answers |= {("/v1/responses", task.name, calls, not whole): pair[whole] for whole in (False, True)}
    for model, reads_of_text in ANSWERS.items():
        pair = make_chat_answers(model, reads_of_text)
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
            self._write(self._find_answer(request, end))

    def _find_answer(self, request: bytes, end: int) -> Answer:
        method, target = request.split(b" ", 2)[:2]
        if method == b"GET":
            return make_whole(b"{}")
        model = _MODEL.search(request, end)
        key = (
            target.decode(),
            model[1].decode() if model else "",
            request.count(OUTPUT.encode(), end),
            bool(_STREAM.search(request, end)),
        )
        refusal = json.dumps({"error": {"message": f"no answer for {key}", "type": "invalid_request_error"}})
        return self._answers.get(key) or make_whole(refusal.encode(), status="400 Bad Request")

    def _write(self, answer: Answer) -> None:
        first, *rest = answer
        self._transport.write(first)
        if rest:
            self._timer = asyncio.get_running_loop().call_later(READ_INTERVAL, self._write, rest)


async def serve(port: int) -> None:
    answers = prepare_answers()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answers), HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
