import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from antiphon.errors import UpstreamError
from antiphon.upstream.http1 import connect
from antiphon.upstream.http1.connect import connect_first
from support.raw_server import count_connections, fetch, open_session, reply_always, serve_raw

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@contextmanager
def listen(family: socket.AddressFamily = socket.AF_INET) -> Iterator[tuple[Any, ...]]:
    """Yield the address information of a socket that accepts connections."""
    host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    with socket.create_server((host, 0), family=family) as server:
        yield (family, socket.SOCK_STREAM, 0, "", server.getsockname())


@contextmanager
def refuse() -> Iterator[tuple[Any, ...]]:
    """Yield the address information of a port that refuses connections."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield (socket.AF_INET, socket.SOCK_STREAM, 0, "", unused.getsockname())


@contextmanager
def ignore() -> Iterator[tuple[Any, ...]]:
    """Yield the address information of a port that does not answer: its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as second:
        address = full.getsockname()
        with socket.create_connection(address):
            second.setblocking(False)
            second.connect_ex(address)
            yield (socket.AF_INET, socket.SOCK_STREAM, 0, "", address)


async def test_next_address_is_tried_after_a_refusal() -> None:
    with refuse() as first, refuse() as second, listen() as third:
        sock = await connect_first([first, second, third], delay=3600)
        assert sock.getpeername() == third[4]
        sock.close()


async def test_next_address_is_tried_while_one_does_not_answer() -> None:
    with ignore() as first, listen() as second, await connect_first([first, second], delay=0.01) as sock:
        assert sock.getpeername() == second[4]


async def test_first_error_is_raised_if_all_addresses_fail() -> None:
    with refuse() as first, refuse() as second, pytest.raises(ConnectionRefusedError):
        await connect_first([first, second])
    with pytest.raises(OSError, match="no address"):
        await connect_first([])


async def test_cancelled_race_closes_its_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    are_both_made = asyncio.Event()

    class Recorded(socket.socket):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)
            if len(made) == 2:
                are_both_made.set()

    with ignore() as first, ignore() as second:
        monkeypatch.setattr("antiphon.upstream.http1.connect.socket.socket", Recorded)
        call = asyncio.create_task(connect_first([first, second], delay=0.001))
        await are_both_made.wait()
        call.cancel()
        await asyncio.wait({call})
        for _ in range(5):
            await asyncio.sleep(0)
        assert [sock.fileno() for sock in made] == [-1, -1]


def test_families_alternate() -> None:
    six, four = socket.AF_INET6, socket.AF_INET
    addresses = [(family, 0, 0, "", number) for number, family in enumerate((six, six, six, four, four))]
    assert [each[4] for each in connect._interleave_families(addresses)] == [0, 3, 1, 4, 2]


async def test_ipv6_address_is_reached() -> None:
    async with serve_raw(reply_always(OK)) as server:
        other = await asyncio.start_server(server.accept, "::1", 0)
        port = other.sockets[0].getsockname()[1]
        async with open_session(f"http://[::1]:{port}/v1") as session:
            assert await fetch(session) == b"hello"
        other.close()


async def test_addresses_are_resolved_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = 0
    with refuse() as closed:
        async with serve_raw(reply_always(OK)) as server:
            opened = (*closed[:4], ("127.0.0.1", server.port))

            async def resolve(*_: Any, **__: Any) -> list[Any]:
                nonlocal lookups
                lookups += 1
                return [closed if lookups == 1 else opened]

            async with open_session("http://somewhere:80/v1") as session:
                monkeypatch.setattr(connect, "resolve_host", resolve)
                with pytest.raises(UpstreamError, match="refuses connections"):
                    await fetch(session)
                await asyncio.gather(*(fetch(session) for _ in range(3)))
                assert lookups == 2
                assert count_connections(session) == 3


async def test_unknown_host_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(connect, "resolve_host", resolve)
    async with open_session("http://nowhere.example/v1") as session:
        with pytest.raises(UpstreamError, match=r"^The upstream's host name could not be resolved\.$"):
            await fetch(session)
        assert count_connections(session) == 0
