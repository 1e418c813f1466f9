"""Answers of upstreams: event streams, JSON bodies, broken and idle connections."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.errors import RateLimited, UpstreamError, UpstreamTimeout
from antiphon.offload import LARGE_BYTES
from antiphon.protocol.response import Usage
from antiphon.stream import sse
from antiphon.stream.deltas import Delta, Finish, Text
from antiphon.stream.limits import AnswerLimits
from antiphon.stream.sse import SseMessage
from antiphon.upstream import delta_stream
from antiphon.upstream.delta_stream import DeltaStream
from antiphon.upstream.error_mapping import make_broken_stream_error
from support.upstream_client import connect
from support.upstream_server import HANG_UP, RESET, STALL, Piece, Raw, Reply, json_of, stream_of


class WholeReader:
    """Takes every message for an answer, and ends with the stream."""

    def __init__(self) -> None:
        self.finished = False
        self.received: list[SseMessage] = []

    @property
    def is_complete(self) -> bool:
        return False

    def read(self, message: SseMessage) -> Sequence[Delta]:
        self.received.append(message)
        return [Text(message.data.decode())]

    def end(self) -> Sequence[Delta]:
        self.finished = bool(self.received)
        return [Finish()] if self.finished else []


async def read(conn: Any) -> list[Delta]:
    deltas = await conn.upstream.stream("/chat", b"{}", WholeReader)
    return [delta async for batch in deltas for delta in batch]


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json", "text/plain", None])
@pytest.mark.parametrize(
    ("pieces", "deltas"),
    [
        ([b"data: a\n\n"], [Text("a"), Finish()]),
        ([b"\xef\xbb\xbf", b"data: a\n\n"], [Text("a"), Finish()]),
        ([b"\xef", b"\xbb\xbfdata: a\n\n"], [Text("a"), Finish()]),
        ([b"\n\xef\xbb", b"\xbfdata: a\n\n"], [Text("a"), Finish()]),
        ([b"\n", b"\n", b": alive\n\n", b"event: x\ndata: a\n\n"], [Text("a"), Finish()]),
        ([b"data: a"], [Text("a"), Finish()]),
        ([b' {"a": ', b"1}\n"], [Text(' {"a": 1}\n'), Finish()]),
        ([b"\r\n", b" ", b"[1]"], [Text("[1]"), Finish()]),
        ([b'\xef\xbb\xbf{"a": 1}'], [Text('{"a": 1}'), Finish()]),
        ([b"\xef", b'\xbb\xbf{"a": 1}'], [Text('{"a": 1}'), Finish()]),
        ([rb'data: "\ud83d"' + b"\n\n", rb'data: "\ude00"' + b"\n\n"], [Text('""'), Text(r'"\ud83d\ude00"'), Finish()]),
    ],
)
async def test_first_byte_separates_stream_from_json_body(
    content_type: str | None, pieces: Any, deltas: list[Delta]
) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    async with connect(Reply(headers=headers, pieces=pieces), stream_retries=0) as conn:
        assert await read(conn) == deltas


@pytest.mark.parametrize("pieces", [[], [b" \n "], [b"OK"], [b": alive\n\n"]])
async def test_empty_answer_is_an_error(pieces: Any) -> None:
    async with connect(stream_of(*pieces), stream_retries=0) as conn:
        with pytest.raises(UpstreamError, match="before the answer ended"):
            await read(conn)


async def test_error_in_json_body_is_raised() -> None:
    async with connect(json_of({"error": {"message": "Slow down.", "code": 429}}), stream_retries=0) as conn:
        with pytest.raises(RateLimited, match=r"^Slow down\.$"):
            await read(conn)


@pytest.mark.parametrize("body", [b'{"a": ' * 100_000, b"\xff" * 10, b'{"a": "\xff"}', b"[" * 2_000_000])
async def test_unreadable_body_is_an_error(body: bytes) -> None:
    async with connect(Reply(body=body), stream_retries=0) as conn:
        with pytest.raises(UpstreamError, match="before the answer ended"):
            await read(conn)


@pytest.mark.parametrize("end", [b"\n\n", b""])
async def test_large_message_is_read_in_order(end: bytes) -> None:
    large = b"x" * (LARGE_BYTES + 1)
    async with connect(stream_of(b"data: a\n\ndata: b\n\ndata: ", large, end), stream_retries=0) as conn:
        assert await read(conn) == [Text("a"), Text("b"), Text(large.decode()), Finish()]


async def test_large_json_body_is_read() -> None:
    body = b'{"a": "' + b"x" * LARGE_BYTES + b'"}'
    async with connect(Reply(body=body), stream_retries=0) as conn:
        assert await read(conn) == [Text(body.decode()), Finish()]


async def test_large_message_that_arrives_at_its_timeout_is_read() -> None:
    text = "x" * LARGE_BYTES
    response: Any = Reads([b'{"choices":[{"delta":{"content":"%b"}}]}' % text.encode()], 1)
    response.split(100)
    stream = DeltaStream(response, ChatReader(Quirks(), estimate=lambda _: ZERO), secrets=())
    stream.set_idle_timeout(0)
    assert [await stream.read(), await stream.read(), await stream.read()] == [(), [], [Text(text)]]


async def test_endless_message_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sse.SseDecoder.__init__.__kwdefaults__, "limit", 100)
    async with connect(stream_of(b"data: " + b"x" * 200)) as conn:
        with pytest.raises(UpstreamError, match="larger than 100 bytes"):
            await read(conn)


async def read_limited(conn: Any, **limits: int) -> list[Delta]:
    deltas = await conn.upstream.stream("/chat", b"{}", WholeReader, limits=AnswerLimits(**limits))
    return [delta async for batch in deltas for delta in batch]


async def test_endless_body_is_an_error() -> None:
    async with connect(Reply(pieces=[b'{"a": "', b"x" * 200])) as conn:
        with pytest.raises(UpstreamError, match=r"limit of 100 bytes \(setting 'max_answer_bytes'\)") as raised:
            await read_limited(conn, max_answer_bytes=100)
        assert (raised.value.code, len(conn.server.requests)) == ("answer_too_large", 1)  # not retried


async def test_bytes_of_a_stream_are_limited_apart_from_envelopes() -> None:
    short, long = b"data: " + b"x" * 100 + b"\n\n", b"data: " + b"x" * 500 + b"\n\n"
    async with connect(stream_of(*[short] * 50), stream_of(*[long] * 50)) as conn:
        assert len(await read_limited(conn, max_answer_bytes=1000)) == 51
        with pytest.raises(UpstreamError, match="max_answer_bytes"):
            await read_limited(conn, max_answer_bytes=1000)


async def test_events_of_a_stream_are_limited() -> None:
    async with connect(stream_of(*[b"data: x\n\n"] * 11)) as conn:
        with pytest.raises(UpstreamError, match=r"limit of 10 events \(setting 'max_answer_events'\)"):
            await read_limited(conn, max_answer_events=10)


async def test_json_with_too_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.upstream.delta_stream.MAX_JSON_VALUES", 1000)
    many = b'{"a": [' + b"{}," * 1000 + b"{}]}"
    for reply in (Reply(pieces=[many]), stream_of(b"data: %b\n\n" % many)):
        async with connect(reply) as conn:
            with pytest.raises(UpstreamError, match="more than 1000 JSON values"):
                await read(conn)


class BrittleReader(WholeReader):
    """One that breaks at the word `x`."""

    def read(self, message: SseMessage) -> Sequence[Delta]:
        if message.data == b"x":
            raise RateLimited("Enough.")
        return super().read(message)


@pytest.mark.parametrize("cut", [[b"data: b\n\ndata: x\n\n"], [b"data: b\n\n", b"data: x\n\n"]])
async def test_deltas_before_an_error_arrive_at_any_chunk_boundary(cut: list[bytes]) -> None:
    more = asyncio.Event()
    async with connect(stream_of(b"data: a\n\n", more, *cut, b"data: c\n\n")) as conn:
        deltas = await conn.upstream.stream("/chat", b"{}", BrittleReader)
        more.set()
        received: list[Delta] = []
        with pytest.raises(RateLimited, match="Enough"):
            async for batch in deltas:
                received += batch
        await deltas.aclose()
    assert received == [Text("a"), Text("b")]


class UnfinishedReader(WholeReader):
    def end(self) -> Sequence[Delta]:
        return ()


@pytest.mark.parametrize("last", [b"data: b\n\n", b"data: b\n", b"data: b"])
async def test_deltas_before_a_broken_end_arrive(last: bytes) -> None:
    more = asyncio.Event()
    async with connect(stream_of(b"data: a\n\n", more, last)) as conn:
        deltas = await conn.upstream.stream("/chat", b"{}", UnfinishedReader)
        more.set()
        received: list[Delta] = []
        with pytest.raises(UpstreamError, match="before the answer ended"):
            async for batch in deltas:
                received += batch
        await deltas.aclose()
    assert received == [Text("a"), Text("b")]


async def test_stream_broken_in_first_deltas_is_retried() -> None:
    async with connect(stream_of(b"data: a\n\ndata: x\n\n"), stream_of(b"data: b\n\n")) as conn:
        deltas = await conn.upstream.stream("/chat", b"{}", BrittleReader)
        assert [delta async for batch in deltas for delta in batch] == [Text("b"), Finish()]


class TrustingReader(WholeReader):
    def read(self, message: SseMessage) -> Sequence[Delta]:
        return [Text(json.loads(message.data)["text"].lower())]


@pytest.mark.parametrize("data", [b"{}", b'{"text": 5}', b"[]", b"nonsense", b"[" * 100_000])
async def test_reader_exception_becomes_upstream_error(data: bytes) -> None:
    async with connect(stream_of(b"data: " + data + b"\n\n"), stream_retries=0) as conn:
        with pytest.raises(UpstreamError, match="cannot be read"):
            await conn.upstream.stream("/chat", b"{}", TrustingReader)


class StrictReader(WholeReader):
    def read(self, message: SseMessage) -> Sequence[Delta]:
        return [Text(msgspec.json.decode(message.data, type=str))]


@pytest.mark.parametrize(
    ("data", "reader", "cause"),
    [(b"{}", TrustingReader, KeyError), (b"{}", StrictReader, None), (b'"\xff"', StrictReader, None)],
    ids=["reader", "shape", "encoding"],
)
async def test_only_reader_defect_is_the_cause_of_an_error(data: bytes, reader: Any, cause: type | None) -> None:
    """An error with a cause is logged with its traceback."""
    async with connect(stream_of(b"data: " + data + b"\n\n"), stream_retries=0) as conn:
        with pytest.raises(UpstreamError) as caught:
            await conn.upstream.stream("/chat", b"{}", reader)
    assert type(caught.value.__cause__) is (cause or type(None))
    assert caught.value.message.startswith("The upstream sent a message that cannot be read")


async def test_unreadable_message_is_described() -> None:
    async with connect(stream_of(b"data: 5\n\n"), stream_retries=0) as conn:
        with pytest.raises(UpstreamError, match=r"cannot be read: Expected `str`, got `int`\.$"):
            await conn.upstream.stream("/chat", b"{}", StrictReader)


class ConcludingReader(WholeReader):
    """A full stop is the end of what there is to say; who says it may still add something."""

    @property
    def is_complete(self) -> bool:
        return any(message.data == b"." for message in self.received)

    def end(self) -> Sequence[Delta]:
        if not self.is_complete:
            raise make_broken_stream_error()
        return super().end()


async def read_to_the_end(conn: Any) -> list[Delta]:
    deltas = await conn.upstream.stream("/chat", b"{}", ConcludingReader)
    return [delta async for batch in deltas for delta in batch]


@pytest.mark.parametrize("end", [RESET, HANG_UP, STALL])
@pytest.mark.parametrize("content", [[b"data: a\n\n", b"data: .\n\n"], [b"data: .\n\n"]])
async def test_complete_answer_survives_any_end_of_stream(
    monkeypatch: pytest.MonkeyPatch, content: list[bytes], end: Piece
) -> None:
    monkeypatch.setattr(delta_stream, "FINAL_IDLE_TIMEOUT", 0.01)
    async with connect(stream_of(*content, end), stream_retries=0) as conn:
        deltas = await read_to_the_end(conn)
    assert deltas == [*(Text(piece[6:-2].decode()) for piece in content), Finish()]


async def test_idle_timeout_limits_wait_after_complete_answer() -> None:
    async with connect(stream_of(b"data: a\n\n", b"data: .\n\n", STALL), idle_timeout=0.01) as conn:
        assert await read_to_the_end(conn) == [Text("a"), Text("."), Finish()]


@pytest.mark.parametrize(
    ("end", "error", "words"),
    [
        (RESET, UpstreamError, "before the answer ended"),
        (HANG_UP, UpstreamError, "before the answer ended"),
        (STALL, UpstreamTimeout, "stopped sending"),
    ],
)
async def test_incomplete_answer_fails_with_the_reason_of_its_end(
    end: Piece, error: type[UpstreamError], words: str
) -> None:
    async with connect(stream_of(b"data: a\n\n", end), idle_timeout=0.01) as conn:
        with pytest.raises(error, match=words):
            await read_to_the_end(conn)


@pytest.mark.parametrize(
    ("end", "error"), [(RESET, UpstreamError), (HANG_UP, UpstreamError), (STALL, UpstreamTimeout)], ids=str
)
async def test_reader_end_is_called_only_after_a_closed_stream(end: Piece, error: type[UpstreamError]) -> None:
    async with connect(stream_of(b"data: a\n\n", end), idle_timeout=0.01) as conn:
        with pytest.raises(error):
            await read(conn)


MOMENT = 0.05


async def test_invalid_chunk_ends_the_body() -> None:
    more = asyncio.Event()
    async with connect(stream_of(b"data: a\n\n", more, Raw(b"this is no chunk\r\n"), STALL)) as conn:
        deltas = await conn.begin()
        assert await anext(deltas) == [Text("a")]
        more.set()
        with pytest.raises(UpstreamError, match="before the answer ended"):
            await anext(deltas)


async def test_idle_timeout_ignores_a_slow_consumer() -> None:
    stalled = stream_of(b"data: x\n\n", STALL)
    pauses = [asyncio.Event(), asyncio.Event()]
    slow_answer = stream_of(b"data: a\n\n", pauses[0], b"data: b\n\n", pauses[1], b"data: [DONE]\n\n")
    async with connect(slow_answer, stalled, stalled, stalled, idle_timeout=MOMENT) as conn:
        slow = await conn.begin()
        assert await anext(slow) == [Text("a")]
        pauses[0].set()
        assert await anext(slow) == [Text("b")]  # its clock runs from here
        for _ in range(3):  # each takes as long as a server may be silent
            other = await conn.begin()
            assert await anext(other) == [Text("x")]
            with pytest.raises(UpstreamTimeout, match="stopped sending"):
                await anext(other)
        pauses[1].set()
        assert await anext(slow) == [Finish()]
        await slow.aclose()


# Several texts in one read

PARTS = [
    b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
    *(b'{"choices":[{"delta":{"content":"%b"}}]}' % text for text in (b"a", rb"\n", rb"\ud83d", rb"\ude00", b"b")),
    b'{"choices":[{"delta":{"content":"c"}}],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}',
    b'{"choices":[{"delta":{"reasoning_content":"d"}}]}',
    b'{"choices":[{"delta":{"content":"e"}}]}',
    b'{"choices":[{"delta":{},"finish_reason":"stop"}]}',
    b"[DONE]",
    b'{"choices":[{"delta":{"content":"late"}}]}',
]


class Reads:
    """A response with this many messages a read."""

    def __init__(self, messages: Sequence[bytes], size: int) -> None:
        lines = [b"data: %b\n\n" % message for message in messages]
        self._pieces = [b"".join(lines[start : start + size]) for start in range(0, len(lines), size)]
        self.is_exhausted = False

    def split(self, size: int) -> None:
        """Return the first read in two parts. The first one has this many bytes."""
        self._pieces[:1] = [self._pieces[0][:size], self._pieces[0][size:]]

    def take(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def set_idle_timeout(self, seconds: float) -> None:
        pass


def read_chat(messages: Sequence[bytes], size: int, **limits: int) -> list[object]:
    """Return the deltas of a Chat Completions stream with `size` messages a read, and the error that ends it."""
    reader = ChatReader(Quirks(), estimate=lambda _: ZERO)
    response: Any = Reads(messages, size)
    stream = DeltaStream(response, reader, secrets=(), limits=AnswerLimits(**limits))
    read: list[object] = []
    try:
        while not stream.finished:
            read += stream.take() or ()
    except UpstreamError as error:
        read.append(error.message)
    return read


ZERO = Usage(0, 0, 0)


@pytest.mark.parametrize("size", [2, 3, 5, 100])
async def test_texts_of_one_read_equal_those_of_single_reads(size: int) -> None:
    expected = read_chat(PARTS, 1)
    assert [delta.text for delta in expected if isinstance(delta, Text)] == ["a", "\n", "\U0001f600", "b", "c", "e"]
    assert read_chat(PARTS, size) == expected


@pytest.mark.parametrize(
    "broken", [b'{"error":{"message":"Out of memory."}}', b"{", b'{"choices":[{"delta":{"content":"\xff"}}]}']
)
@pytest.mark.parametrize("size", [2, 100])
async def test_texts_before_an_error_in_one_read_are_emitted(broken: bytes, size: int) -> None:
    messages = [*PARTS[:3], broken, PARTS[1]]
    expected = read_chat(messages, 1)
    assert expected[:2] == [Text("a"), Text("\n")]
    assert isinstance(expected[-1], str)
    assert read_chat(messages, size) == expected


async def test_texts_of_one_read_are_counted_as_events() -> None:
    texts = [PARTS[1]] * 5
    message = "The answer was cut off: it exceeds the limit of 4 events (setting 'max_answer_events')."
    assert (read_chat(texts, 1, max_answer_events=4))[-1] == message
    assert (read_chat(texts, 5, max_answer_events=4))[-1] == message
    assert (read_chat(texts[:2] + texts[:3], 2, max_answer_events=4))[-1] == message
