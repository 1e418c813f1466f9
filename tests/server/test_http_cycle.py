"""Streamed bodies that are written without a coroutine."""

import asyncio

from antiphon.server.http import WRITE_BODY, Receive, Scope, Send
from support.http_connection import GET, LENGTH, answer, connect_app, make_body, make_start


async def test_write_extension_sends_parts_only_within_a_streamed_body() -> None:
    sent: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        write = scope["extensions"][WRITE_BODY]["write"]
        sent.append(write(b"early"))
        await send(make_start())
        sent.append(write(b"before the head"))
        await send(make_body(b"one", more=True))
        sent.extend((write(b"two"), write(b"")))
        await send(make_body(b"."))
        sent.append(write(b"late"))

    transport = await answer(app, GET)
    assert sent == [False, False, True, False, False]
    assert transport.written == [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n",
        b"3\r\ntwo\r\n",
        b"1\r\n.\r\n0\r\n\r\n",
    ]


async def test_write_extension_refuses_when_the_write_would_wait() -> None:
    gate = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(make_start())
        await send(make_body(b"one", more=True))
        await gate.wait()

    connection, transport = connect_app(app)
    connection.data_received(GET)
    await asyncio.sleep(0)
    connection.flow.pause_writing()
    assert not connection.write_body(b"paused")
    connection.flow.resume_writing()
    assert connection.write_body(b"resumed")
    connection.data_received(GET)  # it waits for the response to the first request
    assert not connection.write_body(b"pipelined")
    connection.connection_lost(None)
    assert not connection.write_body(b"lost")
    gate.set()
    await asyncio.gather(*connection.tasks)
    assert transport.written[1:] == [b"7\r\nresumed\r\n"]


async def test_write_extension_refuses_a_body_with_a_length() -> None:
    sent: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(make_start(LENGTH))
        await send(make_body(b"o", more=True))
        sent.append(scope["extensions"][WRITE_BODY]["write"](b"x"))
        await send(make_body(b"ne"))

    transport = await answer(app, GET)
    assert (sent, b"".join(transport.written)[-7:]) == ([False], b"\r\n\r\none")
