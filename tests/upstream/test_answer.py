"""What an answer may look like, read off a real connection."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from antiphon.errors import ModelError, RateLimited, UpstreamError, UpstreamTimeout
from antiphon.stream import sse
from antiphon.stream.deltas import Delta, Finish, Text
from antiphon.stream.sse import SseMessage
from antiphon.upstream import delta_stream
from antiphon.upstream.error_mapping import make_broken_stream_error
from support.upstream_server import HANG_UP, RESET, STALL, Piece, Reply, json_of, stream_of


class WholeReader:
    """Takes every message for an answer, and ends with the stream."""

    def __init__(self) -> None:
        self.finished = False
        self.heard: list[SseMessage] = []

    @property
    def is_complete(self) -> bool:
        return False

    def read(self, message: SseMessage) -> Sequence[Delta]:
        self.heard.append(message)
        return [Text(message.data.decode())]

    def end(self) -> Sequence[Delta]:
        self.finished = bool(self.heard)
        return [Finish()] if self.finished else []


async def read(line: Any) -> list[Delta]:
    deltas = await line.upstream.stream("/chat", b"{}", WholeReader)
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
async def test_a_stream_is_told_from_a_whole_body_by_its_beginning(
    connect: Any, content_type: str | None, pieces: Any, deltas: list[Delta]
) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    async with connect(Reply(headers=headers, pieces=pieces), stream_retries=0) as line:
        assert await read(line) == deltas


@pytest.mark.parametrize("pieces", [[], [b" \n "], [b"OK"], [b": alive\n\n"]])
async def test_an_answer_that_says_nothing_is_an_error(connect: Any, pieces: Any) -> None:
    async with connect(stream_of(*pieces), stream_retries=0) as line:
        with pytest.raises(UpstreamError, match="before the answer ended"):
            await read(line)


async def test_an_error_in_a_whole_body_is_raised_as_what_it_is(connect: Any) -> None:
    async with connect(json_of({"error": {"message": "Slow down.", "code": 429}}), stream_retries=0) as line:
        with pytest.raises(RateLimited, match=r"^Slow down\.$"):
            await read(line)


@pytest.mark.parametrize("body", [b'{"a": ' * 100_000, b"\xff" * 10, b'{"a": "\xff"}', b"[" * 2_000_000])
async def test_nonsense_is_an_error(connect: Any, body: bytes) -> None:
    async with connect(Reply(body=body), stream_retries=0) as line:
        with pytest.raises(UpstreamError, match="before the answer ended"):
            await read(line)


async def test_a_message_without_end_is_not_collected_for_ever(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sse.SseDecoder.__init__.__kwdefaults__, "limit", 100)
    async with connect(stream_of(b"data: " + b"x" * 200)) as line:
        with pytest.raises(ModelError, match="larger than 100 bytes"):
            await read(line)


async def test_a_body_without_end_is_not_collected_for_ever(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.upstream.delta_stream.MAX_BODY_SIZE", 100)
    async with connect(Reply(pieces=[b'{"a": "', b"x" * 200])) as line:
        with pytest.raises(UpstreamError, match="larger than 100 bytes"):
            await read(line)


class BrittleReader(WholeReader):
    """One that breaks at the word `x`."""

    def read(self, message: SseMessage) -> Sequence[Delta]:
        if message.data == b"x":
            raise RateLimited("Enough.")
        return super().read(message)


@pytest.mark.parametrize("cut", [[b"data: b\n\ndata: x\n\n"], [b"data: b\n\n", b"data: x\n\n"]])
async def test_words_before_an_error_are_told_wherever_the_stream_is_cut(connect: Any, cut: list[bytes]) -> None:
    more = asyncio.Event()
    async with connect(stream_of(b"data: a\n\n", more, *cut, b"data: c\n\n")) as line:
        deltas = await line.upstream.stream("/chat", b"{}", BrittleReader)
        more.set()
        told: list[Delta] = []
        with pytest.raises(RateLimited, match="Enough"):
            async for batch in deltas:
                told += batch
        await deltas.aclose()
    assert told == [Text("a"), Text("b")]


class UnfinishedReader(WholeReader):
    def end(self) -> Sequence[Delta]:
        return ()


@pytest.mark.parametrize("last", [b"data: b\n\n", b"data: b\n", b"data: b"])
async def test_the_last_words_before_the_end_are_told_too(connect: Any, last: bytes) -> None:
    more = asyncio.Event()
    async with connect(stream_of(b"data: a\n\n", more, last)) as line:
        deltas = await line.upstream.stream("/chat", b"{}", UnfinishedReader)
        more.set()
        told: list[Delta] = []
        with pytest.raises(UpstreamError, match="before the answer ended"):
            async for batch in deltas:
                told += batch
        await deltas.aclose()
    assert told == [Text("a"), Text("b")]


async def test_an_answer_that_breaks_off_in_its_first_words_is_asked_for_again(connect: Any) -> None:
    async with connect(stream_of(b"data: a\n\ndata: x\n\n"), stream_of(b"data: b\n\n")) as line:
        deltas = await line.upstream.stream("/chat", b"{}", BrittleReader)
        assert [delta async for batch in deltas for delta in batch] == [Text("b"), Finish()]


class TrustingReader(WholeReader):
    def read(self, message: SseMessage) -> Sequence[Delta]:
        return [Text(json.loads(message.data)["text"].lower())]


@pytest.mark.parametrize("data", [b"{}", b'{"text": 5}', b"[]", b"nonsense", b"[" * 100_000])
async def test_what_a_reader_stumbles_over_is_an_error_of_the_upstream(connect: Any, data: bytes) -> None:
    async with connect(stream_of(b"data: " + data + b"\n\n"), stream_retries=0) as line:
        with pytest.raises(UpstreamError, match="cannot be read"):
            await line.upstream.stream("/chat", b"{}", TrustingReader)


class ConcludingReader(WholeReader):
    """A full stop is the end of what there is to say; who says it may still add something."""

    @property
    def is_complete(self) -> bool:
        return any(message.data == b"." for message in self.heard)

    def end(self) -> Sequence[Delta]:
        if not self.is_complete:
            raise make_broken_stream_error()
        return super().end()


async def read_to_the_end(line: Any) -> list[Delta]:
    deltas = await line.upstream.stream("/chat", b"{}", ConcludingReader)
    return [delta async for batch in deltas for delta in batch]


@pytest.mark.parametrize("end", [RESET, HANG_UP, STALL])
@pytest.mark.parametrize("said", [[b"data: a\n\n", b"data: .\n\n"], [b"data: .\n\n"]])
async def test_an_answer_that_is_whole_does_not_fail_however_its_stream_ends(
    connect: Any, monkeypatch: pytest.MonkeyPatch, said: list[bytes], end: Piece
) -> None:
    monkeypatch.setattr(delta_stream, "FINAL_IDLE_TIMEOUT", 0.01)
    async with connect(stream_of(*said, end), stream_retries=0) as line:
        told = await read_to_the_end(line)
    assert told == [*(Text(piece[6:-2].decode()) for piece in said), Finish()]


async def test_what_follows_a_whole_answer_is_waited_for_no_longer_than_anything(connect: Any) -> None:
    async with connect(stream_of(b"data: a\n\n", b"data: .\n\n", STALL), idle_timeout=0.01) as line:
        assert await read_to_the_end(line) == [Text("a"), Text("."), Finish()]


@pytest.mark.parametrize(
    ("end", "error", "words"),
    [
        (RESET, UpstreamError, "before the answer ended"),
        (HANG_UP, UpstreamError, "before the answer ended"),
        (STALL, UpstreamTimeout, "stopped sending"),
    ],
)
async def test_an_answer_that_is_not_whole_fails_for_the_reason_that_its_stream_ended(
    connect: Any, end: Piece, error: type[UpstreamError], words: str
) -> None:
    async with connect(stream_of(b"data: a\n\n", end), idle_timeout=0.01) as line:
        with pytest.raises(error, match=words):
            await read_to_the_end(line)


@pytest.mark.parametrize(
    ("end", "error"), [(RESET, UpstreamError), (HANG_UP, UpstreamError), (STALL, UpstreamTimeout)], ids=str
)
async def test_only_who_closes_the_stream_may_end_an_answer_that_is_not_concluded(
    connect: Any, end: Piece, error: type[UpstreamError]
) -> None:
    async with connect(stream_of(b"data: a\n\n", end), idle_timeout=0.01) as line:
        with pytest.raises(error):
            await read(line)
