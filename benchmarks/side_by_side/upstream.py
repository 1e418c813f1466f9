"""The upstream of all compared servers: Chat Completions and the Responses API, with prepared answers.

It reads only the path, the model, `stream` and the number of questions of a request, and writes prepared bytes.

    python -m benchmarks.side_by_side.upstream PORT
"""

import asyncio
import json
import re
import secrets
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import uvloop

from antiphon.protocol.response import Usage
from antiphon.stream.deltas import Delta, Finish, Text, TokenUsage, ToolCall
from benchmarks import upstream
from benchmarks.client import HOST
from benchmarks.side_by_side.models import (
    ARGUMENTS,
    CALL_ID,
    CHAIN,
    MODELS,
    PACE,
    PACED,
    PLAIN,
    QUESTION,
    TOOL,
    TOOL_NAME,
    TURNS,
    make_chain_pieces,
    make_pieces,
)

# An unpaced upstream flushes this many tokens at a time.
TOKENS_A_WRITE = 10

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MODEL = re.compile(rb'"model": ?"([^"]+)"')
_STREAM = re.compile(rb'"stream": ?true')
# The number in the ids of prepared answers. Each answer gets its own: servers store items by their ids.
_ID = 0xABCDEF << 152
_ID_DIGITS = b"%044x" % _ID
_CHAT, _RESPONSES = "/v1/chat/completions", "/v1/responses"


class Prepared(NamedTuple):
    """The writes of an answer, and the seconds between them."""

    writes: Sequence[bytes]
    pace: float = 0.0


Key = tuple[str, str, int, bool]
"""Path, model, number of questions (0 except for the model of chains) and `stream`."""


def prepare_answers() -> dict[Key, Prepared]:
    answers: dict[Key, Prepared] = {}
    batches = [make_pieces()[start : start + TOKENS_A_WRITE] for start in range(0, len(make_pieces()), TOKENS_A_WRITE)]
    _add_text(answers, PLAIN, 0, batches)
    _add_text(answers, PACED, 0, [[piece] for piece in make_pieces()], pace=PACE)
    for number in range(1, TURNS + 1):
        _add_text(answers, CHAIN, number, [make_chain_pieces(number)])
    call = ToolCall(key=0, name=TOOL_NAME, arguments=ARGUMENTS, call_id=CALL_ID)
    _add(answers, _RESPONSES, TOOL, 0, upstream.make_response_answers(TOOL, _ID, [[call, *_end()]]))
    _add(answers, _CHAT, TOOL, 0, _make_chat_call())
    return answers


def _add_text(answers: dict[Key, Prepared], model: str, number: int, reads: list[list[str]], pace: float = 0.0) -> None:
    deltas: list[list[Delta]] = [[Text(piece) for piece in pieces] for pieces in reads]
    deltas[-1] += _end()
    _add(answers, _RESPONSES, model, number, upstream.make_response_answers(model, _ID, deltas), pace)
    _add(answers, _CHAT, model, number, upstream.make_chat_answers(model, reads), pace)


def _end() -> list[Delta]:
    return [TokenUsage(Usage(10, 20, 30)), Finish()]


def _add(
    answers: dict[Key, Prepared],
    path: str,
    model: str,
    number: int,
    pair: tuple[Sequence[bytes], Sequence[bytes]],
    pace: float = 0.0,
) -> None:
    streamed, whole = pair
    answers[path, model, number, True] = Prepared(streamed, pace)
    answers[path, model, number, False] = Prepared(whole)


def _make_chat_call() -> tuple[Sequence[bytes], Sequence[bytes]]:
    function = {"name": TOOL_NAME, "arguments": ARGUMENTS}
    call = {"id": CALL_ID, "type": "function", "function": function}
    usage = {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}

    def encode(choices: list[dict[str, Any]], kind: str, **more: Any) -> bytes:
        answer = {"id": "chatcmpl-1", "object": kind, "created": 1_760_000_000, "model": TOOL, "choices": choices}
        return json.dumps(answer | more, separators=(",", ":")).encode()

    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    # The name comes first, then the arguments.
    first = {"index": 0} | call | {"function": {"name": TOOL_NAME, "arguments": ""}}
    deltas = (
        {"role": "assistant", "content": None, "tool_calls": [first]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS}}]},
        {},
    )
    chunks = [
        encode([{"index": 0, "delta": delta, "finish_reason": reason}], "chat.completion.chunk")
        for delta, reason in zip(deltas, (None, None, "tool_calls"), strict=True)
    ]
    chunks.append(encode([], "chat.completion.chunk", usage=usage))
    events = [*(b"data: %b\n\n" % chunk for chunk in chunks), b"data: [DONE]\n\n"]
    return upstream.make_stream([events]), upstream.make_whole(encode([choice], "chat.completion", usage=usage))


def _give_ids(answer: Prepared) -> Prepared:
    digits = secrets.token_hex(22).encode()
    return Prepared([write.replace(_ID_DIGITS, digits) for write in answer.writes], answer.pace)


class Connection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self, answers: dict[Key, Prepared]) -> None:
        self._answers = answers
        self._received = bytearray()
        self._timer: asyncio.Handle | None = None

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
            self._write(self._find_answer(request, end), 0)

    def _find_answer(self, request: bytes, end: int) -> Prepared:
        method, target = request.split(b" ", 2)[:2]
        if method == b"GET":
            models = [{"id": model, "object": "model", "created": 0, "owned_by": "benchmarks"} for model in MODELS]
            return Prepared(upstream.make_whole(json.dumps({"object": "list", "data": models}).encode()))
        found = _MODEL.search(request, end)
        model = found[1].decode() if found else ""
        number = request.count(QUESTION, end) if model == CHAIN else 0
        key = (target.decode(), model, number, bool(_STREAM.search(request, end)))
        if key in self._answers:
            answer = self._answers[key]
            return _give_ids(answer) if key[0] == _RESPONSES else answer
        refusal = json.dumps({"error": {"message": f"no answer for {key}", "type": "invalid_request_error"}})
        return Prepared(upstream.make_whole(refusal.encode(), status="400 Bad Request"))

    def _write(self, answer: Prepared, index: int) -> None:
        self._transport.write(answer.writes[index])
        index += 1
        if index == len(answer.writes):
            return
        loop = asyncio.get_running_loop()
        if answer.pace:
            self._timer = loop.call_later(answer.pace, self._write, answer, index)
        else:
            self._timer = loop.call_soon(self._write, answer, index)


async def serve(port: int) -> None:
    answers = prepare_answers()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers), HOST, port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
