"""Reuse of connections, stale connections, cancellation and drained responses."""

import asyncio
import gc
from typing import Any

import pytest

from antiphon.errors import UpstreamError
from antiphon.upstream.http1.connection import MAX_BUFFER_SIZE
from support.raw_server import (
    Peer,
    count_connections,
    count_used_connections,
    fetch,
    open_session,
    read_all,
    reply,
    reply_always,
    serve_raw,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
START = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def settle() -> None:
    """Let both sides handle what has arrived."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_parallel_requests_have_their_own_connections() -> None:
    async with serve_raw(reply_always(OK)) as server, open_session(server.url) as session:
        assert await asyncio.gather(*(fetch(session) for _ in range(10))) == [b"hello"] * 10
        assert await asyncio.gather(*(fetch(session) for _ in range(10))) == [b"hello"] * 10
        assert server.connections == count_connections(session) == 10


async def test_connection_that_the_server_closed_is_not_used() -> None:
    async with serve_raw(reply(OK)) as server, open_session(server.url) as session:
        for number in range(1, 4):
            assert await fetch(session) == b"hello"
            await server.until_closed(number)
            await settle()
            assert count_connections(session) == 0
        assert server.connections == 3


async def test_unsolicited_bytes_close_an_idle_connection() -> None:
    gate = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.answer(OK)
        await gate.wait()
        await peer.send(b"HTTP/1.1 408 Timeout\r\nContent-Length: 0\r\n\r\n")
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        assert await fetch(session) == b"hello"
        gate.set()
        await server.until_closed(1)
        assert await fetch(session) == b"hello"
        assert server.connections == 2


async def close_on_second_request(peer: Peer) -> None:
    await peer.answer(OK)
    await peer.read_request()


async def reset_on_second_request(peer: Peer) -> None:
    await peer.answer(OK)
    await peer.read_request()
    peer.reset()


STALE: list[Any] = [close_on_second_request, reset_on_second_request]


@pytest.mark.parametrize("handle", STALE)
async def test_get_on_a_stale_connection_is_repeated(handle: Any) -> None:
    async with serve_raw(handle, reply_always(OK)) as server, open_session(server.url) as session:
        assert [await fetch(session, "GET", None) for _ in range(2)] == [b"hello"] * 2
        assert server.connections == 2


@pytest.mark.parametrize("handle", STALE)
async def test_post_on_a_stale_connection_is_repeated(handle: Any) -> None:
    async with serve_raw(handle, reply_always(OK)) as server, open_session(server.url) as session:
        assert [await fetch(session) for _ in range(2)] == [b"hello"] * 2
        assert (server.connections, count_connections(session)) == (2, 1)


@pytest.mark.parametrize("handle", STALE)
async def test_request_that_fails_late_is_not_repeated(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway may have waited for its model. The retry policy decides."""
    monkeypatch.setattr("antiphon.upstream.http.STALE_SECONDS", -1.0)
    async with serve_raw(handle, reply_always(OK)) as server, open_session(server.url) as session:
        assert await fetch(session) == b"hello"
        with pytest.raises(UpstreamError, match="closed the connection"):
            await fetch(session)
        assert (server.connections, count_connections(session)) == (1, 0)


async def test_request_is_not_repeated_when_the_session_closes() -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(OK)
        await peer.read_request()
        await peer.until_closed()

    async with serve_raw(handle, reply_always(OK)) as server, open_session(server.url) as session:
        await fetch(session)
        waiting = asyncio.create_task(fetch(session))
        await settle()
        await session.close()
        with pytest.raises(UpstreamError, match="closed the connection"):
            await waiting
        assert server.connections == 1


async def test_get_on_a_new_connection_is_not_repeated() -> None:
    async def handle(peer: Peer) -> None:
        await peer.read_request()

    async with serve_raw(handle, reply_always(OK)) as server, open_session(server.url) as session:
        with pytest.raises(UpstreamError, match="closed the connection"):
            await fetch(session, "GET", None)
        assert server.connections == 1


async def test_get_is_repeated_only_once() -> None:
    async def handle(peer: Peer) -> None:
        await peer.read_request()

    async with serve_raw(close_on_second_request, handle) as server, open_session(server.url) as session:
        assert await fetch(session, "GET", None) == b"hello"
        with pytest.raises(UpstreamError, match="closed the connection"):
            await fetch(session, "GET", None)
        assert server.connections == 2


@pytest.mark.parametrize("start", [b"H", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_get_with_a_started_answer_is_not_repeated(start: bytes) -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(OK)
        await peer.answer(start)

    async with serve_raw(handle, reply_always(OK)) as server, open_session(server.url) as session:
        assert await fetch(session, "GET", None) == b"hello"
        with pytest.raises(UpstreamError, match="closed the connection"):
            await fetch(session, "GET", None)
        assert server.connections == 1


async def test_drained_response_frees_its_connection() -> None:
    gate = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.answer(START + b"5\r\nhello\r\n")
        await gate.wait()
        await peer.send(b"5\r\nmore!\r\n", b"0\r\n", b"\r\n")
        while True:
            await peer.answer(OK)

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        assert await response.read() == b"hello"
        response.drain(seconds=60)
        assert await response.read() == b""
        gate.set()
        await settle()
        assert await fetch(session) == b"hello"
        assert server.connections == 1


async def test_draining_discards_the_buffer_of_a_slow_reader() -> None:
    """A buffer over the limit pauses the socket. Draining must resume it, and not pause it again."""
    large = bytes(MAX_BUFFER_SIZE + 1)

    async def handle(peer: Peer) -> None:
        await peer.answer(START + b"%x\r\n%b\r\n" % (len(large), large))
        await peer.send(b"5\r\nhello\r\n", b"0\r\n\r\n")
        while True:
            await peer.answer(OK)

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        held: Any = response._connection
        for _ in range(1000):
            if held._is_paused:
                break
            await asyncio.sleep(0)
        response.drain(seconds=3600)
        for _ in range(1000):
            if not count_used_connections(session):
                break
            await asyncio.sleep(0)
        assert await fetch(session) == b"hello"
        assert server.connections == 1


async def test_drained_response_that_is_too_large_closes_its_connection() -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(START)
        while True:
            await peer.send(b"1000\r\n%b\r\n" % bytes(0x1000))

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        response.drain(seconds=60)
        await server.until_closed(1)
        assert count_connections(session) == 0


async def test_drained_response_that_breaks_closes_its_connection() -> None:
    async with serve_raw(reply(START, b"nonsense")) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        response.drain(seconds=60)
        await server.until_closed(1)
        await settle()
        assert count_connections(session) == 0


async def test_closing_an_incomplete_response_closes_its_connection() -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(START)
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        response.close()
        response.close()
        assert count_connections(session) == 0
        assert await response.read() == b""
        await server.until_closed(1)


async def test_dropped_response_closes_its_connection() -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(START)
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        del response
        gc.collect()
        await server.until_closed(1)
        assert count_connections(session) == 0


async def test_closing_the_session_fails_waiting_reads() -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(START)
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        reading = asyncio.create_task(read_all(response))
        await settle()
        await session.close()
        with pytest.raises(UpstreamError, match="closed before the answer ended"):
            await reading
        await server.until_closed(1)
        with pytest.raises(UpstreamError, match=r"^The connection to the upstream is closed\.$"):
            await fetch(session)


async def test_closing_the_session_fails_waiting_requests() -> None:
    arrived = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.read_request()
        arrived.set()
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        call = asyncio.create_task(fetch(session))
        await arrived.wait()
        await session.close()
        with pytest.raises(UpstreamError, match="closed the connection"):
            await call


async def test_session_can_be_opened_again() -> None:
    async with serve_raw(reply_always(OK)) as server, open_session(server.url) as session:
        assert await fetch(session) == b"hello"
        await session.close()
        session.open()
        assert await fetch(session) == b"hello"


@pytest.mark.parametrize("reused", [False, True])
async def test_cancellation_after_any_step_frees_the_connection(reused: bool) -> None:
    """Cancel a request after one more iteration of the event loop each time, until it is done before that.

    Only a connection whose response has arrived completely may stay open.
    """
    is_done = False
    steps = 0
    while not is_done:
        steps += 1

        async def handle(peer: Peer) -> None:
            if reused:
                await peer.answer(OK)
            await peer.answer(START, b"5\r\nhello\r\n", b"0\r\n\r\n")
            await peer.until_closed()

        async with serve_raw(handle) as server, open_session(server.url) as session:
            if reused:
                await fetch(session)
            call = asyncio.create_task(fetch(session))
            for _ in range(steps):
                await asyncio.sleep(0)
            is_done = call.done()
            call.cancel()
            await asyncio.wait({call})
            if not is_done:
                assert call.cancelled()
                await settle()
                assert count_used_connections(session) == 0
                await server.until_closed(server.connections - count_connections(session))
    assert steps > 3
