"""Bodies that are read and written without a coroutine."""

import asyncio

from antiphon.server.http import READ_BODY, WRITE_BODY, Receive, Scope, Send
from antiphon.server.uvicorn_protocol import HttpProtocol
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


POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n"


async def test_take_extension_returns_a_whole_body_once() -> None:
    taken: list[bytes | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        take = scope["extensions"][READ_BODY]["take"]
        taken.extend((take(), take()))
        await send(make_start(LENGTH))
        await send(make_body(b"one"))

    await answer(app, POST + b"abc")
    await answer(app, GET)
    assert taken == [b"abc", None, None, None]


async def test_take_extension_leaves_a_part_of_a_body_to_receive() -> None:
    received: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.append(scope["extensions"][READ_BODY]["take"]())
        received.extend([await receive(), await receive()])
        await send(make_start(LENGTH))
        await send(make_body(b"one"))

    connection, _ = connect_app(app)
    connection.data_received(POST + b"a")
    await asyncio.sleep(0)
    connection.data_received(b"bc")
    await asyncio.gather(*connection.tasks)
    connection.connection_lost(None)
    assert received == [
        None,
        {"type": "http.request", "body": b"a", "more_body": True},
        {"type": "http.request", "body": b"bc", "more_body": False},
    ]


async def test_respond_extension_sends_one_whole_response() -> None:
    sent: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        respond = scope["extensions"][WRITE_BODY]["respond"]
        sent.extend((respond(200, [LENGTH], b"one"), respond(200, [LENGTH], b"two")))

    transport = await answer(app, GET)
    assert (sent, transport.written) == ([True, False], [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none"])


async def test_respond_extension_refuses_what_send_must_handle() -> None:
    sent: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        respond = scope["extensions"][WRITE_BODY]["respond"]
        sent.append(respond(200, [LENGTH], b"one"))
        if scope["method"] == "HEAD":
            await send(make_start(LENGTH))
            await send(make_body(b""))

    await answer(app, GET.replace(b"GET", b"HEAD"))
    for lose in (lambda each: each.flow.pause_writing(), lambda each: each.connection_lost(None)):
        connection, _ = connect_app(app)
        connection.data_received(GET)
        lose(connection)
        tasks = asyncio.gather(*connection.tasks)
        await asyncio.sleep(0)
        connection.flow.resume_writing()
        await tasks
    assert sent == [False, False, False]


async def test_response_of_a_request_with_close_closes_the_connection() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"][WRITE_BODY]["respond"](200, [LENGTH], b"one")

    transport = await answer(app, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\n"
    assert (transport.written, transport.closed) == ([head + b"one"], True)


async def test_pipelined_requests_are_answered_in_order_at_any_split() -> None:
    bodies: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = scope["extensions"][READ_BODY]["take"]() or b""
        while len(body) < 3:
            body += (await receive())["body"]
        bodies.append(body)
        scope["extensions"][WRITE_BODY]["respond"](200, [LENGTH], body)

    # The second request offers HTTP/2, as Java's client does.
    offer = POST.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    data = POST + b"one" + offer + b"two"
    line = len(POST) + 3 + offer.index(b"\r\nUpgrade: h2c")
    for position in range(len(data)):
        if line < position < line + len(b"\r\nUpgrade: h2c\r\n"):
            continue  # an offer is found only in one piece
        bodies.clear()
        connection, transport = connect_app(app)
        for part in (data[:position], data[position:]):
            connection.data_received(part)
            while connection.tasks:
                await asyncio.sleep(0)
                if _waits(connection):
                    break
        assert (bodies, b"".join(transport.written).count(b"200 OK")) == ([b"one", b"two"], 2)
        connection.connection_lost(None)


def _waits(connection: HttpProtocol) -> bool:
    """Return True if the request waits for the rest of its body."""
    return connection.cycle.more_body


async def test_each_request_line_is_read_at_any_split() -> None:
    lines: list[tuple[str, str, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        lines.append((scope["method"], scope["path"], scope["http_version"]))
        scope["extensions"][WRITE_BODY]["respond"](200, [LENGTH], b"one")

    expected = [
        ("GET", "/", "1.1"),
        ("GET", "/", "1.1"),
        ("PUT", "/", "1.1"),
        ("GET", "/a", "1.1"),
        ("GET", "/a", "1.0"),
    ]
    requests = [f"{method} {path} HTTP/{version}\r\nHost: a\r\n\r\n".encode() for method, path, version in expected]
    data = b"".join(requests)
    splits = [requests, *((data[:position], data[position:]) for position in range(len(data)))]
    for parts in splits:
        lines.clear()
        connection, _ = connect_app(app)
        for part in parts:
            connection.data_received(part)
            for _ in requests:  # a pipelined request starts when the one before it has ended
                await asyncio.gather(*connection.tasks)
        connection.connection_lost(None)
        assert lines == expected
