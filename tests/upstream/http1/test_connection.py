"""Responses over real sockets: framing, hostile servers, limits."""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.errors import UpstreamError
from antiphon.upstream.http1 import connection
from support.raw_server import (
    Handler,
    Peer,
    count_connections,
    fetch,
    fetch_once,
    open_session,
    read_all,
    reply,
    reply_always,
    serve_raw,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = CHUNKED + b"2\r\nhe\r\n3;name=value\r\nllo\r\n0\r\nX-Trailer: 1\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nhello"
OLD = b"HTTP/1.0 200 OK\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\nContent-Length: 3\r\n\r\n"

NOT_HTTP = "not valid HTTP"
BROKEN = "closed before the answer ended"
CLOSED = "closed the connection"


@pytest.mark.parametrize("answer", [OK, CHUNKS, UNTIL_CLOSE, OLD, INTERIM + OK, INTERIM + CHUNKS])
async def test_response_split_at_every_byte_is_read(answer: bytes) -> None:
    assert await fetch_once(reply(*(answer[at : at + 1] for at in range(len(answer))))) == b"hello"


@pytest.mark.parametrize("answer", [OK, CHUNKS, UNTIL_CLOSE, INTERIM + OK])
async def test_response_split_in_two_at_every_point_is_read(answer: bytes) -> None:
    handlers = [reply(answer[:at], answer[at:]) for at in range(1, len(answer))]
    async with serve_raw(*handlers) as server:
        for _ in handlers:
            async with open_session(server.url) as session:
                assert await fetch(session) == b"hello"


@pytest.mark.parametrize("answer", [OK, CHUNKS, INTERIM + OK])
@pytest.mark.parametrize("is_reset", [True, False])
async def test_connection_lost_at_any_point_is_an_error(answer: bytes, is_reset: bool) -> None:
    def cut(at: int) -> Handler:
        async def handle(peer: Peer) -> None:
            await peer.answer(answer[:at])
            if is_reset:
                peer.reset()

        return handle

    head_size = answer.index(b"\r\n\r\n", answer.index(b"200 OK")) + 4
    async with serve_raw(*map(cut, range(len(answer)))) as server:
        for at in range(len(answer)):
            async with open_session(server.url) as session:
                with pytest.raises(UpstreamError, match=CLOSED if at < head_size else BROKEN):
                    await fetch(session)
                assert count_connections(session) == 0


async def test_reset_of_body_without_length_is_an_error() -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(UNTIL_CLOSE)
        peer.reset()

    with pytest.raises(UpstreamError, match=BROKEN):
        await fetch_once(handle)


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"\x00\x01\x02",
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 000 No\r\n\r\n",
        b"HTTP/1.1 99 No\r\n\r\n",
        b"HTTP/1.1 2000 No\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: a\rb\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n Content-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\n: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0x5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_invalid_head_is_an_error(answer: bytes) -> None:
    async with serve_raw(reply(answer)) as server, open_session(server.url) as session:
        with pytest.raises(UpstreamError, match=NOT_HTTP):
            await fetch(session)
        assert count_connections(session) == 0


@pytest.mark.parametrize(
    "body",
    [
        b"no chunk\r\n",
        b"5\nhello\n0\n\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"5 0\r\nhello\r\n0\r\n\r\n",
        b"\r\nhello\r\n0\r\n\r\n",
        b"4\r\nhello\r\n0\r\n\r\n",
        b"5;a=b\n\r\nhello\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\nhello",
        b"5\r\nhello\r\n0\r\nX: a\n\r\n",
        b"5\r\nhello\r\n0\r\nContent-Length: 5\r\n\r\n",
        b"5\r\nhello\r\n0\r\n X: folded\r\n\r\n",
    ],
)
async def test_invalid_chunks_are_an_error(body: bytes) -> None:
    async with serve_raw(reply(CHUNKED + body)) as server, open_session(server.url) as session:
        with pytest.raises(UpstreamError, match=BROKEN):
            await fetch(session)
        assert count_connections(session) == 0


@pytest.mark.parametrize("body", [b"5  \r\nhello\r\n0\r\n\r\n", b"5\r\nhello\r\n0  \r\n\r\n"])
async def test_padded_chunk_sizes_are_accepted(body: bytes) -> None:
    async with serve_raw(reply_always(CHUNKED + body)) as server, open_session(server.url) as session:
        assert [await fetch(session) for _ in range(2)] == [b"hello"] * 2
        assert server.connections == 1


async def test_huge_chunk_that_ends_early_is_an_error() -> None:
    with pytest.raises(UpstreamError, match=BROKEN):
        await fetch_once(reply(CHUNKED + b"ffffffffffffffff\r\nhello"))


async def test_body_shorter_than_its_length_is_an_error() -> None:
    with pytest.raises(UpstreamError, match=BROKEN):
        await fetch_once(reply(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello"))


async def test_part_before_an_error_is_read_first() -> None:
    async with serve_raw(reply(CHUNKED + b"5\r\nhello\r\nbroken")) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        assert await response.read() == b"hello"
        with pytest.raises(UpstreamError, match=BROKEN):
            await response.read()
        response.close()


@pytest.mark.parametrize(
    "surplus",
    [OK, b"more", b"\x00", b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged", b"HTTP/1.1 200"],
)
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("answer", [OK, CHUNKS])
async def test_connection_with_surplus_bytes_is_not_reused(answer: bytes, surplus: bytes, is_split: bool) -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(*([answer, surplus] if is_split else [answer + surplus]))
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        for _ in range(3):
            assert await fetch(session) == b"hello"
            for _ in range(10):
                await asyncio.sleep(0)
        assert server.connections == 3


@pytest.mark.parametrize(
    ("answer", "body", "is_reused"),
    [
        (OK, b"hello", True),
        (CHUNKS, b"hello", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", b"", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"", True),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello", b"hello", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello", False),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", b"hello", False),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"", False),
    ],
)
async def test_connection_is_reused_if_the_response_allows_it(answer: bytes, body: bytes, is_reused: bool) -> None:
    async with serve_raw(reply_always(answer)) as server, open_session(server.url) as session:
        assert [await fetch(session) for _ in range(3)] == [body] * 3
        assert server.connections == (1 if is_reused else 3)


async def test_not_modified_has_no_body() -> None:
    answer = b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"
    async with serve_raw(reply_always(answer)) as server, open_session(server.url) as session:
        for _ in range(2):
            with pytest.raises(UpstreamError, match=r"^status 304: $"):
                await fetch(session)
        assert server.connections == 1


async def test_response_to_head_has_no_body() -> None:
    handle = reply_always(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    async with serve_raw(handle) as server, open_session(server.url) as session:
        assert [await fetch(session, "HEAD", None) for _ in range(2)] == [b"", b""]


async def test_trailers_are_not_headers() -> None:
    answer = CHUNKED + b"5\r\nhello\r\n0\r\nRetry-After: 5\r\n\r\n"
    async with serve_raw(reply(answer)) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        assert await read_all(response) == b"hello"
    # The trailer arrived before the headers were decoded.
    assert "retry-after" not in response.headers


async def test_headers_of_interim_responses_are_dropped() -> None:
    async with serve_raw(reply(INTERIM + OK)) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        assert (response.status, dict(response.headers)) == (200, {"content-length": "5"})
        response.close()


ENDLESS: list[tuple[bytes, bytes, str]] = [
    (b"HTTP/1.1 200 OK\r\n", b"X-Filler: %b\r\n" % (b"x" * 1000), NOT_HTTP),
    (b"HTTP/1.1 200 OK\r\nX-Filler: ", b"x" * 1000, NOT_HTTP),
    (b"HTTP/1.1 200 ", b"x" * 1000, NOT_HTTP),
    (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 40, NOT_HTTP),
    (CHUNKED + b"5", b";name=value" * 100, BROKEN),
    (CHUNKED + b"5\r\nhello\r\n0\r\n", b"X-Trailer: %b\r\n" % (b"x" * 1000), BROKEN),
    (CHUNKED + b"5\r\nhello\r\n0\r\nX-Trailer: ", b"x" * 1000, BROKEN),
]


@pytest.mark.parametrize(("start", "rest", "message"), ENDLESS)
async def test_endless_head_or_framing_is_an_error(start: bytes, rest: bytes, message: str) -> None:
    sent = 0

    async def handle(peer: Peer) -> None:
        nonlocal sent
        await peer.answer(start)
        while True:
            await peer.send(rest)
            sent += len(rest)

    async with serve_raw(handle) as server, open_session(server.url) as session:
        with pytest.raises(UpstreamError, match=message):
            await fetch(session)
        await server.until_closed(1)
    assert sent < 3 * connection.MAX_HEAD_SIZE


async def test_reading_pauses_while_the_reader_does_not_read() -> None:
    """The server offers 100 MB. The client takes no more than its buffer and those of the sockets."""
    sent = 0
    part = b"10000\r\n%b\r\n" % (b"x" * 0x10000)

    async def handle(peer: Peer) -> None:
        nonlocal sent
        await peer.read_request()
        peer.writer.write(CHUNKED)
        for _ in range(1600):
            peer.writer.write(part)
            await peer.writer.drain()
            sent += 1

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        last = -1
        while sent > last:  # until the server cannot send any more
            last = sent
            for _ in range(100):
                await asyncio.sleep(0)
        held: Any = response._connection
        assert held._buffered <= connection.MAX_BUFFER_SIZE + 512 * 1024
        assert sent < 400
        size = 0
        while chunk := await response.read():
            assert len(chunk) <= connection.MAX_BUFFER_SIZE + 512 * 1024
            size += len(chunk)
            if size > 50 * 1024 * 1024:
                break
        response.close()
        assert count_connections(session) == 0


async def test_paused_connection_that_is_closed_returns_its_buffer_first() -> None:
    async def handle(peer: Peer) -> None:
        await peer.read_request()
        peer.writer.write(CHUNKED)
        while True:
            peer.writer.write(b"10000\r\n%b\r\n" % bytes(0x10000))
            await peer.writer.drain()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        held: Any = response._connection
        for _ in range(10_000):
            if held._is_paused:
                break
            await asyncio.sleep(0)
        held.abort()
        assert len(await response.read()) > connection.MAX_BUFFER_SIZE
        with pytest.raises(UpstreamError, match=BROKEN):
            await response.read()
        response.close()


async def test_slow_reader_gets_the_whole_body() -> None:
    body = bytes(range(256)) * 8192

    async def handle(peer: Peer) -> None:
        await peer.read_request()
        peer.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        chunks = []
        while chunk := await response.read():
            chunks.append(chunk)
            for _ in range(5):
                await asyncio.sleep(0)
        response.close()
        assert b"".join(chunks) == body
        assert count_connections(session) == 1


async def test_connection_with_unread_body_is_reused_when_complete() -> None:
    async with serve_raw(reply_always(OK)) as server, open_session(server.url) as session:
        for _ in range(3):
            (await session.send("POST", "/chat", b"{}")).close()
        assert server.connections == 1


async def test_early_response_to_large_upload_is_read() -> None:
    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        with pytest.raises(UpstreamError, match=r"^status 413: big$"):
            await fetch(session, body=bytes(64 * 1024 * 1024))
        assert count_connections(session) == 0  # half of a request was sent


async def test_large_upload_with_interim_response_is_complete() -> None:
    received = b""

    async def handle(peer: Peer) -> None:
        nonlocal received
        head = await peer.read_head()
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        received = await peer.reader.readexactly(8 * 1024 * 1024)
        assert b"Content-Length: 8388608\r\n" in head
        await peer.send(OK)
        await peer.until_closed()

    body = bytes(range(256)) * 32768
    async with serve_raw(handle) as server, open_session(server.url) as session:
        assert await fetch(session, body=body) == b"hello"
        assert received == body
        assert count_connections(session) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_body_in_any_chunks_is_read_unchanged(data: st.DataObject) -> None:
    body = data.draw(st.binary(max_size=2000))
    wire = CHUNKED + b"".join(
        b"%x%b\r\n%b\r\n" % (len(part), extension, part)
        for part, extension in _cut(data, body, st.sampled_from([b"", b";a", b';a="b"']))
    )
    wire += b"0\r\n\r\n"
    parts = [part for part, _ in _cut(data, wire, st.none())]
    if data.draw(st.booleans()):
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
        parts = [part for part, _ in _cut(data, head + body, st.none())]
    assert asyncio.run(fetch_once(reply(*parts))) == body


def _cut(data: st.DataObject, text: bytes, extra: st.SearchStrategy[Any]) -> list[tuple[bytes, Any]]:
    """Cut bytes into parts that are not empty, each with a value from `extra`."""
    points = sorted(data.draw(st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=20)))
    ends = [*points, len(text)]
    parts = [text[start:end] for start, end in zip([0, *points], ends, strict=True)]
    return [(part, data.draw(extra)) for part in parts if part]
