"""Each timeout of a request, on a clock that counts only the time in which the event loop waits."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.errors import UpstreamError, UpstreamTimeout
from antiphon.upstream.http import HttpSession
from support.idle_clock import count_idle_time
from support.raw_server import (
    Handler,
    Peer,
    count_connections,
    fetch,
    open_session,
    read_all,
    reply_always,
    serve_raw,
)

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
START = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LATE = r"^The upstream did not answer in time\.$"
IDLE = r"^The upstream stopped sending before its answer ended\.$"
SECONDS = 0.05


@pytest.fixture(autouse=True)
async def clock() -> None:
    count_idle_time(asyncio.get_running_loop())


def stall_after(*parts: bytes) -> Handler:
    async def handle(peer: Peer) -> None:
        await peer.answer(*parts)
        await peer.until_closed()

    return handle


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (b"HTTP/1.1 200",),
        (b"HTTP/1.1 100 Continue\r\n\r\n",),
        (START,),
        (START, b"5\r\nhello\r\n"),
        (START, b"5\r\nhello\r\n", b"0\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello",),
        (b"HTTP/1.1 500 Failed\r\nContent-Length: 5\r\n\r\n",),
    ],
)
async def test_deadline_ends_a_request_at_any_point(parts: tuple[bytes, ...]) -> None:
    async with serve_raw(stall_after(*parts)) as server, open_session(server.url) as session:
        with pytest.raises(UpstreamTimeout, match=LATE):
            await fetch(session, deadline=now() + SECONDS)
        await server.until_closed(1)
        assert count_connections(session) == 0


async def test_deadline_ends_a_request_whose_body_is_not_taken() -> None:
    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await asyncio.Event().wait()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        with pytest.raises(UpstreamTimeout, match=LATE):
            await fetch(session, body=bytes(64 * 1024 * 1024), deadline=now() + SECONDS)
        assert count_connections(session) == 0


async def test_deadline_ends_a_flood_of_data() -> None:
    """Data in every iteration of the event loop does not put off the deadline. The clock hardly moves in this time."""

    async def handle(peer: Peer) -> None:
        await peer.answer(START)
        while True:
            await peer.send(b"1\r\n.\r\n")

    async with serve_raw(handle) as server, open_session(server.url) as session:
        with pytest.raises(UpstreamTimeout, match=LATE):
            await fetch(session, deadline=now() + SECONDS / 100)


async def test_passed_deadline_fails_at_once() -> None:
    async with serve_raw(stall_after()) as server, open_session(server.url) as session:
        with pytest.raises(UpstreamTimeout, match=LATE):
            await fetch(session, deadline=now() - 1)


async def test_earlier_deadline_replaces_the_timer_of_the_last_request() -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(OK)
        await peer.read_request()
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        assert await fetch(session, deadline=now() + 3600) == b"hello"
        with pytest.raises(UpstreamTimeout, match=LATE):
            await fetch(session, deadline=now() + SECONDS)
        assert server.connections == 1


async def test_later_deadline_outlives_the_timer_of_the_last_request() -> None:
    pause = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.answer(OK)
        await peer.read_request()
        await pause.wait()
        await peer.send(OK)
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        assert await fetch(session, deadline=now() + SECONDS) == b"hello"
        asyncio.get_running_loop().call_later(2 * SECONDS, pause.set)
        assert await fetch(session, deadline=now() + 3600) == b"hello"


async def test_idle_timeout_ends_a_read() -> None:
    async with serve_raw(stall_after(START + b"5\r\nhello\r\n")) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}", deadline=now() + 3600)
        response.clear_deadline()
        response.set_idle_timeout(SECONDS)
        assert await response.read() == b"hello"
        began = now()
        with pytest.raises(UpstreamTimeout, match=IDLE):
            await response.read()
        assert now() - began >= SECONDS
        response.close()
        await server.until_closed(1)


async def test_idle_timeout_starts_anew_with_each_read() -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(START)
        for _ in range(8):
            await asyncio.sleep(SECONDS / 4)
            await peer.send(b"1\r\n.\r\n")
        await peer.send(b"0\r\n\r\n")

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}", deadline=now() + SECONDS)
        response.clear_deadline()
        response.set_idle_timeout(SECONDS)
        assert await read_all(response) == b"." * 8


async def test_framing_without_body_is_idle() -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(START, b"5")
        while True:
            await asyncio.sleep(SECONDS / 4)
            await peer.send(b";x")

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        response.set_idle_timeout(SECONDS)
        with pytest.raises(UpstreamTimeout, match=IDLE):
            await read_all(response)


async def test_time_between_reads_does_not_count() -> None:
    handle = stall_after(START, b"5\r\nhello\r\n", b"0\r\n\r\n")
    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        response.set_idle_timeout(SECONDS)
        await asyncio.sleep(3 * SECONDS)
        assert await read_all(response) == b"hello"


async def test_cancelled_read_does_not_count_as_waiting() -> None:
    more = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.answer(START)
        await more.wait()
        await peer.send(b"5\r\nhello\r\n0\r\n\r\n")

    async with serve_raw(handle) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        response.set_idle_timeout(SECONDS)
        reading = asyncio.create_task(response.read())
        await asyncio.sleep(SECONDS / 2)
        reading.cancel()
        await asyncio.sleep(2 * SECONDS)
        more.set()
        assert await read_all(response) == b"hello"


async def test_idle_timeout_of_one_response_does_not_apply_to_the_next() -> None:
    pause = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.answer(OK)
        await peer.answer(START)
        await pause.wait()
        await peer.send(b"5\r\nhello\r\n0\r\n\r\n")
        await peer.until_closed()

    async with serve_raw(handle) as server, open_session(server.url) as session:
        first = await session.send("POST", "/chat", b"{}")
        first.set_idle_timeout(SECONDS)
        assert await read_all(first) == b"hello"
        second = await session.send("POST", "/chat", b"{}")
        asyncio.get_running_loop().call_later(2 * SECONDS, pause.set)
        assert await read_all(second) == b"hello"
        assert server.connections == 1


async def test_deadline_within_the_connection_attempt_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr("antiphon.upstream.http1.connect.connect_first", never)
    async with open_session("http://127.0.0.1:1/v1") as session:
        with pytest.raises(UpstreamTimeout, match=LATE):
            await fetch(session, deadline=now() + SECONDS)
    async with open_session("http://127.0.0.1:1/v1", connect_timeout=SECONDS) as session:
        with pytest.raises(UpstreamTimeout, match=r"^The connection to the upstream timed out\.$"):
            await fetch(session, deadline=now() + 3600)
        assert count_connections(session) == 0


@pytest.fixture
async def idle() -> AsyncIterator[tuple[Any, HttpSession]]:
    async with serve_raw(reply_always(OK)) as server, open_session(server.url) as session:
        assert await fetch(session) == b"hello"
        yield server, session


async def test_idle_connection_is_closed_after_a_while(
    idle: tuple[Any, HttpSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, session = idle
    assert session._pool is not None
    session._pool._max_idle_seconds = SECONDS
    assert session._pool._sweep_timer is not None
    session._pool._sweep_timer.cancel()
    session._pool._sweep_timer = None
    await asyncio.gather(*(fetch(session) for _ in range(3)))
    assert count_connections(session) == 3
    await server.until_closed(3)
    assert (count_connections(session), session._pool._sweep_timer) == (0, None)


async def test_connection_that_was_idle_too_long_is_not_used(idle: tuple[Any, HttpSession]) -> None:
    server, session = idle
    assert session._pool is not None
    session._pool._max_idle_seconds = 0.0
    assert await fetch(session) == b"hello"
    assert server.connections == 2


async def test_drained_response_that_takes_too_long_closes_its_connection() -> None:
    async with serve_raw(stall_after(START, b"5\r\nhello\r\n")) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        response.drain(seconds=SECONDS)
        await server.until_closed(1)
        assert count_connections(session) == 0


async def test_error_response_without_its_body_is_raised() -> None:
    async def handle(peer: Peer) -> None:
        await peer.answer(b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 5\r\n\r\nhe")

    async with serve_raw(handle) as server, open_session(server.url) as session:
        with pytest.raises(UpstreamError, match=r"^status 503: $") as raised:
            await fetch(session)
        assert raised.value.retry_after == 7
